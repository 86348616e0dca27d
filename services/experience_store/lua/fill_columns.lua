-- Fills columns of one sample, or drops it because one of them cannot be had. The first value of
-- a column stays. Repeatable.
-- ARGV: step, sample, reward (or ''), reason to drop it (or ''), column, bytes, column, bytes...
-- `bytes` is a serialized Sample that holds only this column: put behind the payload it merges.
if redis.call('EXISTS', STEP) == 0 then
  return {'missing'}
end
local sample, reward, reason = ARGV[2], ARGV[3], ARGV[4]
local record = record_of(sample)
if not record then
  return {'unknown'}
end
local state = record[F.state]
if state == 'D' then
  return {'repeated', state}
end
local rows = key('rows') .. ':' .. record[F.trajectory]
local early, late = set_of(record[F.early]), set_of(record[F.late])

if reason ~= '' then
  if state ~= 'P' then
    return {'final', state}
  end
  redis.call('HDEL', rows, sample)
  for name in pairs(late) do
    redis.call('HDEL', rows, sample .. '\t' .. name)
  end
  drop(sample, record, reason)
else
  local fresh = {}
  for index = 5, #ARGV, 2 do
    if not early[ARGV[index]] and not late[ARGV[index]] then
      fresh[ARGV[index]] = ARGV[index + 1]
    end
  end
  local rewarded = reward ~= '' and record[F.reward] == ''
  if not rewarded and not next(fresh) then
    return {'repeated', state}
  elseif state ~= 'P' and state ~= 'R' then
    return {'final', state}
  end
  local missing = set_of(record[F.missing])
  if rewarded then
    record[F.reward] = reward
    missing['reward'] = nil
  end
  for name, bytes in pairs(fresh) do
    redis.call('HSET', rows, sample .. '\t' .. name, bytes)
    late[name] = true
    missing[name] = nil
  end
  record[F.missing], record[F.late] = text_of(missing), text_of(late)
  redis.call('HSET', BOOK, sample, table.concat(record, '\t'))
  changes('counts')
end

if state == 'P' and query_ended(record[F.query]) then
  ripen(members(record[F.query], record[F.group]))
  if sealed() then
    -- Nothing may be left to come: then a smaller micro-batch may be claimed, or the step is over.
    changes('claimable')
  end
end
return finish({'filled', record_of(sample)[F.state]})
