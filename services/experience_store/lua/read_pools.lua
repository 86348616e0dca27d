-- Counts how often the tasks of steps were solved, each step once and in order, and lists the pools.
-- ARGV: first step that is not counted, lowest and highest success rate of the band, weight of what
-- was known before (0 to 1), then for each source how many tasks of each pool are listed
local low, high, memory = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])

-- The tasks of a step with the outcomes of their trajectories in it.
local function outcomes(step)
  local tasks = {}
  local function task_in(query)
    local source, item, number = task_of(query)
    if not source then
      return nil
    end
    local name = source .. '.' .. item
    local task = tasks[name]
    if not task then
      task = {source = source, item = item, number = number, solved = 0, ended = 0}
      tasks[name] = task
    end
    task.number = math.max(task.number, number)
    return task
  end
  for _, query in ipairs(redis.call('HKEYS', key_of(step, 'queries'))) do
    task_in(query)
  end
  local left = redis.call('HGETALL', key_of(step, 'left'))
  for index = 1, #left, 2 do
    if left[index + 1]:sub(1, 8) == 'dropped\t' then
      task_in(left[index])
    end
  end
  -- Fields of a records.Ending: state, attempt, query, reason, rows, solved, spare.
  local fields = '^([^\t]*)\t[^\t]*\t([^\t]*)\t[^\t]*\t[^\t]*\t([^\t]*)'
  local endings = redis.call('HGETALL', key_of(step, 'ended'))
  for index = 2, #endings, 2 do
    local state, query, solved = endings[index]:match(fields)
    local task = (state == 'COMPLETED' or state == 'FAILED') and task_in(query)
    if task then
      task.ended = task.ended + 1
      task.solved = task.solved + (solved == '1' and 1 or 0)
    end
  end
  return tasks
end

local function count(task)
  local key = BASE .. ':rates:' .. task.source .. ':' .. math.floor(task.item / 100)
  local stored = redis.call('HGET', key, task.item)
  local solved, ended = 0, 0
  if stored then
    solved, ended = stored:match('^(%S+) (%S+)$')
  end
  if task.ended > 0 then
    solved, ended = solved * memory + task.solved, ended * memory + task.ended
    redis.call('HSET', key, task.item, string.format('%.17g %.17g', solved, ended))
  end
  local pool = 'n'
  if tonumber(ended) > 0 then
    local rate = solved / ended
    pool = rate < low and 'f' or rate > high and 's' or 'w'
  end
  put(task.source, task.item, pool, task.number)
end

local newest = tonumber(redis.call('ZREVRANGE', STEPS, 0, 0)[1] or -1)
if tonumber(STEP_NUMBER) > newest + 1 then
  return {'missing', newest + 1}
end
for step = tonumber(redis.call('HGET', CURRICULUM, 'counted') or 0), tonumber(STEP_NUMBER) - 1 do
  local stored = redis.call('HMGET', key_of(step, 'step'), 'held_open', 'ended', 'expected')
  -- Steps before the first query of the curriculum may be forgotten.
  if stored[3] then
    if stored[1] == '1' or tonumber(stored[2]) < tonumber(stored[3]) then
      return {'unsealed', step, stored[2], stored[3]}
    end
    for _, task in pairs(outcomes(step)) do
      count(task)
    end
  end
  redis.call('HSET', CURRICULUM, 'counted', step + 1)
end

local sources = {}
for source = 0, #ARGV - 5 do
  local found = {tonumber(redis.call('HGET', CURRICULUM, 'next:' .. source) or 0)}
  for _, pool in ipairs(POOLS) do
    local name = pool_of(source, pool)
    local wanted = tonumber(ARGV[source + 5])
    found[#found + 1] = {redis.call('ZCARD', name),
      wanted > 0 and redis.call('ZRANGE', name, 0, wanted - 1) or {}}
  end
  sources[#sources + 1] = found
end
return {'read', sources}
