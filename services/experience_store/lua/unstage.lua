-- Frees the staged rows of an ending that was not the first.
-- ARGV: step, trajectory, attempt
local staged = key('staged') .. ':' .. ARGV[2] .. ':' .. ARGV[3]
redis.call('UNLINK', staged)
redis.call('SREM', STAGES, staged)
return {'freed'}
