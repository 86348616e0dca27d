-- The rows of an ending that is not decided yet are here: sent ahead of this, with their records, and
-- noted under STAGES, because no script needs to look at them, and each would copy them twice.
-- Repeatable.
-- ARGV: step, trajectory, attempt
local staged = key('staged') .. ':' .. ARGV[2] .. ':' .. ARGV[3]
local known = redis.call('EXISTS', STEP) == 1
if not known or redis.call('HEXISTS', ENDED, ARGV[2]) == 1 then
  redis.call('UNLINK', staged)
  redis.call('SREM', STAGES, staged)
  return {known and 'ended' or 'missing'}
end
-- Once more: its query may have been carried, with what was staged, since the rows came.
redis.call('SADD', STAGES, staged)
return {'staged'}
