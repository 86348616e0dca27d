-- Lifecycle of samples: their states, and when a group is ready, dropped or too old. Appended to
-- policy.lua.

-- Tracks the oldest version of the ready samples, so that raising the bound need not scan them all.
local begun
local function ready_since(version)
  begun = begun or redis.call('HGET', STEP, 'begun') or 'none'
  if version ~= '' and (begun == 'none' or tonumber(version) < tonumber(begun)) then
    begun = version
    redis.call('HSET', STEP, 'begun', version)
  end
end

-- Changes the state of a sample; no other code does.
local function move(sample, record, to)
  local from = record[F.state]
  if not ALLOWED[from][to] then
    error('sample ' .. sample .. ': ' .. from .. ' -> ' .. to .. ' is not allowed')
  end
  count(from, -1)
  count(to, 1)
  if from == 'P' then
    tally(family(record), 'P', -1)
    if record[F.missing] ~= '' then
      tally(family(record), 'L', -1)
    end
  end
  if to == 'D' then
    tally(family(record), 'D', 1)
  end
  if to == 'R' then
    if leaving[1] then
      settle()
    end
    entering[#entering + 1] = place(record)
    entering[#entering + 1] = sample
    ready_since(record[F.version])
  elseif from == 'R' then
    leaving[#leaving + 1] = sample
  end
  if to == 'R' or from == 'R' then
    local sign = to == 'R' and 1 or -1
    count('ready_tokens', sign * tonumber(record[F.tokens]))
    count('ready_bytes', sign * tonumber(record[F.size]))
  end
  if to == 'C' or from == 'C' then
    count('claimed_bytes', (to == 'C' and 1 or -1) * tonumber(record[F.size]))
  end
  if to == 'T' then
    weigh(-record[F.size])
  end
  record[F.state] = to
  save(sample, record)
  changes('counts')
end

-- Extracts family() and group of a sample from the text of its record.
local FAMILY = '^' .. ('[^\t]*\t'):rep(8) .. '([^\t]*)\t' .. ('[^\t]*\t'):rep(2) .. '([^\t]*)\t'
  .. ('[^\t]*\t'):rep(4) .. '([^\t]*)\t[^\t]*\t[^\t]*$'
local function family_of(text)
  local query, group, origin = text:match(FAMILY)
  return origin == '' and query or query .. '@' .. origin, group
end

-- Counts a drop by the part of its reason before the first colon (`workflow_raised: ...`): the text
-- after it describes one failure, and would make the number of counters unbounded.
local function count_dropped(reason, by)
  local name = reason:match('^[^:]*')
  if #name > 64 then
    -- Cut between characters: half a UTF-8 character would break the readers of the counts.
    local cut = 64
    while cut > 0 and name:byte(cut + 1) >= 0x80 and name:byte(cut + 1) < 0xC0 do
      cut = cut - 1
    end
    name = name:sub(1, cut)
  end
  if redis.call('HINCRBY', DROPPED, name, by or 1) == 0 then
    redis.call('HDEL', DROPPED, name)
  end
end

-- The turns whose raw rows hold the beginning of a sample's prompt, from the first on.
local function ancestors(record)
  local found = {}
  local turns = record[F.stem]:match('^[^ ]*')
  for part in turns:gmatch('[^,]+') do
    local first, last = part:match('^(%d+)%-?(%d*)$')
    for turn = tonumber(first), tonumber(last == '' and first or last) do
      found[#found + 1] = string.format('%d', turn)
    end
  end
  return found
end

-- Changes the numbers of NEEDED, `,turn=number` for each raw row that more than one needs, to what
-- `change(turn, number)` returns: nil for the same.
local function change_needed(rows, pattern, change)
  local text = redis.call('HGET', rows, NEEDED)
  local left = text and text:gsub(pattern, change)
  if left == '' then
    redis.call('HDEL', rows, NEEDED)
  elseif left ~= text then
    redis.call('HSET', rows, NEEDED, left)
  end
end

-- A raw row is needed by its own sample and by each raw row that refers to it directly. Takes one
-- off; the raw row is freed, and true returned, when that was the last.
local function need_less(rows, turn)
  local others = false
  change_needed(rows, ',(' .. turn .. ')=(%d+)', function(_, number)
    others = true
    return number == '2' and '' or string.format(',%s=%d', turn, number - 1)
  end)
  if not others then
    redis.call('HDEL', rows, turn)
  end
  return not others
end

-- Frees everything needed only by this sample: its late columns, its raw row unless others refer to
-- it ('stem_bytes' counts raw rows that stay), and raw rows of dropped samples that only it
-- referred to.
local function free(record)
  local rows, turn = rows_of(record), record[F.turn]
  local bytes = redis.call('HSTRLEN', rows, turn)
  for name in pairs(set_of(record[F.late])) do
    redis.call('HDEL', rows, turn .. '\t' .. name)
  end
  weigh(-record[F.size])
  if not need_less(rows, turn) then
    weigh(bytes)
    count('stem_bytes', bytes)
    return
  end
  local path = record[F.stem] ~= '' and ancestors(record) or {}
  for at = #path, 1, -1 do
    bytes = redis.call('HSTRLEN', rows, path[at])
    if not need_less(rows, path[at]) then
      return
    end
    weigh(-bytes)
    count('stem_bytes', -bytes)
  end
end

local function drop(sample, record, reason)
  free(record)
  record[F.reason] = reason
  move(sample, record, 'D')
  count_dropped(reason)
end

-- Drops all samples of a query that has left its step.
local function drop_pending(query, reason)
  for _, member in ipairs(members(query)) do
    if member[2][F.state] == 'P' then
      drop(member[1], member[2], reason)
    end
  end
end

-- Whether a sample began under an older version than claims allow (claim.lua).
local function is_stale(record)
  return record[F.version] ~= '' and tonumber(record[F.version]) < get('oldest_version')
end

-- Members that a group lost as VALUE_GONE in an earlier step in which it was trained: they still
-- count in its statistics, which were final by then. {sample, trajectory, reward} for each.
local gone_known
local function lost_members(name)
  gone_known = gone_known or redis.call('EXISTS', GONE)
  local found = {}
  if gone_known == 1 then
    for _, line in ipairs(lines(redis.call('HGET', GONE, name) or '')) do
      found[#found + 1] = {line:match('^([^\t]*)\t([^\t]*)\t(.*)$')}
    end
  end
  return found
end

-- Groups among `found` with more than one trajectory whose rewards are all equal: with any baseline
-- their advantages are zero.
local function without_signal(found)
  local first, several, different = {}, {}, {}
  for _, member in ipairs(found) do
    local record = member[2]
    local group = record[F.group]
    if record[F.state] == 'P' then
      first[group] = first[group] or record
      several[group] = several[group] or record[F.trajectory] ~= first[group][F.trajectory]
      -- Compared as numbers: as text 0.0 and -0.0 would differ.
      different[group] = different[group]
        or tonumber(record[F.reward]) ~= tonumber(first[group][F.reward])
    end
  end
  for group, record in pairs(first) do
    for _, lost in ipairs(lost_members(group_name(record))) do
      several[group] = several[group] or lost[2] ~= record[F.trajectory]
      different[group] = different[group] or tonumber(lost[3]) ~= tonumber(record[F.reward])
    end
  end
  local silent = {}
  for group in pairs(first) do
    if several[group] and not different[group] then
      silent[group] = true
    end
  end
  return silent
end

-- Makes the complete groups among `found` claimable. All trajectories of their query must have
-- ended: only then are the members of a group and its rewards final.
local function ripen(found)
  local blocked, reasons = {}, {}
  for _, member in ipairs(found) do
    local record = member[2]
    local group = record[F.group]
    if record[F.state] == 'P' then
      blocked[group] = blocked[group] or record[F.missing] ~= ''
      reasons[group] = reasons[group] or (is_stale(record) and 'stale')
    end
  end
  if get('signal') == 1 then
    for group in pairs(without_signal(found)) do
      if not blocked[group] and not reasons[group] then
        reasons[group] = 'no_signal'
        count('groups_without_signal', 1)
      end
    end
  end
  for _, member in ipairs(found) do
    local record = member[2]
    local group = record[F.group]
    if record[F.state] == 'P' and not blocked[group] then
      if reasons[group] then
        drop(member[1], record, reasons[group])
      else
        move(member[1], record, 'R')
      end
      changes('claimable')
    end
  end
end

-- Calls ripen() for a group, or for all groups of a query. Usually some member still lacks its
-- reward; this is checked on the records' texts, and only records that can become claimable are
-- parsed. `full`: no sample of the query lacks a column.
local PENDING_LACKS = '^P' .. ('\t[^\t]*'):rep(4) .. '\t[^\t]'
-- Extracts tokens, size and version from the text of a PENDING record.
local RIPE = '^P\t([^\t]*)\t([^\t]*)' .. ('\t[^\t]*'):rep(10) .. '\t([^\t]*)'
local function ripen_those(query, group, full)
  local names, texts, groups = texts_of(query, group)
  local lacking, found = {}, {}
  for index, text in ipairs(texts) do
    if not full and text and text:find(PENDING_LACKS) then
      lacking[groups[index]] = true
    end
  end
  -- Fast path: no rule can hold these samples back, and READY is in order of ids.
  order = order or redis.call('HGET', STEP, 'order') or 'id'
  local plain = order == 'id' and get('signal') ~= 1 and get('oldest_version') <= 0
  if leaving[1] then
    settle()
  end
  for index, text in ipairs(texts) do
    if text and not lacking[groups[index]] then
      local tokens, size, version = text:match(RIPE)
      if tokens and plain then
        local sample = names[index]
        count('P', -1)
        count('R', 1)
        tally(query, 'P', -1)
        -- The score as text: formatting a number takes longer.
        entering[#entering + 1] = '0'
        entering[#entering + 1] = sample
        ready_since(version)
        count('ready_tokens', tonumber(tokens))
        count('ready_bytes', tonumber(size))
        book[sample] = 'R' .. text:sub(2)
        unsaved[sample] = true
        changes('claimable')
      elseif tokens then
        found[#found + 1] = {names[index], parse(text)}
      end
    end
  end
  if found[1] then
    ripen(found)
  end
end

-- Drops the groups of these samples that began under a too old version, unless members are claimed.
local function evict(samples)
  local seen = {}
  prefetch(samples)
  for _, sample in ipairs(samples) do
    local record = record_of(sample)
    local name = group_name(record)
    if is_stale(record) and not seen[name] then
      seen[name] = true
      local group, held = group_of(record), false
      for _, member in ipairs(group) do
        held = held or member[2][F.state] == 'C'
      end
      for _, member in ipairs(group) do
        if not held and member[2][F.state] == 'R' then
          drop(member[1], member[2], 'stale')
          changes('claimable')
        end
      end
    end
  end
end

-- Whether a query's group is final. With redundant trajectories the job admits at most `group_size`
-- completed ones: once the table has so many, any further trajectory of the query is left out.
local function query_ended(query)
  local size, redundant = get('group_size'), get('redundant')
  if tonumber(redis.call('HGET', QUERIES, query) or 0) >= size + redundant then
    return true
  end
  return redundant > 0 and tonumber(redis.call('HGET', COMPLETED, query) or 0) >= size
end

local function sealed()
  return get('held_open') == 0 and get('ended') >= get('expected')
end

-- Frees what the policy has given of the step's joint pairs; that it has stays in the counts.
local function free_sums()
  weigh(-redis.call('STRLEN', PAIR_SUMS))
  redis.call('UNLINK', PAIR_SUMS)
end

local function committed()
  return redis.call('HEXISTS', COMMITS, STEP_NUMBER) == 1
end

local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end
