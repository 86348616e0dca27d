-- Prelude of every script on a job's keys. KEYS[1]: the job's base; ARGV[1]: the step.

local BASE, STEP_NUMBER = KEYS[1], ARGV[1]

local function key_of(step, name)
  return BASE .. ':' .. step .. ':' .. name
end

local function key(name)
  return key_of(STEP_NUMBER, name)
end

local STEP, ENDED, QUERIES = key('step'), key('ended'), key('queries')
-- Queries that left the step ('dropped TAB trajectories that had not ended TAB reason', or
-- 'carried TAB step'), and those that came from another ('step').
local LEFT, CAME = key('left'), key('came')
-- Number of COMPLETED trajectories of each query; only with redundant trajectories.
local COMPLETED = key('completed')
local STEPS, LIVE = BASE .. ':steps', BASE .. ':live'
-- Number of roster changes so far: a policy's table records up to which one it knows them.
local ROSTERS = BASE .. ':rosters'
