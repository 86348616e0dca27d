-- Drops samples of a live claim whose values by reference are lost on all hosts. The claim keeps
-- its other samples, if any. Idempotent.
-- ARGV: step, claim, claimant, sample...
drains()
if redis.call('EXISTS', STEP) == 0 then
  return {'missing'}
end
local claim, claimant = ARGV[2], ARGV[3]
if committed() then
  return {'lost', 'unknown'}
end
expire()
local owner = redis.call('HGET', OWNERS, claim)
if not owner then
  return finish({'lost', 'unknown'})
elseif owner ~= claimant then
  return finish({'taken', owner})
end
local held_now = redis.call('HGET', CLAIMS, claim)
if held_now:sub(1, 1) == '\t' then
  return finish({'lost', held_now:sub(2)})
end
local gone, kept, dropped = {}, {}, 0
for index = 4, #ARGV do
  gone[ARGV[index]] = true
end
for _, sample in ipairs(lines(held_now)) do
  if gone[sample] then
    drop(sample, record_of(sample), VALUE_GONE)
    dropped = dropped + 1
  else
    kept[#kept + 1] = sample
  end
end
if dropped > 0 then
  redis.call('HSET', CLAIMS, claim, table.concat(kept, '\n'))
  holds_less(claimant, dropped)
end
return finish({'dropped', dropped})
