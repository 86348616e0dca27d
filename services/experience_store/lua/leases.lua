-- Claims as leases: who holds what, and what happens when a lease ends. Put behind samples.lua.

local function held(claimant)
  return tonumber(redis.call('HGET', HELD, claimant) or 0)
end

-- `claimant` holds so many samples fewer; 0: what it claimed is gone (drop_gone.lua).
local function holds_less(claimant, number)
  if number > 0 and redis.call('HINCRBY', HELD, claimant, -number) <= 0 then
    redis.call('HDEL', HELD, claimant)
  end
end

-- Ends a live claim; its id is never given out again, so that a commit which names it is refused.
local function give_back(claim, cause)
  local claimant = redis.call('HGET', OWNERS, claim)
  local samples = lines(redis.call('HGET', CLAIMS, claim))
  prefetch(samples)
  for _, sample in ipairs(samples) do
    local record = record_of(sample)
    move(sample, record, 'R')
  end
  evict(samples)
  redis.call('HSET', CLAIMS, claim, '\t' .. cause)
  redis.call('ZREM', LEASES, claim)
  holds_less(claimant, #samples)
  changes('claimable')
  return #samples, claimant
end

-- Returns what leases that ran out held, and fences who held them: gradients accumulated under
-- an expired lease must be thrown away.
local function expire(now)
  local returned = 0
  for _, claim in ipairs(redis.call('ZRANGEBYSCORE', LEASES, '-inf', now)) do
    local samples, claimant = give_back(claim, 'expired')
    redis.call('HSET', FENCED, claimant, 'expired')
    returned = returned + samples
  end
  return returned
end

-- Why `claimant` must start over, or false.
local function fence(claimant)
  local cause = redis.call('HGET', FENCED, claimant)
  if cause == 'superseded' then
    -- Superseding concerns whoever was there before; the first to claim afterwards goes on.
    local owner = redis.call('HGET', STEP, 'owner')
    if not owner or owner == claimant then
      return false
    end
  end
  return cause
end
