-- Frees the staged rows of an ending that was not the first.
-- ARGV: step, trajectory, attempt
local name = ARGV[2] .. ':' .. ARGV[3]
redis.call('UNLINK', staged_key(name))
redis.call('SREM', STAGES, name)
return {'freed'}
