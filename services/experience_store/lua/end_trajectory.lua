-- Decides how a trajectory ended: the first ending stays, whoever else comes.
-- ARGV: step, trajectory, query, ending (records.Ending)
if redis.call('EXISTS', STEP) == 0 then
  return {'missing'}
end
local trajectory, query = ARGV[2], ARGV[3]
local ending = redis.call('HGET', ENDED, trajectory)
if ending then
  return {'decided', ending}
end
local ended = redis.call('HGET', QUERIES, query)
if not ended then
  return {'unknown_query'}
end
local group_size = redis.call('HGET', STEP, 'group_size')
if tonumber(ended) >= tonumber(group_size) then
  return {'full', group_size}
end
redis.call('HSET', ENDED, trajectory, ARGV[4])
redis.call('HINCRBY', QUERIES, query, 1)
redis.call('HINCRBY', STEP, 'ended', 1)
return {'decided', ARGV[4]}
