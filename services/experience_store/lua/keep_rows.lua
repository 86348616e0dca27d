-- Keeps a copy of one micro-batch of an open step, under its claimant, until the commit decides.
-- ARGV: step, claimant, index of the micro-batch, its serialized samples
if redis.call('EXISTS', STEP) == 0 then
  return {'missing'}
end
if committed() then
  return {'committed'}
end
local name = key('keeping') .. ':' .. ARGV[2]
local before = redis.call('HSTRLEN', name, ARGV[3])
redis.call('HSET', name, ARGV[3], ARGV[4])
-- Listed, so that other claimants' copies are freed with the step.
redis.call('SADD', KEEPING, name)
weigh(#ARGV[4] - before)
return finish({'kept'})
