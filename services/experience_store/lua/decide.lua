-- Decides how trajectories end, once for all tables of a job: the first ending of a trajectory
-- wins. With redundant trajectories the one that completes a group also ends the remaining ones of
-- its query. Works on the job's keys; appended to either prelude (job.lua or policy.lua).

-- Decides endings (records.Ending) of one step; `job` is the base of the job's keys.
local function decider(job, step)
  local at = job .. ':' .. step .. ':'
  local the_step, endings, queries = at .. 'step', at .. 'ended', at .. 'queries'
  local stored = redis.call('HMGET', the_step, 'group_size', 'redundant')
  local group_size, redundant = tonumber(stored[1]), tonumber(stored[2] or 0)
  -- Returned with each decision: it may only be applied to tables that know this roster.
  local rosters = redis.call('GET', job .. ':rosters') or '0'
  return function(trajectory, query, ending)
    if not group_size then
      return {'missing'}
    end
    local known = redis.call('HGET', endings, trajectory)
    if known then
      return {'decided', known, rosters}
    end
    local ended = redis.call('HGET', queries, query)
    if not ended then
      local left = redis.call('HGET', at .. 'left', query)
      if not left then
        return {'unknown_query'}
      end
      local to = left:match('^carried\t(.*)$')
      return to and {'carried', to} or {'dropped', left:match('^dropped\t[^\t]*\t(.*)$')}
    end
    local size = group_size + redundant
    if tonumber(ended) >= size then
      local completed = redundant > 0 and redis.call('HGET', at .. 'completed', query)
      if completed and tonumber(completed) >= group_size then
        return {'dropped', 'redundant'}
      end
      return {'full', size}
    end
    local spare = 0
    if redundant > 0 and ending:match('^[^\t]*') == 'COMPLETED'
        and redis.call('HINCRBY', at .. 'completed', query, 1) == group_size then
      spare = size - tonumber(ended) - 1
      if spare > 0 then
        -- The last field of a records.Ending.
        ending = ending .. spare
      end
      -- The names of trajectories that have not ended are unknown, so each gets a placeholder; a
      -- real name has no tab.
      for number = size - spare + 1, size do
        redis.call('HSET', endings, query .. '\t' .. number,
          'ABORTED\t\t' .. query .. '\tredundant\t\t\t')
      end
    end
    redis.call('HSET', endings, trajectory, ending)
    redis.call('HINCRBY', the_step, 'ended', 1 + spare)
    if redis.call('HINCRBY', queries, query, 1 + spare) == size then
      redis.call('HINCRBY', the_step, 'complete', 1)
    end
    return {'decided', ending, rosters}
  end
end
