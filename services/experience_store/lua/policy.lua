-- What every script on one policy's table shares. KEYS[1]: the table's base; ARGV[1]: the step.
-- Put before this: the table ALLOWED (records.lua_transitions).

local BASE, STEP_NUMBER = KEYS[1], ARGV[1]

local function key(name)
  return BASE .. ':' .. STEP_NUMBER .. ':' .. name
end

local STEP, ENDED, QUERIES = key('step'), key('ended'), key('queries')
local BOOK, MEMBERS, READY = key('book'), key('members'), key('ready')
local CLAIMS, OWNERS, LEASES = key('claims'), key('owners'), key('leases')
local HELD, FENCED, DROPPED, STAGES = key('held'), key('fenced'), key('dropped'), key('stages')
local LEAVING, RETURNED, GONE = key('leaving'), key('returned'), key('gone')
local ROSTER, TALLIES, COMPLETED = key('roster'), key('tallies'), key('completed')
local COMMITS = BASE .. ':commits'
-- Field of staged rows that holds their records; no id looks like it.
local RECORDS = '\t'

-- Fields of a record, in the order of records.Record.
local F = {
  state = 1, tokens = 2, size = 3, turn = 4, reward = 5, missing = 6, early = 7, late = 8,
  query = 9, trajectory = 10, agent = 11, group = 12, reason = 13, version = 14, uses = 15,
  since = 16, origin = 17, spread = 18,
}

-- Why claimed samples are dropped of which a value is gone.
local VALUE_GONE = 'value_gone'

