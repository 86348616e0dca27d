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
for i = 2, #ARGV, 2 do -- one by one: `unpack` takes less than 8,000 values
  redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1])
end
return 'written'
