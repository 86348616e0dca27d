-- Updates the record of a job's population atomically.
-- KEYS record, population. ARGV epoch, field, value, field, value, ...
-- Returns written | superseded | missing.
local epoch = redis.call('HGET', KEYS[1], 'epoch')
if not epoch then
  return 'missing'
end
if epoch ~= ARGV[1] then
  return 'superseded'
end
redis.call('HSET', KEYS[2], unpack(ARGV, 2))
return 'written'
