-- Creates a job unless its id is taken. 1: created; 0: it exists.
-- KEYS record, events, given. ARGV event, given, field, value, field, value, ...
if redis.call('EXISTS', KEYS[1]) == 1 then
  return 0
end
redis.call('HSET', KEYS[1], unpack(ARGV, 3))
redis.call('SET', KEYS[3], ARGV[2])
redis.call('XADD', KEYS[2], '*', 'e', ARGV[1])
return 1
