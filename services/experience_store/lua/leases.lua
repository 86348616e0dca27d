-- Claims as leases: which claimant holds which samples, and the end of a lease. Appended to
-- samples.lua.

-- Milliseconds by which the clock below advances at most between two scripts: three sweeps.
local MOST_TICK = 15000

-- Milliseconds of the clock that times the step's leases. The wall clock of Redis drives it, but a
-- jump of the wall clock neither ends nor prolongs leases. While no script runs nobody can renew a
-- lease, so none ends.
local function lease_now()
  local wall = now_ms()
  local last = redis.call('HMGET', STEP, 'wall', 'clock')
  local clock = tonumber(last[2]) or wall
  clock = clock + math.min(math.max(0, wall - (tonumber(last[1]) or wall)), MOST_TICK)
  redis.call('HSET', STEP, 'wall', string.format('%.0f', wall), 'clock', string.format('%.0f', clock))
  return clock
end

local function held(claimant)
  return tonumber(redis.call('HGET', HELD, claimant) or 0)
end

-- Reduces the number of samples that `claimant` holds; 0: all that it claimed are lost
-- (drop_gone.lua).
local function holds_less(claimant, number)
  if number > 0 and redis.call('HINCRBY', HELD, claimant, -number) <= 0 then
    redis.call('HDEL', HELD, claimant)
  end
end

-- Ends a live claim. Its id is never given out again, so a commit that names it is refused.
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

-- Returns the samples of expired leases, and fences their claimants: gradients accumulated under an
-- expired lease must be discarded.
local function expire()
  if redis.call('EXISTS', LEASES) == 0 then
    return 0
  end
  local returned = 0
  for _, claim in ipairs(redis.call('ZRANGEBYSCORE', LEASES, '-inf', lease_now())) do
    local samples, claimant = give_back(claim, 'expired')
    redis.call('HSET', FENCED, claimant, 'expired')
    returned = returned + samples
  end
  return returned
end

-- The reason why `claimant` must start its step over, or false.
local function fence(claimant)
  local cause = redis.call('HGET', FENCED, claimant)
  if cause == 'superseded' then
    -- Superseding fences the earlier claimants; the first to claim afterwards becomes the owner.
    local owner = redis.call('HGET', STEP, 'owner')
    if not owner or owner == claimant then
      return false
    end
  end
  return cause
end
