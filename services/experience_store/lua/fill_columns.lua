-- Fills columns of samples, or drops those of which one cannot be had. The first value of a column
-- stays. Repeatable.
-- ARGV: step, then for each sample: its id, reward (or ''), reason to drop it (or ''), number of
-- columns, and these: column, bytes, column, bytes...
-- `bytes` is a serialized Sample that holds only this column: put behind the payload it merges.
if redis.call('EXISTS', STEP) == 0 then
  return {'missing'}
end

-- Where `sample` may be, as its query was carried there.
local function carried_to(sample)
  local roster, steps = redis.call('HGETALL', ROSTER), {}
  for index = 1, #roster, 2 do
    local to = roster[index + 1]:match('^to\t(.*)$')
    if to and sample:sub(1, #roster[index] + 1) == roster[index] .. '_' then
      steps[#steps + 1] = to
    end
  end
  return table.concat(steps, ',')
end

-- One record of every group that may have become ready, in order.
local touched, waiting, over = {}, false, {}
local function touch(record)
  local name, query = group_name(record), record[F.query]
  if over[query] == nil then
    over[query] = query_ended(query)
  end
  if over[query] then
    waiting = true
    if not touched[name] then
      touched[name] = true
      touched[#touched + 1] = record
    end
  end
end

-- ARGV[first..last] are the columns.
local function fill(sample, reward, reason, first, last)
  local record = record_of(sample)
  if not record then
    return {'unknown', carried_to(sample)}
  end
  local state = record[F.state]
  if state == 'D' then
    return {'repeated', state}
  end
  if reason ~= '' then
    if state ~= 'P' then
      return {'final', state}
    end
    drop(sample, record, reason)
    touch(record)
    return {'filled', 'D'}
  end
  local early, late, fresh = set_of(record[F.early]), set_of(record[F.late]), {}
  for index = first, last, 2 do
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
    redis.call('HSET', rows_of(record), sample .. '\t' .. name, bytes)
    record[F.size] = tonumber(record[F.size]) + #bytes
    weigh(#bytes)
    if state == 'R' then
      count('ready_bytes', #bytes)
    end
    late[name] = true
    missing[name] = nil
  end
  record[F.missing], record[F.late] = text_of(missing), text_of(late)
  save(sample, record)
  changes('counts')
  if state == 'P' then
    touch(record)
  end
  return {'filled', state}
end

local samples, places, replies, index = {}, {}, {}, 2
while index <= #ARGV do
  samples[#samples + 1], places[#places + 1] = ARGV[index], index
  index = index + 4 + 2 * tonumber(ARGV[index + 3])
end
prefetch(samples)
for number, at in ipairs(places) do
  local last = at + 3 + 2 * tonumber(ARGV[at + 3])
  replies[number] = fill(ARGV[at], ARGV[at + 1], ARGV[at + 2], at + 4, last)
end
for _, record in ipairs(touched) do
  ripen_group(record)
end
if waiting then
  if sealed() then
    -- Nothing may be left to come: then a smaller micro-batch may be claimed, or the step is over.
    changes('claimable')
  end
  for number, reply in ipairs(replies) do
    if reply[1] == 'filled' then
      reply[2] = record_of(samples[number])[F.state]
    end
  end
end
-- As one text: a reply costs whoever reads it by its elements.
for number, reply in ipairs(replies) do
  replies[number] = table.concat(reply, '\t')
end
return finish({'done', table.concat(replies, '\n')})
