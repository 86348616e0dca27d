-- Decides how a trajectory ended: the first ending stays, whoever else comes. Where trajectories are
-- redundant the one that completes a group ends the others of its query with it: which belong to the
-- group is decided here, once.
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
  return to and {'carried', to} or {'dropped', left:match('^dropped\t[^\t]*\t(.*)$')}
end
local stored = redis.call('HMGET', STEP, 'group_size', 'redundant')
local group_size, redundant = tonumber(stored[1]), tonumber(stored[2] or 0)
local size = group_size + redundant
if tonumber(ended) >= size then
  if redundant > 0 and tonumber(redis.call('HGET', COMPLETED, query) or 0) >= group_size then
    return {'dropped', 'redundant'}
  end
  return {'full', size}
end
ending = ARGV[4]
local spare = 0
if redundant > 0 and ending:match('^[^\t]*') == 'COMPLETED'
    and redis.call('HINCRBY', COMPLETED, query, 1) == group_size then
  spare = size - tonumber(ended) - 1
  if spare > 0 then
    -- The last field of a records.Ending.
    ending = ending .. spare
  end
  -- Nobody told the names of those that have not ended; no name of theirs has a tab.
  for number = size - spare + 1, size do
    redis.call('HSET', ENDED, query .. '\t' .. number,
      'ABORTED\t\t' .. query .. '\tredundant\t\t')
  end
end
redis.call('HSET', ENDED, trajectory, ending)
redis.call('HINCRBY', STEP, 'ended', 1 + spare)
if redis.call('HINCRBY', QUERIES, query, 1 + spare) == size then
  redis.call('HINCRBY', STEP, 'complete', 1)
end
return {'decided', ending, rosters}
