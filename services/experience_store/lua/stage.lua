-- Registers the staged rows of an undecided ending under STAGES. The rows and their records were
-- sent ahead with plain commands, since a script would copy them twice without reading them.
-- Idempotent.
-- ARGV: step, trajectory, attempt
local name = ARGV[2] .. ':' .. ARGV[3]
local known = redis.call('EXISTS', STEP) == 1
if not known or redis.call('HEXISTS', ENDED, ARGV[2]) == 1 then
  redis.call('UNLINK', staged_key(name))
  redis.call('SREM', STAGES, name)
  return {known and 'ended' or 'missing'}
end
-- Checked again: the query, with its staged rows, may have been carried since the rows were sent.
redis.call('SADD', STAGES, name)
return {'staged'}
