-- Frees all that one table holds of a step.
-- ARGV: step, 'committed' (nothing happens to a step that is not), or 'all'
if ARGV[2] == 'committed' and redis.call('EXISTS', STEP) == 1 and not committed() then
  return {'live'}
end
for _, trajectory in ipairs(redis.call('HKEYS', ENDED)) do
  redis.call('UNLINK', key('rows') .. ':' .. trajectory)
end
for _, staged in ipairs(redis.call('SMEMBERS', STAGES)) do
  redis.call('UNLINK', staged)
end
redis.call('UNLINK', STEP, ENDED, QUERIES, BOOK, MEMBERS, READY, CLAIMS, OWNERS, LEASES, HELD,
  FENCED, DROPPED, STAGES)
redis.call('HDEL', COMMITS, STEP_NUMBER)
return {'forgotten'}
