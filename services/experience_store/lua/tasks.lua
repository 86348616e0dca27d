-- Pools of the tasks of a job with a curriculum; appended to job.lua. A query `qN-PS.I` asks item I
-- of source S, and was chosen from pool P (TaskChoice in troupe/scheduling/curriculum.py).
local CURRICULUM = BASE .. ':curriculum'
local POOLS = {'n', 'w', 'f', 's', 'a'}

local function pool_of(source, pool)
  return BASE .. ':tasks:' .. source .. ':' .. pool
end

-- Source, item and number of a query; nothing if it does not belong to a curriculum.
local function task_of(query)
  local number, source, item = query:match('^q(%d+)%-%a(%d+)%.(%d+)$')
  return source, item, tonumber(number)
end

-- Moves a task to a pool. `number`: of the query that asked it last; pools are in this order.
local function put(source, item, pool, number)
  for _, other in ipairs(POOLS) do
    if other ~= pool then
      redis.call('ZREM', pool_of(source, other), item)
    end
  end
  redis.call('ZADD', pool_of(source, pool), number, item)
end

-- A query joins a step. Until the step is counted, its task is in the pool of asked tasks.
local function ask(query)
  local source, item, number = task_of(query)
  if not source then
    return
  end
  put(source, item, 'a', number)
  local sources = tonumber(redis.call('HGET', CURRICULUM, 'sources') or 0)
  local new = tonumber(redis.call('HGET', CURRICULUM, 'next:' .. source) or 0)
  redis.call('HSET', CURRICULUM, 'sources', math.max(sources, tonumber(source) + 1),
    'next:' .. source, math.max(new, tonumber(item) + 1))
end
