-- Moves a job to another state and logs it, if the transition is allowed.
-- KEYS record, events.
-- ARGV target, allowed sources as ",1,2,", epoch or "", event, cap of the log, field, value, ...
-- A field written as "?field" is set only once: while it is 0.0.
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
for i = 6, #ARGV, 2 do
  local field = string.match(ARGV[i], '^%?(.*)')
  if not field then
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
  elseif redis.call('HGET', KEYS[1], field) == '0.0' then
    redis.call('HSET', KEYS[1], field, ARGV[i + 1])
  end
end
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[5], '*', 'e', ARGV[4])
return {'moved', state}
