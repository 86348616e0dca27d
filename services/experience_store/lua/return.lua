-- Reuse of trained samples: they leave their step with its commit, and enter the policy's next step
-- once the table has that. Appended to samples.lua.

-- Makes `number` the current step of this script, after writing the counts of the present one.
local function on_step(number)
  finish()
  STEP_NUMBER = number
  STEP, ENDED, QUERIES = key('step'), key('ended'), key('queries')
  BOOK, MEMBERS, READY = key('book'), key('members'), key('ready')
  CLAIMS, OWNERS, LEASES = key('claims'), key('owners'), key('leases')
  HELD, FENCED, DROPPED, STAGES = key('held'), key('fenced'), key('dropped'), key('stages')
  LEAVING, RETURNED, GONE = key('leaving'), key('returned'), key('gone')
  ROSTER, TALLIES, COMPLETED = key('roster'), key('tallies'), key('completed')
  order, group_tokens, begun, gone_known, changed = nil, {}, nil, nil, {}
end

local function neighbour(by)
  return string.format('%d', tonumber(STEP_NUMBER) + by)
end

-- Prefix of the fields of LEAVING that name a group with its lost members; no sample id begins with
-- it. Alone it is the field of the bytes of dropped samples' raw rows.
local GROUP = '\t'

-- Groups of which samples leave: their name in the next step -> {family, group, name} here.
local parting = {}

-- Notes that `sample` enters the next step; its record has its number of uses.
local function leave(sample, record)
  local own, copy = {family(record), record[F.group], group_name(record)}, {unpack(record)}
  copy[F.state] = 'P'
  if copy[F.origin] == '' then
    copy[F.origin] = STEP_NUMBER
  end
  parting[group_name(copy)] = own
  redis.call('HSET', LEAVING, sample, table.concat(copy, '\t'))
  weigh(copy[F.size])
end

-- Notes that the raw row of a dropped sample enters the next step with samples that refer to it.
local function leave_stem(bytes)
  redis.call('HINCRBY', LEAVING, GROUP, bytes)
  weigh(bytes)
end

-- Notes which members the leaving groups have lost, in this step or earlier.
local function leave_lost()
  if redis.call('HEXISTS', DROPPED, VALUE_GONE) == 0 and redis.call('EXISTS', GONE) == 0 then
    return
  end
  for name, own in pairs(parting) do
    local found = {redis.call('HGET', GONE, own[3]) or nil}
    for _, member in ipairs(members(own[1], own[2])) do
      local record = member[2]
      if record[F.state] == 'D' and record[F.reason] == VALUE_GONE then
        found[#found + 1] =
          table.concat({member[1], record[F.trajectory], record[F.reward]}, '\t')
      end
    end
    if found[1] then
      redis.call('HSET', LEAVING, GROUP .. name, table.concat(found, '\n'))
    end
  end
end

-- Moves the samples that left the previous step into this one. Groups stay whole, and this step's
-- bound on versions applies to them, too. Idempotent.
local function arrive()
  local before = neighbour(-1)
  local leaving = BASE .. ':' .. before .. ':leaving'
  local parked = redis.call('HGETALL', leaving)
  if not parked[1] or committed() or redis.call('EXISTS', STEP) == 0 then
    return
  end
  local groups, moved, samples = {}, {}, {}
  for index = 1, #parked, 2 do
    if parked[index] == GROUP then
      count('stem_bytes', tonumber(parked[index + 1]))
    elseif parked[index]:sub(1, 1) == GROUP then
      redis.call('HSET', GONE, parked[index]:sub(2), parked[index + 1])
      gone_known = 1
    else
      samples[#samples + 1] = index
    end
  end
  for _, index in ipairs(samples) do
    local sample, record = parked[index], parse(parked[index + 1])
    local rows = rows_of(record)
    if not moved[rows] then
      moved[rows] = true
      -- In its first step the sample was stored under its trajectory's own name.
      local suffix = record[F.trajectory]
      if record[F.origin] ~= before then
        suffix = suffix .. '@' .. record[F.origin]
      end
      redis.call('RENAME', BASE .. ':' .. before .. ':rows:' .. suffix, rows)
      redis.call('SADD', RETURNED, rows)
    end
    if redis.call('HSETNX', BOOK, sample, table.concat(record, '\t')) == 1 then
      local name = group_name(record)
      redis.call('ZADD', MEMBERS, 0, name .. '\t' .. sample)
      count('P', 1)
      groups[name] = groups[name] or {}
      table.insert(groups[name], {sample, record})
    end
  end
  redis.call('UNLINK', leaving)
  for _, group in pairs(groups) do
    ripen(group)
  end
end
