-- Frees the rows of an ending that lost.
-- ARGV: step, trajectory, attempt
local staged = key('staged') .. ':' .. ARGV[2] .. ':' .. ARGV[3]
redis.call('UNLINK', staged)
redis.call('SREM', STAGES, staged)
return {'freed'}
