-- Writes the rows of an ending that is not decided yet. Repeatable.
-- ARGV: step, trajectory, attempt, records (one line each), sample, payload, sample, payload...
if redis.call('EXISTS', STEP) == 0 then
  return {'missing'}
end
if redis.call('HEXISTS', ENDED, ARGV[2]) == 1 then
  return {'ended'}
end
local staged = key('staged') .. ':' .. ARGV[2] .. ':' .. ARGV[3]
redis.call('HSET', staged, RECORDS, ARGV[4])
for first = 5, #ARGV, AT_ONCE do
  redis.call('HSET', staged, unpack(ARGV, first, math.min(first + AT_ONCE - 1, #ARGV)))
end
redis.call('SADD', STAGES, staged)
return {'staged'}
