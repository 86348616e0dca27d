-- Code shared by the scripts that add to a policy's weight versions.
local VERSIONS, CHECKSUMS = BASE .. ':versions', BASE .. ':checksums'

local function newest_entry()
  return redis.call('LINDEX', VERSIONS, -1) or ''
end

-- Steps done and number of the newest version; nil for a policy without versions.
local function newest_version()
  local done, version = newest_entry():match('^(%d+) (%d+)\n')
  return tonumber(done), tonumber(version)
end

-- How a version relates to those known: 'same', 'conflict' (its content differs), or nil (new).
local function known_version(version, checksum)
  local known = redis.call('HGET', CHECKSUMS, version)
  return known and (known == checksum and 'same' or 'conflict')
end

local function add_version(done, version, checksum, entry)
  redis.call('HSET', CHECKSUMS, version, checksum)
  redis.call('RPUSH', VERSIONS, done .. ' ' .. version .. '\n' .. entry)
end
