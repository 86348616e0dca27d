-- Moves a policy to its next version without a step. A known version changes nothing.
-- ARGV: steps done, version, checksum, entry.
-- Returns {restarted | same | conflict | gap, newest entry}.
local known = known_version(ARGV[2], ARGV[3])
if known then
  return {known, newest_entry()}
end
local done, version = newest_version()
if done ~= tonumber(ARGV[1]) or version + 1 ~= tonumber(ARGV[2]) then
  return {'gap', newest_entry()}
end
add_version(ARGV[1], ARGV[2], ARGV[3], ARGV[4])
return {'restarted', newest_entry()}
