-- Prelude of every script on one policy's table: key names, records and their storage.
-- KEYS[1]: the table's base; ARGV[1]: the step.
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
local KEEPING, PAIR_SUMS = key('keeping'), key('pair_sums')
local COMMITS, KEPT = BASE .. ':commits', BASE .. ':kept'
-- Field of staged rows that holds their query and, one a line, their records.
local RECORDS = 'records'
-- Field of rows that counts the users of their raw rows (samples.lua).
local NEEDED = 'needed'

-- The key of staged rows; `name` is `trajectory:attempt`, as in STAGES.
local function staged_key(name)
  return key('staged') .. ':' .. name
end

-- Fields of a record, in the order of records.Record.
local F = {
  state = 1, tokens = 2, size = 3, turn = 4, reward = 5, missing = 6, early = 7, late = 8,
  query = 9, trajectory = 10, agent = 11, group = 12, reason = 13, version = 14, uses = 15,
  since = 16, origin = 17, stem = 18, spread = 19,
}

-- The reason with which claimed samples are dropped that have lost a value.
local VALUE_GONE = 'value_gone'

-- One match for all fields, not one per field: scripts read up to hundreds of records.
local RECORD = '^' .. ('([^\t]*)\t'):rep(18) .. '([^\t]*)$'
local function parse(text)
  return {text:match(RECORD)}
end

-- Converts names joined by commas to a set, and back.
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

-- Maximum arguments of one command: Lua's stack holds some thousands. Even, so that pairs stay
-- whole.
local AT_ONCE = 1000

-- Runs one command for many members of a key, since each call of Redis is expensive.
local function each(command, name, members)
  for first = 1, #members, AT_ONCE do
    redis.call(command, name, unpack(members, first, math.min(first + AT_ONCE - 1, #members)))
  end
end

-- Cache of samples' records: as read, or to be written by finish().
local book, unsaved = {}, {}
local function save(sample, record)
  book[sample] = table.concat(record, '\t')
  unsaved[sample] = true
end

-- The records of samples as texts; false for a sample that is not in the table. Reads through the
-- cache.
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

-- Reads the records of samples into the cache, for later access one by one.
local function prefetch(samples)
  for index, text in ipairs(texts_by_name(samples)) do
    book[samples[index]] = text or nil
  end
end

-- Samples that enter READY, with their scores, and samples that leave it.
local entering, leaving = {}, {}
local function settle()
  each('ZADD', READY, entering)
  each('ZREM', READY, leaving)
  entering, leaving = {}, {}
end

-- Runs a command that reads READY, after writing the changes above.
local function ready(command, ...)
  settle()
  return redis.call(command, READY, ...)
end

-- Counts are accumulated and written once, by finish(). Fields read from the step are cached until
-- put() changes them.
local deltas, stored = {}, {}
local function count(field, by)
  deltas[field] = (deltas[field] or 0) + by
end

-- Counts per query, under its name: all its rows ('rows'), those PENDING ('P') and DROPPED ('D'),
-- and those PENDING that lack a column ('L').
local tallied = {}
local function tally(query, field, by)
  local name = query .. '\t' .. field
  tallied[name] = (tallied[name] or 0) + by
end

-- Bytes of rows that the table holds over all its steps, without staged rows.
local weight = 0
local function weigh(bytes)
  weight = weight + tonumber(bytes)
end

local changed = {}
local function changes(kind)
  changed[kind] = true
end

-- Writes the counts and notifies waiting clients: 'claimable' wakes claimants, anything else
-- watchers.
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

-- At its memory limit Redis refuses a script whose first write may need memory. Scripts that lead
-- to a commit, which frees memory, begin with this write instead.
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

-- Samples of a group (or, without `group`, of a query) in order, the texts of their records, and
-- their groups.
local function texts_of(query, group)
  local prefix = query .. '\t' .. (group and group .. '\t' or '')
  -- '\n' follows '\t': the range holds exactly what starts with the prefix.
  local upper = prefix:sub(1, -2) .. '\n'
  local names, groups = redis.call('ZRANGEBYLEX', MEMBERS, '[' .. prefix, '(' .. upper), {}
  for index, member in ipairs(names) do
    -- Anchored, so that Lua does not try a match at every position.
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

-- Samples that come back from an earlier step (commit.lua) are not members of this step's queries,
-- which may have the same names.
local function family(record)
  local origin = record[F.origin]
  return origin == '' and record[F.query] or record[F.query] .. '@' .. origin
end

local function group_of(record)
  return members(family(record), record[F.group])
end

-- The key that holds the raw row of a sample, and those of its trajectory.
local function rows_of(record)
  local origin = record[F.origin]
  return key('rows') .. ':' .. record[F.trajectory] .. (origin == '' and '' or '@' .. origin)
end

local function group_name(record)
  return family(record) .. '\t' .. record[F.group]
end

-- The counts of a query: its rows, its PENDING rows, and how many of these lack a column.
local function tallies_of(query)
  local names = {query .. '\trows', query .. '\tP', query .. '\tL'}
  local found = redis.call('HMGET', TALLIES, unpack(names))
  for index, name in ipairs(names) do
    found[index] = tonumber(found[index] or 0) + (tallied[name] or 0)
  end
  return found[1], found[2], found[3]
end

-- READY is in order of ids, until a claim of the step asks for balance: then in order of tokens,
-- the sample's own or ('group') those of its whole group, which is given out together.
local order, group_tokens = nil, {}
local function place(record)
  order = order or redis.call('HGET', STEP, 'order') or 'id'
  if order == 'id' then
    return '0'
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
