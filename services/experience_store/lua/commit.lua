-- Ends a policy's step: every sample that was not dropped must be held by the claims named here;
-- they become TRAINED (or DROPPED when the step was skipped) and raw rows are freed, but for those
-- of samples that may be used again, which move to the policy's next step. The result of the step is
-- added to the policy's versions. If no sample is used
-- again no record is written: a sample CLAIMED in a committed step counts as TRAINED
-- (records.Record.settled).
-- ARGV: step, claimant, to ('T', 'D', or '' for a step without samples), reason,
--       version, whether it is the next one (0/1), commit,
--       whether the caller's digest equals the digest of the claims' samples (0/1), most uses,
--       checksum of the version, its entry in the list of versions, whether its training state is
--       on disk (0/1), micro-batches kept (-1: none), claim...
drains()
local stored = redis.call('HGET', COMMITS, STEP_NUMBER)
if stored then
  return {'existed', stored}
end
if redis.call('EXISTS', STEP) == 0 then
  return {'missing'}
end
local claimant, to, reason, version = ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local most_uses, FIRST_CLAIM = tonumber(ARGV[9]), 14
local checksum, durable, keeps = ARGV[10], ARGV[12] == '1', tonumber(ARGV[13])
local keeping = key('keeping') .. ':' .. claimant
expire()

local cause, claimed, number = fence(claimant), {}, 0
for index = FIRST_CLAIM, #ARGV do
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
  elseif samples ~= '' then
    claimed[#claimed + 1] = samples
    number = number + select(2, samples:gsub('\n', '')) + 1
  end
end
if cause then
  return finish({'lost', '', cause})
end
if not sealed() then
  return finish({'unsealed', get('ended'), get('expected'), get('held_open')})
end
local left = get('P') + get('R') + get('C') - number
if left ~= 0 then
  return finish({'incomplete', get('P'), get('R'), get('C') - number})
end
if ARGV[8] == '0' then
  return finish({'digest'})
end
if (number == 0) ~= (to == '') then
  return finish({'mismatch', number})
end
if known_version(version, checksum) == 'conflict' then
  return finish({'conflict'})
end
local done, newest = newest_version()
if done ~= tonumber(STEP_NUMBER) or version ~= newest + tonumber(ARGV[6]) then
  return finish({'gap', done or -1, newest or -1})
end
if keeps >= 0 and redis.call('HLEN', keeping) ~= keeps then
  return finish({'unkept', redis.call('HLEN', keeping), keeps})
end

local again = redis.call('HEXISTS', COMMITS, neighbour(1)) == 0
-- Raw rows to keep: rows -> field -> record of its sample, or true.
local kept = {}
local samples = {}
if to == 'T' and most_uses == 1 then
  -- No sample is used again, so no record needs to be read.
  local bytes = get('claimed_bytes')
  count('C', -number)
  count('T', number)
  count('claimed_bytes', -bytes)
  weigh(-bytes)
else
  for _, text in ipairs(claimed) do
    for _, sample in ipairs(lines(text)) do
      samples[#samples + 1] = sample
    end
  end
end
prefetch(samples)
for _, sample in ipairs(samples) do
  if to == 'D' then
    drop(sample, record_of(sample), reason)
  else
    local record = record_of(sample)
    record[F.uses] = tonumber(record[F.uses]) + 1
    move(sample, record, 'T')
    if again and record[F.uses] < most_uses then
      leave(sample, record)
      local fields = kept[rows_of(record)] or {}
      kept[rows_of(record)] = fields
      fields[record[F.turn]] = record
      for name in pairs(set_of(record[F.late])) do
        fields[record[F.turn] .. '\t' .. name] = record
      end
    end
  end
end
leave_lost()
-- Raw rows that dropped samples have left, and those of them that leaving samples refer to.
local left_bytes = get('stem_bytes')
count('stem_bytes', -left_bytes)
weigh(-left_bytes)
for rows, fields in pairs(kept) do
  local stems = {}
  for _, record in pairs(fields) do
    if record[F.stem] ~= '' then
      for _, turn in ipairs(ancestors(record)) do
        stems[turn] = stems[turn] or not fields[turn]
      end
    end
  end
  for turn, absent in pairs(stems) do
    if absent then
      leave_stem(redis.call('HSTRLEN', rows, turn))
      fields[turn] = true
    end
  end
end
local commit = number .. '\n' .. ARGV[7]
redis.call('HSET', COMMITS, STEP_NUMBER, commit)
add_version(done + 1, version, checksum, ARGV[11])
free_keeping(keeps > 0 and keeping)
if keeps > 0 then
  keep_for(keeping, version, commit)
elseif durable then
  free_kept(version, checksum)
end
local freed = {}
local function free_rows(rows)
  if not kept[rows] then
    freed[#freed + 1] = rows
    return
  end
  for _, field in ipairs(redis.call('HKEYS', rows)) do
    if not kept[rows][field] and field ~= NEEDED then
      redis.call('HDEL', rows, field)
    end
  end
  change_needed(rows, ',(%d+)=%d+', function(turn)
    return not kept[rows][turn] and '' or nil
  end)
end
for _, trajectory in ipairs(redis.call('HKEYS', ENDED)) do
  free_rows(key('rows') .. ':' .. trajectory)
end
for _, rows in ipairs(redis.call('SMEMBERS', RETURNED)) do
  free_rows(rows)
end
for _, name in ipairs(redis.call('SMEMBERS', STAGES)) do
  freed[#freed + 1] = staged_key(name)
end
each('UNLINK', BASE .. ':none', freed)
redis.call('UNLINK', STAGES, READY, CLAIMS, OWNERS, LEASES, HELD, FENCED)
changes('claimable')
on_step(neighbour(1))
arrive()
return finish({'committed', commit})
