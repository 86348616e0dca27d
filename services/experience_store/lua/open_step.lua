-- Admits a step under the job's tag: the first call decides what it consists of.
-- ARGV: step, group_size, versions (JSON), queries (JSON), query...
if redis.call('EXISTS', STEP) == 1 then
  return {'existed', redis.call('HGET', STEP, 'group_size'), redis.call('HGET', STEP, 'queries')}
end
local queries = #ARGV - 4
redis.call('HSET', STEP, 'group_size', ARGV[2], 'expected', queries * tonumber(ARGV[2]),
  'versions', ARGV[3], 'queries', ARGV[4], 'ended', 0)
for index = 5, #ARGV do
  redis.call('HSET', QUERIES, ARGV[index], 0)
end
redis.call('ZADD', STEPS, STEP_NUMBER, STEP_NUMBER)
redis.call('ZADD', LIVE, STEP_NUMBER, STEP_NUMBER)
return {'opened', ARGV[2], ARGV[4]}
