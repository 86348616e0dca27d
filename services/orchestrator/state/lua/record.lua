-- Logs measured values once, together with the fields of the record that say so.
-- KEYS record, events, rows, latest.
-- ARGV epoch, guard field, guard value, row, event, cap of the log,
--      n, then n name/value pairs of metrics, then field/value pairs of the record.
-- The guard makes it idempotent: the row is written only while the field holds the value.
-- Returns written | same | superseded | missing.
local epoch = redis.call('HGET', KEYS[1], 'epoch')
if not epoch then
  return 'missing'
end
if epoch ~= ARGV[1] then
  return 'superseded'
end
if (redis.call('HGET', KEYS[1], ARGV[2]) or '') ~= ARGV[3] then
  return 'same'
end
local last = 7 + 2 * tonumber(ARGV[7])
for i = 8, last, 2 do -- one by one: `unpack` takes less than 8,000 values
  redis.call('HSET', KEYS[4], ARGV[i], ARGV[i + 1])
end
redis.call('RPUSH', KEYS[3], ARGV[4])
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[6], '*', 'e', ARGV[5])
redis.call('HSET', KEYS[1], unpack(ARGV, last + 1))
return 'written'
