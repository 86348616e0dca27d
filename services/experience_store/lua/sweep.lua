-- Returns the samples of expired leases, and reports the progress of the table.
-- ARGV: step
if redis.call('EXISTS', STEP) == 0 then
  return {'missing'}
end
if committed() then
  return {'committed', 0, get('ended')}
end
local returned = expire()
return finish({'live', returned, get('ended')})
