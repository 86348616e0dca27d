-- Samples that were trained and may be used again: they leave their step with its commit and come
-- into the policy's next one when that is in the table. Put behind policy.lua.

-- Makes `number` the step that everything here works on. Counts of the other one are written.
local function on_step(number)
  finish()
  STEP_NUMBER = number
  STEP, ENDED, QUERIES = key('step'), key('ended'), key('queries')
  BOOK, MEMBERS, READY = key('book'), key('members'), key('ready')
  CLAIMS, OWNERS, LEASES = key('claims'), key('owners'), key('leases')
  HELD, FENCED, DROPPED, STAGES = key('held'), key('fenced'), key('dropped'), key('stages')
  LEAVING, RETURNED = key('leaving'), key('returned')
  ROSTER, TALLIES, COMPLETED = key('roster'), key('tallies'), key('completed')
  order, group_tokens, begun, changed = nil, {}, nil, {}
end

local function neighbour(by)
  return string.format('%d', tonumber(STEP_NUMBER) + by)
end

-- Notes that `sample`, whose record says how often it was used, is to come back.
local function leave(sample, record)
  local copy = {unpack(record)}
  copy[F.state] = 'P'
  if copy[F.origin] == '' then
    copy[F.origin] = STEP_NUMBER
  end
  redis.call('HSET', LEAVING, sample, table.concat(copy, '\t'))
  weigh(copy[F.size])
end

-- Brings into this step what left the one before. Groups stay whole, and a bound on their age
-- that this step has already holds for them too. Repeatable.
local function arrive()
  local before = neighbour(-1)
  local leaving = BASE .. ':' .. before .. ':leaving'
  local parked = redis.call('HGETALL', leaving)
  if not parked[1] or committed() or redis.call('EXISTS', STEP) == 0 then
    return
  end
  local groups, moved = {}, {}
  for index = 1, #parked, 2 do
    local sample, record = parked[index], parse(parked[index + 1])
    local rows = rows_of(record)
    if not moved[rows] then
      moved[rows] = true
      -- Its first stay was under the trajectory's own name.
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
