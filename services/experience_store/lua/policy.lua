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
local COMMITS = BASE .. ':commits'
-- Field of staged rows that holds their records; no id looks like it.
local RECORDS = '\t'

-- Fields of a record, in the order of records.Record.
local F = {
  state = 1, tokens = 2, size = 3, turn = 4, reward = 5, missing = 6, early = 7, late = 8,
  query = 9, trajectory = 10, agent = 11, group = 12, reason = 13,
}

local function parse(text)
  local record = {}
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

-- Counts are added up here and written once, by finish().
local deltas = {}
local function count(field, by)
  deltas[field] = (deltas[field] or 0) + by
end

local changed = {}
local function changes(kind)
  changed[kind] = true
end

-- Writes the counts and tells who waits: 'claimable' wakes claimants, anything else only watchers.
local function finish(reply)
  for field, by in pairs(deltas) do
    if by ~= 0 then
      redis.call('HINCRBY', STEP, field, by)
    end
  end
  deltas = {}
  if next(changed) then
    local kind = changed.claimable and 'claimable' or 'counts'
    redis.call('PUBLISH', BASE .. ':changes', STEP_NUMBER .. ' ' .. kind)
  end
  return reply
end

local function get(field)
  return tonumber(redis.call('HGET', STEP, field) or 0) + (deltas[field] or 0)
end

-- The one place where a sample changes its state.
local function move(sample, record, to)
  local from = record[F.state]
  if not ALLOWED[from][to] then
    error('sample ' .. sample .. ': ' .. from .. ' -> ' .. to .. ' is not allowed')
  end
  count(from, -1)
  count(to, 1)
  if to == 'R' then
    redis.call('ZADD', READY, 0, sample)
  elseif from == 'R' then
    redis.call('ZREM', READY, sample)
  end
  if to == 'R' or from == 'R' then
    local sign = to == 'R' and 1 or -1
    count('ready_tokens', sign * tonumber(record[F.tokens]))
    count('ready_bytes', sign * tonumber(record[F.size]))
  end
  record[F.state] = to
  redis.call('HSET', BOOK, sample, table.concat(record, '\t'))
  changes('counts')
end

-- A reason is counted by what precedes its first colon (`workflow_raised: ...`): the text after it
-- names one failure, and would make the counts grow without bound.
local function count_dropped(reason)
  redis.call('HINCRBY', DROPPED, reason:match('^[^:]*'):sub(1, 64), 1)
end

local function drop(sample, record, reason)
  record[F.reason] = reason
  move(sample, record, 'D')
  count_dropped(reason)
end

local function record_of(sample)
  local text = redis.call('HGET', BOOK, sample)
  return text and parse(text)
end

-- {sample, record} of a group (or, without `group`, of a query) in sample order.
local function members(query, group)
  local prefix = query .. '\t' .. (group and group .. '\t' or '')
  -- '\n' follows '\t': the range holds exactly what starts with the prefix.
  local upper = prefix:sub(1, -2) .. '\n'
  local found = {}
  for _, member in ipairs(redis.call('ZRANGEBYLEX', MEMBERS, '[' .. prefix, '(' .. upper)) do
    local sample = member:match('([^\t]*)$')
    found[#found + 1] = {sample, record_of(sample)}
  end
  return found
end

-- Makes the groups among `found` claimable that lack nothing. All trajectories of their query
-- must have ended: then, and only then, the members of a group and its rewards are final.
local function ripen(found)
  local blocked = {}
  for _, member in ipairs(found) do
    local record = member[2]
    if record[F.state] == 'P' and record[F.missing] ~= '' then
      blocked[record[F.group]] = true
    end
  end
  for _, member in ipairs(found) do
    local record = member[2]
    if record[F.state] == 'P' and not blocked[record[F.group]] then
      move(member[1], record, 'R')
      changes('claimable')
    end
  end
end

local function query_ended(query)
  return tonumber(redis.call('HGET', QUERIES, query) or 0) >= get('group_size')
end

local function sealed()
  return get('ended') >= get('expected')
end

local function committed()
  return redis.call('HEXISTS', COMMITS, STEP_NUMBER) == 1
end

local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

local function held(claimant)
  return tonumber(redis.call('HGET', HELD, claimant) or 0)
end

-- Ends a live claim; its id is never given out again, so that a commit which names it is refused.
local function give_back(claim, cause)
  local claimant = redis.call('HGET', OWNERS, claim)
  local samples = lines(redis.call('HGET', CLAIMS, claim))
  for _, sample in ipairs(samples) do
    local record = record_of(sample)
    move(sample, record, 'R')
  end
  redis.call('HSET', CLAIMS, claim, '\t' .. cause)
  redis.call('ZREM', LEASES, claim)
  if redis.call('HINCRBY', HELD, claimant, -#samples) <= 0 then
    redis.call('HDEL', HELD, claimant)
  end
  changes('claimable')
  return #samples, claimant
end

-- Returns what leases that ran out held, and fences who held them: gradients accumulated under
-- an expired lease must be thrown away.
local function expire(now)
  local returned = 0
  for _, claim in ipairs(redis.call('ZRANGEBYSCORE', LEASES, '-inf', now)) do
    local samples, claimant = give_back(claim, 'expired')
    redis.call('HSET', FENCED, claimant, 'expired')
    returned = returned + samples
  end
  return returned
end

-- Why `claimant` must start over, or false.
local function fence(claimant)
  local cause = redis.call('HGET', FENCED, claimant)
  if cause == 'superseded' then
    -- Superseding concerns whoever was there before; the first to claim afterwards goes on.
    local owner = redis.call('HGET', STEP, 'owner')
    if not owner or owner == claimant then
      return false
    end
  end
  return cause
end
