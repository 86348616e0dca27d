-- Stores the outcomes of matches; the first outcome of a match wins.
-- KEYS record, order, matches. ARGV epoch, id, match, id, match, ...
-- Returns written | superseded | missing.
local epoch = redis.call('HGET', KEYS[1], 'epoch')
if not epoch then
  return 'missing'
end
if epoch ~= ARGV[1] then
  return 'superseded'
end
for i = 2, #ARGV, 2 do
  if redis.call('HSETNX', KEYS[3], ARGV[i], ARGV[i + 1]) == 1 then
    redis.call('RPUSH', KEYS[2], ARGV[i])
  end
end
return 'written'
