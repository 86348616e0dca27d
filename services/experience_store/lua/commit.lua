-- Ends a policy's step: every sample that was not dropped must be held by the claims named here;
-- they become TRAINED (or DROPPED when the step was skipped) and payloads are freed.
-- ARGV: step, claimant, to ('T', 'D', or '' for a step without samples), reason,
--       version (-1: unchanged), whether it must rise (0/1), commit, claim...
local stored = redis.call('HGET', COMMITS, STEP_NUMBER)
if stored then
  return {'existed', stored}
end
if redis.call('EXISTS', STEP) == 0 then
  return {'missing'}
end
local claimant, to, reason, version = ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
expire(now_ms())

local cause = fence(claimant)
for index = 8, #ARGV do
  local claim = ARGV[index]
  local owner = redis.call('HGET', OWNERS, claim)
  if not owner then
    return finish({'lost', claim, 'unknown'})
  elseif owner ~= claimant then
    return finish({'taken', claim, owner})
  end
  local samples = redis.call('HGET', CLAIMS, claim)
  if samples:sub(1, 1) == '\t' then
    return finish({'lost', claim, samples:sub(2)})
  end
end
if cause then
  return finish({'lost', '', cause})
end
if not sealed() then
  return finish({'unsealed', get('ended'), get('expected')})
end
local samples = {}
for index = 8, #ARGV do
  for _, sample in ipairs(lines(redis.call('HGET', CLAIMS, ARGV[index]))) do
    samples[#samples + 1] = sample
  end
end
local left = get('P') + get('R') + get('C') - #samples
if left ~= 0 then
  return finish({'incomplete', get('P'), get('R'), get('C') - #samples})
end
if (#samples == 0) ~= (to == '') then
  return finish({'mismatch', #samples})
end
local latest = tonumber(redis.call('HGET', BASE .. ':head', 'version') or -1)
if version >= 0 and (version < latest or (version == latest and ARGV[6] == '1')) then
  return finish({'backwards', latest})
end

for _, sample in ipairs(samples) do
  local record = record_of(sample)
  if to == 'D' then
    drop(sample, record, reason)
  else
    move(sample, record, 'T')
  end
end
local commit = #samples .. '\n' .. ARGV[7]
redis.call('HSET', COMMITS, STEP_NUMBER, commit)
if version >= 0 then
  redis.call('HSET', BASE .. ':head', 'version', version, 'step', STEP_NUMBER)
end
for _, trajectory in ipairs(redis.call('HKEYS', ENDED)) do
  redis.call('UNLINK', key('rows') .. ':' .. trajectory)
end
for _, staged in ipairs(redis.call('SMEMBERS', STAGES)) do
  redis.call('UNLINK', staged)
end
redis.call('UNLINK', STAGES, READY, CLAIMS, OWNERS, LEASES, HELD, FENCED)
changes('claimable')
return finish({'committed', commit})
