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
for index = 5, #ARGV, 2 do
  redis.call('HSET', staged, ARGV[index], ARGV[index + 1])
end
redis.call('SADD', STAGES, staged)
return {'staged'}
