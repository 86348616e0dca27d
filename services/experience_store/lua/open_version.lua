-- Records a policy's first weights. Once it has a version, nothing changes.
-- ARGV: steps done (0), version, checksum, entry. Returns {opened | same | conflict, newest entry}.
local known = known_version(ARGV[2], ARGV[3])
if known or newest_version() then
  return {known or 'same', newest_entry()}
end
add_version(ARGV[1], ARGV[2], ARGV[3], ARGV[4])
return {'opened', newest_entry()}
