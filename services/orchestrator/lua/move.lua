-- Moves a job's state and logs it, unless its table forbids the move.
-- KEYS record, events.
-- ARGV target, allowed sources as ",1,2,", epoch or "", event, cap of the log, field, value, ...
-- Returns {outcome, state before}: moved | same | refused | superseded | missing.
local state = redis.call('HGET', KEYS[1], 'state')
if not state then
  return {'missing', ''}
end
if ARGV[3] ~= '' and redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[3] then
  return {'superseded', state}
end
if state == ARGV[1] then
  return {'same', state}
end
if not string.find(ARGV[2], ',' .. state .. ',', 1, true) then
  return {'refused', state}
end
redis.call('HSET', KEYS[1], 'state', ARGV[1])
if #ARGV > 5 then
  redis.call('HSET', KEYS[1], unpack(ARGV, 6))
end
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[5], '*', 'e', ARGV[4])
return {'moved', state}
