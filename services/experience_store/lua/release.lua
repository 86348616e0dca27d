-- Returns claimed samples: those of one claimant, which starts afresh, or of all claimants, which
-- are then superseded: the first to claim again owns the step, and the others are refused.
-- Idempotent.
-- ARGV: step, claimant (or '' for all)
if redis.call('EXISTS', STEP) == 0 then
  return {'missing'}
end
if committed() then
  return {'released', 0}
end
local claimant = ARGV[2]
expire()
local released = 0
for _, claim in ipairs(redis.call('ZRANGE', LEASES, 0, -1)) do
  local owner = redis.call('HGET', OWNERS, claim)
  if claimant == '' or owner == claimant then
    released = released + give_back(claim, claimant == '' and 'superseded' or 'released')
  end
end
if claimant == '' then
  for _, owner in ipairs(redis.call('HVALS', OWNERS)) do
    redis.call('HSET', FENCED, owner, 'superseded')
  end
  redis.call('HDEL', STEP, 'owner')
elseif fence(claimant) ~= 'superseded' then
  redis.call('HDEL', FENCED, claimant)
end
return finish({'released', released})
