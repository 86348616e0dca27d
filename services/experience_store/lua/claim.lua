-- Leases ready samples in sample order: a full micro-batch, or the rest once no more can come.
-- ARGV: step, claim, claimant, max samples, max tokens (0: no bound), max bytes, lease in ms
if redis.call('EXISTS', STEP) == 0 then
  return {'missing'}
end
local claim, claimant = ARGV[2], ARGV[3]
local max_samples, max_tokens, max_bytes = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
if committed() then
  return {'exhausted'}
end
local now = now_ms()
expire(now)

-- What the caller needs of samples: their records, and the final rewards of their groups.
local function deliver(samples)
  local records, groups, rewards, seen = {}, {}, {}, {}
  for index, sample in ipairs(samples) do
    local record = record_of(sample)
    records[index] = table.concat(record, '\t')
    local name = record[F.query] .. '\t' .. record[F.group]
    if not seen[name] then
      seen[name] = true
      local values = {}
      for _, member in ipairs(members(record[F.query], record[F.group])) do
        if member[2][F.state] ~= 'D' then
          values[#values + 1] = member[2][F.reward]
        end
      end
      groups[#groups + 1] = name
      rewards[#rewards + 1] = table.concat(values, ',')
    end
  end
  return finish({'claimed', samples, records, groups, rewards})
end

local known = redis.call('HGET', CLAIMS, claim)
if known then
  if known:sub(1, 1) == '\t' then
    return finish({'lost', known:sub(2)})
  elseif redis.call('HGET', OWNERS, claim) ~= claimant then
    return finish({'taken', redis.call('HGET', OWNERS, claim)})
  end
  redis.call('ZADD', LEASES, now + tonumber(ARGV[7]), claim)
  return deliver(lines(known))
end

local cause = fence(claimant)
if cause then
  return finish({'lost', cause})
end

local ready = get('R')
local full = ready >= max_samples
  or (max_tokens > 0 and get('ready_tokens') >= max_tokens)
  or get('ready_bytes') >= max_bytes
local final = sealed() and get('P') == 0
if ready == 0 or not (full or final) then
  if final and get('C') == held(claimant) then
    return finish({'exhausted'})
  end
  -- Nobody announces that a lease runs out: the caller sets its own timer.
  local first = redis.call('ZRANGE', LEASES, 0, 0, 'WITHSCORES')
  return finish({'wait', first[2] and math.max(1, tonumber(first[2]) - now) or 0})
end

local samples, tokens, bytes = {}, 0, 0
for _, sample in ipairs(redis.call('ZRANGE', READY, 0, max_samples - 1)) do
  local record = record_of(sample)
  tokens, bytes = tokens + tonumber(record[F.tokens]), bytes + tonumber(record[F.size])
  if #samples > 0 and ((max_tokens > 0 and tokens > max_tokens) or bytes > max_bytes) then
    break
  end
  move(sample, record, 'C')
  samples[#samples + 1] = sample
end
redis.call('HSET', CLAIMS, claim, table.concat(samples, '\n'))
redis.call('HSET', OWNERS, claim, claimant)
redis.call('ZADD', LEASES, now + tonumber(ARGV[7]), claim)
redis.call('HINCRBY', HELD, claimant, #samples)
redis.call('HDEL', FENCED, claimant)
if redis.call('HSETNX', STEP, 'owner', claimant) == 1 then
  changes('counts')
end
return deliver(samples)
