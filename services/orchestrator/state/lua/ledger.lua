-- Advances the recorded version of one policy by exactly one step, or changes nothing.
-- KEYS record, ledger, versions, checksums. ARGV policy, steps done, version, checksum, entry, and whether it
-- is a restart (0/1): the next version without a step.
-- Returns {outcome, entry}: moved | same | older | gap | conflict | missing.
if redis.call('EXISTS', KEYS[1]) == 0 then
  return {'missing', ''}
end
local policy, done = ARGV[1], tonumber(ARGV[2])
local entry = redis.call('HGET', KEYS[2], policy .. ':entry') or ''
local now = redis.call('HGET', KEYS[2], policy .. ':done')
local known = redis.call('HGET', KEYS[4], policy .. ':v' .. ARGV[3])
-- A version has one content: the same content is a repeat, different content a conflict.
if known and known ~= ARGV[4] then
  return {'conflict', entry}
end
if ARGV[6] == '1' then
  -- Versions have no gaps, so the newest is the one without a successor.
  local left = redis.call('HGET', KEYS[4], policy .. ':v' .. string.format('%d', ARGV[3] - 1))
  if known then
    return {'same', entry}
  elseif not left or done ~= tonumber(now) then
    return {'gap', entry}
  end
elseif not now then
  if done ~= 0 then
    return {'gap', entry}
  end
elseif done == tonumber(now) then
  return {'same', entry}
elseif done < tonumber(now) then
  return {'older', entry}
elseif done ~= tonumber(now) + 1 then
  return {'gap', entry}
end
redis.call('HSET', KEYS[2], policy .. ':done', ARGV[2], policy .. ':entry', ARGV[5])
redis.call('HSET', KEYS[4], policy .. ':v' .. ARGV[3], ARGV[4])
redis.call('RPUSH', KEYS[3], ARGV[5])
return {'moved', ARGV[5]}