-- One match, and not one per field: every script reads records, some of them hundreds.
-- The last field came later than the others: a record of an older release may lack it.
local RECORD = '^' .. ('([^\t]*)\t'):rep(16) .. '([^\t]*)\t?([^\t]*)$'
local function parse(text)
  local record = {text:match(RECORD)}
  if record[1] then
    return record
  end
  -- Of an older release, with fewer fields.
  for field in (text .. '\t'):gmatch('([^\t]*)\t') do
    record[#record + 1] = field
  end
  return record
end

-- Names joined by commas, as a set and back.
local function set_of(text)
  local set = {}
  for name in text:gmatch('[^,]+') do
    set[name] = true
  end
  return set
end

local function text_of(set)
  local names = {}
  for name in pairs(set) do
    names[#names + 1] = name
  end
  table.sort(names)
  return table.concat(names, ',')
end

local function lines(text)
  local found = {}
  for line in text:gmatch('[^\n]+') do
    found[#found + 1] = line
  end
  return found
end

-- Arguments of one command: the stack of Lua holds some thousands. Even, so that pairs stay whole.
local AT_ONCE = 1000

-- One command for many members of the same key: each costs as much as a row's share of everything.
local function each(command, name, members)
  for first = 1, #members, AT_ONCE do
    redis.call(command, name, unpack(members, first, math.min(first + AT_ONCE - 1, #members)))
  end
end

-- Records of samples, as they were read here or are to be written, by finish().
local book, unsaved = {}, {}
local function save(sample, record)
  book[sample] = table.concat(record, '\t')
  unsaved[sample] = true
end

-- The records of samples, as texts; false for one that is not in the table. None is read twice.
local function texts_by_name(samples)
  local texts, absent, places = {}, {}, {}
  for index, sample in ipairs(samples) do
    local text = book[sample] or false
    texts[index] = text
    if not text then
      absent[#absent + 1], places[#places + 1] = sample, index
    end
  end
  for first = 1, #absent, AT_ONCE do
    local last = math.min(first + AT_ONCE - 1, #absent)
    for index, text in ipairs(redis.call('HMGET', BOOK, unpack(absent, first, last))) do
      texts[places[first + index - 1]] = text
    end
  end
  return texts
end

-- Reads the records of samples that are needed one by one later.
local function prefetch(samples)
  for index, text in ipairs(texts_by_name(samples)) do
    book[samples[index]] = text or nil
  end
end

-- What enters READY, with its scores, and what leaves it.
local entering, leaving = {}, {}
local function settle()
  each('ZADD', READY, entering)
  each('ZREM', READY, leaving)
  entering, leaving = {}, {}
end

-- A command that reads READY.
local function ready(command, ...)
  settle()
  return redis.call(command, READY, ...)
end

-- Counts are added up here and written once, by finish(). What was read of the step is kept, until
-- put() changes it.
local deltas, stored = {}, {}
local function count(field, by)
  deltas[field] = (deltas[field] or 0) + by
end

-- Counts per query, under its name: all its rows ('rows'), those PENDING ('P') and DROPPED ('D').
local tallied = {}
local function tally(query, field, by)
  local name = query .. '\t' .. field
  tallied[name] = (tallied[name] or 0) + by
end

-- Payload bytes that the table holds over all its steps. What is only staged does not count.
local weight = 0
local function weigh(bytes)
  weight = weight + tonumber(bytes)
end

local changed = {}
local function changes(kind)
  changed[kind] = true
end

-- Writes the counts and tells who waits: 'claimable' wakes claimants, anything else only watchers.
local function finish(reply)
  settle()
  local records = {}
  for sample in pairs(unsaved) do
    records[#records + 1] = sample
    records[#records + 1] = book[sample]
  end
  each('HSET', BOOK, records)
  book, unsaved = {}, {}
  for field, by in pairs(deltas) do
    if by ~= 0 then
      redis.call('HINCRBY', STEP, field, by)
    end
  end
  for field, by in pairs(tallied) do
    if by ~= 0 then
      redis.call('HINCRBY', TALLIES, field, by)
    end
  end
  deltas, stored, tallied = {}, {}, {}
  if weight ~= 0 then
    redis.call('HINCRBY', BASE .. ':head', 'bytes', weight)
    weight = 0
  end
  if next(changed) then
    local kind = changed.claimable and 'claimable' or 'counts'
    redis.call('PUBLISH', BASE .. ':changes', STEP_NUMBER .. ' ' .. kind)
  end
  changed = {}
  return reply
end

-- At its memory limit Redis refuses a script whose first write may need memory. Those that lead to
-- a commit, which frees it, begin with this one instead.
local function drains()
  redis.call('UNLINK', BASE .. ':none')
end

local function get(field)
  stored[field] = stored[field] or tonumber(redis.call('HGET', STEP, field) or 0)
  return stored[field] + (deltas[field] or 0)
end

local function put(...)
  redis.call('HSET', STEP, ...)
  stored = {}
end

local function record_of(sample)
  local text = book[sample] or redis.call('HGET', BOOK, sample)
  return text and parse(text)
end

-- Samples of a group (or, without `group`, of a query) in order, the texts of their records, and their
-- groups.
local function texts_of(query, group)
  local prefix = query .. '\t' .. (group and group .. '\t' or '')
  -- '\n' follows '\t': the range holds exactly what starts with the prefix.
  local upper = prefix:sub(1, -2) .. '\n'
  local names, groups = redis.call('ZRANGEBYLEX', MEMBERS, '[' .. prefix, '(' .. upper), {}
  for index, member in ipairs(names) do
    -- Anchored: else every place in it is tried.
    groups[index], names[index] = member:match('^[^\t]*\t([^\t]*)\t(.*)$')
  end
  return names, texts_by_name(names), groups
end

-- {sample, record} for each of `names`.
local function parsed(names, texts)
  local found = {}
  for index, name in ipairs(names) do
    found[index] = {name, texts[index] and parse(texts[index])}
  end
  return found
end

local function members(query, group)
  local names, texts = texts_of(query, group)
  return parsed(names, texts)
end

-- Samples that come back from an earlier step (commit.lua) are no members of this step's queries,
-- whose names may be the same.
local function family(record)
  local origin = record[F.origin]
  return origin == '' and record[F.query] or record[F.query] .. '@' .. origin
end

local function group_of(record)
  return members(family(record), record[F.group])
end

-- Where the payload of a sample is, and those of its trajectory.
local function rows_of(record)
  local origin = record[F.origin]
  return key('rows') .. ':' .. record[F.trajectory] .. (origin == '' and '' or '@' .. origin)
end

local function group_name(record)
  return family(record) .. '\t' .. record[F.group]
end

-- READY is in order of ids, until a claim of the step asks for balance: then in order of tokens,
-- the sample's own or ('group') those of its whole group, which is given out together.
local order, group_tokens = nil, {}
local function place(record)
  order = order or redis.call('HGET', STEP, 'order') or 'id'
  if order == 'id' then
    return 0
  elseif order == 'tokens' then
    return record[F.tokens]
  end
  local name = group_name(record)
  if not group_tokens[name] then
    local sum = 0
    for _, member in ipairs(group_of(record)) do
      if member[2][F.state] ~= 'D' then
        sum = sum + tonumber(member[2][F.tokens])
      end
    end
    group_tokens[name] = sum
  end
  return group_tokens[name]
end

-- Keeps the oldest version that began a ready sample: who raises the bound need not look at all.
local begun
local function ready_since(version)
  begun = begun or redis.call('HGET', STEP, 'begun') or 'none'
  if version ~= '' and (begun == 'none' or tonumber(version) < tonumber(begun)) then
    begun = version
    redis.call('HSET', STEP, 'begun', version)
  end
end

-- The one place where a sample changes its state.
local function move(sample, record, to)
  local from = record[F.state]
  if not ALLOWED[from][to] then
    error('sample ' .. sample .. ': ' .. from .. ' -> ' .. to .. ' is not allowed')
  end
  count(from, -1)
  count(to, 1)
  if from == 'P' then
    tally(family(record), 'P', -1)
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
  if to == 'T' or to == 'D' then
    weigh(-record[F.size])
  end
  record[F.state] = to
  save(sample, record)
  changes('counts')
end

-- move() of samples that are claimed or trained: of their records only this much is read. `samples`: {sample, state, tokens, size, what the record is then}.
local function advance(samples, to)
  local tokens, bytes = 0, 0
  for _, one in ipairs(samples) do
    local sample, from = one[1], one[2]
    if to == 'R' or to == 'D' or not ALLOWED[from][to] then
      error('sample ' .. sample .. ': ' .. from .. ' -> ' .. to .. ' is not allowed here')
    end
    count(from, -1)
    if from == 'R' then
      leaving[#leaving + 1] = sample
      tokens, bytes = tokens + one[3], bytes + one[4]
    end
    if to == 'T' then
      weigh(-one[4])
    end
    book[sample] = one[5]
    unsaved[sample] = true
    changes('counts')
  end
  count(to, #samples)
  count('ready_tokens', -tokens)
  count('ready_bytes', -bytes)
end

-- family() and group of a sample, in the text of its record.
local FAMILY = '^' .. ('[^\t]*\t'):rep(8) .. '([^\t]*)\t' .. ('[^\t]*\t'):rep(2) .. '([^\t]*)\t'
  .. ('[^\t]*\t'):rep(4) .. '([^\t]*)\t?[^\t]*$'
local function family_of(text)
  local query, group, origin = text:match(FAMILY)
  return origin == '' and query or query .. '@' .. origin, group
end

-- A reason is counted by what precedes its first colon (`workflow_raised: ...`): the text after it
-- names one failure, and would make the counts grow without bound.
local function count_dropped(reason, by)
  local name = reason:match('^[^:]*'):sub(1, 64)
  if redis.call('HINCRBY', DROPPED, name, by or 1) == 0 then
    redis.call('HDEL', DROPPED, name)
  end
end

-- Frees the payload of a sample that nobody needs any more.
local function free(sample, record)
  local rows = rows_of(record)
  redis.call('HDEL', rows, sample)
  for name in pairs(set_of(record[F.late])) do
    redis.call('HDEL', rows, sample .. '\t' .. name)
  end
end

local function drop(sample, record, reason)
  free(sample, record)
  record[F.reason] = reason
  move(sample, record, 'D')
  count_dropped(reason)
end

-- Drops what there is of a query that left its step.
local function drop_pending(query, reason)
  for _, member in ipairs(members(query)) do
    if member[2][F.state] == 'P' then
      drop(member[1], member[2], reason)
    end
  end
end

-- Whether an older version began it than may have begun what is given out (claim.lua).
local function is_stale(record)
  return record[F.version] ~= '' and tonumber(record[F.version]) < get('oldest_version')
end

-- Members that a group lost as VALUE_GONE in an earlier step, where it was trained: its statistics
-- were final by then, and stay what they were. {sample, trajectory, reward} for each.
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

-- Groups among `found` with more than one trajectory whose rewards are all equal: whatever is
-- subtracted from them, nothing is left to learn from.
local function without_signal(found)
  local first, several, different = {}, {}, {}
  for _, member in ipairs(found) do
    local record = member[2]
    local group = record[F.group]
    if record[F.state] == 'P' then
      first[group] = first[group] or record
      several[group] = several[group] or record[F.trajectory] ~= first[group][F.trajectory]
      -- As text they would differ at -0.0.
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

-- Makes the groups among `found` claimable that lack nothing. All trajectories of their query
-- must have ended: then, and only then, the members of a group and its rewards are final.
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

-- ripen() of a group, or of all groups of a query. Most that ask find a member without a reward: this is
-- seen in the texts of the records, of which only those that can become claimable are read.
local PENDING_LACKS = '^P' .. ('\t[^\t]*'):rep(4) .. '\t[^\t]'
-- Tokens, size and version of one that is PENDING.
local RIPE = '^P\t([^\t]*)\t([^\t]*)' .. ('\t[^\t]*'):rep(10) .. '\t([^\t]*)'
local function ripen_those(query, group)
  local names, texts, groups = texts_of(query, group)
  local lacking, found = {}, {}
  for index, text in ipairs(texts) do
    if text and text:find(PENDING_LACKS) then
      lacking[groups[index]] = true
    end
  end
  -- Nothing can keep them back, and no place has to be found for them.
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
        entering[#entering + 1] = 0
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

-- Drops the groups of these samples that a too old version began, unless members were given out.
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

-- Whether a query's group is final. Where trajectories are redundant the job admits no more than
-- `group_size` that completed: once so many are here, whoever else is still to be told of was left out.
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

local function committed()
  return redis.call('HEXISTS', COMMITS, STEP_NUMBER) == 1
end

local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end
