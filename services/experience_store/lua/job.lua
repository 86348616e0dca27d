-- What every script on a job shares. KEYS[1]: the job's base; ARGV[1]: the step.

local BASE, STEP_NUMBER = KEYS[1], ARGV[1]

local function key(name)
  return BASE .. ':' .. STEP_NUMBER .. ':' .. name
end

local STEP, ENDED, QUERIES = key('step'), key('ended'), key('queries')
local STEPS, LIVE = BASE .. ':steps', BASE .. ':live'
