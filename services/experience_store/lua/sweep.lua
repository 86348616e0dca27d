-- Returns what expired leases hold, and says how far the table is.
-- ARGV: step
if redis.call('EXISTS', STEP) == 0 then
  return {'missing'}
end
if committed() then
  return {'committed', 0, get('ended')}
end
local returned = expire(now_ms())
return finish({'live', returned, get('ended')})
