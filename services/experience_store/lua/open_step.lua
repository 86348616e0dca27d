-- Admits a step under the job's tag. The first call decides its queries.
-- ARGV: step, group_size, versions (JSON), queries (JSON), held open (0/1), cursor,
--       redundant trajectories per query, query...
if redis.call('EXISTS', STEP) == 1 then
  local stored = redis.call('HMGET', STEP, 'group_size', 'opened', 'queries', 'redundant')
  return {'existed', unpack(stored)}
end
local queries, size = #ARGV - 7, tonumber(ARGV[2]) + tonumber(ARGV[7])
redis.call('HSET', STEP, 'group_size', ARGV[2], 'redundant', ARGV[7], 'expected', queries * size,
  'versions', ARGV[3], 'opened', ARGV[4], 'queries', ARGV[4], 'ended', 0, 'complete', 0,
  'cursor', ARGV[6])
if ARGV[5] == '1' then
  redis.call('HSET', STEP, 'held_open', 1)
end
for index = 8, #ARGV do
  redis.call('HSET', QUERIES, ARGV[index], 0)
  ask(ARGV[index])
end
redis.call('ZADD', STEPS, STEP_NUMBER, STEP_NUMBER)
redis.call('ZADD', LIVE, STEP_NUMBER, STEP_NUMBER)
redis.call('INCR', ROSTERS)
return {'opened', ARGV[2], ARGV[4], ARGV[4], ARGV[7]}
