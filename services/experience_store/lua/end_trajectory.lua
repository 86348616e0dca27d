-- Decides how a trajectory ended: the first ending stays, whoever else comes.
-- ARGV: step, trajectory, query, ending (records.Ending)
if redis.call('EXISTS', STEP) == 0 then
  return {'missing'}
end
local trajectory, query = ARGV[2], ARGV[3]
-- Whoever carries the ending out must do so in tables that know the roster.
local rosters = redis.call('GET', ROSTERS) or '0'
local ending = redis.call('HGET', ENDED, trajectory)
if ending then
  return {'decided', ending, rosters}
end
local ended = redis.call('HGET', QUERIES, query)
if not ended then
  local left = redis.call('HGET', LEFT, query)
  if not left then
    return {'unknown_query'}
  end
  local to = left:match('^carried\t(.*)$')
  return to and {'carried', to} or {'dropped'}
end
local group_size = redis.call('HGET', STEP, 'group_size')
if tonumber(ended) >= tonumber(group_size) then
  return {'full', group_size}
end
redis.call('HSET', ENDED, trajectory, ARGV[4])
redis.call('HINCRBY', STEP, 'ended', 1)
if redis.call('HINCRBY', QUERIES, query, 1) == tonumber(group_size) then
  redis.call('HINCRBY', STEP, 'complete', 1)
end
return {'decided', ARGV[4], rosters}
