-- What every script on a job shares. KEYS[1]: the job's base; ARGV[1]: the step.

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
-- Trajectories of each query that COMPLETED; only where some are redundant.
local COMPLETED = key('completed')
local STEPS, LIVE = BASE .. ':steps', BASE .. ':live'
-- How often a roster has changed: a policy's table says which of the changes it knows.
local ROSTERS = BASE .. ':rosters'
