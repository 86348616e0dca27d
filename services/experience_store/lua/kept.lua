-- Code shared by the scripts that end the keeping of rows (keep_rows.lua).
local function bytes_of(name)
  local bytes = 0
  for _, index in ipairs(redis.call('HKEYS', name)) do
    bytes = bytes + redis.call('HSTRLEN', name, index)
  end
  return bytes
end

-- Frees the copies of all claimants of this step, except the copies named `except`.
local function free_keeping(except)
  for _, name in ipairs(redis.call('SMEMBERS', KEEPING)) do
    if name ~= except then
      weigh(-bytes_of(name))
      redis.call('UNLINK', name)
    end
  end
  redis.call('UNLINK', KEEPING)
end

local function kept_key(version)
  return KEPT .. ':' .. version
end

-- Keeps a claimant's copies for the version that its commit makes.
local function keep_for(name, version, commit)
  local bytes = bytes_of(name)
  redis.call('RENAME', name, kept_key(version))
  redis.call('ZADD', KEPT, version, version)
  redis.call('HSET', KEPT .. ':commits', version, commit)
  redis.call('HINCRBY', KEPT .. ':bytes', version, bytes)
end

-- Notes that a version is on disk, and frees the rows kept for it and earlier ones.
local function free_kept(version, checksum)
  local head = BASE .. ':head'
  if version < tonumber(redis.call('HGET', head, 'durable') or -1) then
    return
  end
  redis.call('HSET', head, 'durable', version, 'durable_checksum', checksum)
  for _, old in ipairs(redis.call('ZRANGEBYSCORE', KEPT, '-inf', version)) do
    weigh(-tonumber(redis.call('HGET', KEPT .. ':bytes', old) or 0))
    redis.call('UNLINK', kept_key(old))
    redis.call('HDEL', KEPT .. ':bytes', old)
    redis.call('HDEL', KEPT .. ':commits', old)
  end
  redis.call('ZREMRANGEBYSCORE', KEPT, '-inf', version)
end
