-- Extends all live leases of a claimant. Idempotent.
-- ARGV: step, claimant, lease in ms
drains()
if redis.call('EXISTS', STEP) == 0 then
  return {'missing'}
end
if committed() then
  return {'renewed', 0}
end
expire()
local cause = fence(ARGV[2])
if cause then
  return finish({'lost', cause})
end
local renewed, now = 0, lease_now()
for _, claim in ipairs(redis.call('ZRANGE', LEASES, 0, -1)) do
  if redis.call('HGET', OWNERS, claim) == ARGV[2] then
    redis.call('ZADD', LEASES, now + tonumber(ARGV[3]), claim)
    renewed = renewed + 1
  end
end
return finish({'renewed', renewed})
