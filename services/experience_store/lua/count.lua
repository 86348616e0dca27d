-- Returns the counts of one table for one step, after returning expired leases.
-- ARGV: step
if redis.call('EXISTS', STEP) == 0 then
  return {'missing'}
end
if not committed() then
  expire()
  finish()
end
return {
  'counts',
  redis.call('HGETALL', STEP),
  redis.call('HGETALL', DROPPED),
  redis.call('HGET', COMMITS, STEP_NUMBER) or '',
}
