-- Keeps what a policy's replies add to the joint pairs of a step. The first sums stay: trainers of
-- other policies may have read them.
-- ARGV: step, claimant, the serialized sums, unless the caller only waits for others
drains()
if redis.call('EXISTS', STEP) == 0 then
  return {'missing'}
end
if committed() then
  return {'lost', 'committed'}
end
expire()
local cause = fence(ARGV[2])
if cause then
  return finish({'lost', cause})
end
if ARGV[3] and redis.call('HSETNX', STEP, 'pair_sums', 1) == 1 then
  redis.call('SET', PAIR_SUMS, ARGV[3])
  weigh(#ARGV[3])
  changes('counts')
end
return finish({'given'})
