-- Changes the roster of a step that is held open, atomically: adds, drops and carries queries.
-- Idempotent: a change is made only once.
-- ARGV: step, why queries are dropped, step that queries are carried to, close (0/1), cursor,
--       number to add, to drop, to carry, then these queries
local reason, target = ARGV[2], ARGV[3]
local stored = redis.call('HMGET', STEP, 'group_size', 'held_open', 'cursor', 'redundant')
if not stored[1] then
  return {'missing', STEP_NUMBER}
end
local group_size, held = tonumber(stored[1]), stored[2] == '1'
local redundant = tonumber(stored[4] or 0)
-- Number of trajectories of a query.
local size = group_size + redundant
local closing = ARGV[4] == '1' and held
local cursor = tonumber(ARGV[5]) > tonumber(stored[3] or 0) and ARGV[5]

-- A slice of the queries in ARGV.
local place = 8
local function take(number)
  local found = {}
  for index = 1, tonumber(number) do
    found[index] = ARGV[place + index]
  end
  place = place + #found
  return found
end
local additions, dropping, carrying = take(ARGV[6]), take(ARGV[7]), take(ARGV[8])

-- The other step that has the query now, if any.
local function elsewhere(query)
  for _, step in ipairs(redis.call('ZRANGE', LIVE, 0, -1)) do
    if step ~= STEP_NUMBER and redis.call('HEXISTS', key_of(step, 'queries'), query) == 1 then
      return step
    end
  end
end

local added = {}
for _, query in ipairs(additions) do
  if redis.call('HEXISTS', QUERIES, query) == 0 then
    local left, other = redis.call('HGET', LEFT, query), elsewhere(query)
    if left then
      return {'left', query, left}
    elseif other then
      return {'elsewhere', query, other}
    end
    added[#added + 1] = query
  end
end

-- The `queries` that can leave the step. `past` tells whether a query that has left did so in the
-- same way.
local complete, gone = {}, {}
local function leaving(queries, past)
  local found = {}
  for _, query in ipairs(queries) do
    local ended, left = redis.call('HGET', QUERIES, query), redis.call('HGET', LEFT, query)
    if not ended then
      if not left then
        return nil, {'unknown_query', query}
      elseif not past(left) then
        return nil, {'left', query, left}
      end
    elseif tonumber(ended) >= size then
      complete[#complete + 1] = query
    else
      found[#found + 1] = query
      gone[query] = tonumber(ended)
    end
  end
  return found
end

local dropped, refusal = leaving(dropping, function(left)
  return left:sub(1, 8) == 'dropped\t'
end)
if refusal then
  return refusal
end
local carried, refused = leaving(carrying, function(left)
  return left == 'carried\t' .. target
end)
if refused then
  return refused
end
if next(added) or next(gone) or closing or cursor then
  if not held then
    return {'closed', STEP_NUMBER}
  end
else
  return {'amended', complete}
end
local TO = key_of(target, 'step')
if next(carried) then
  local there = redis.call('HMGET', TO, 'group_size', 'held_open', 'redundant')
  if not there[1] then
    return {'missing', target}
  elseif there[2] ~= '1' then
    return {'closed', target}
  elseif tonumber(there[1]) ~= group_size or tonumber(there[3] or 0) ~= redundant then
    return {'group_size', target, there[1]}
  end
  for _, query in ipairs(carried) do
    if redis.call('HEXISTS', key_of(target, 'queries'), query) == 1
        or redis.call('HEXISTS', key_of(target, 'left'), query) == 1 then
      return {'elsewhere', query, target}
    end
  end
end

-- All checks have passed. Rosters keep their order: new queries are appended.
local function rewrite(step, coming)
  local name = key_of(step, 'step')
  local kept = {}
  for _, query in ipairs(cjson.decode(redis.call('HGET', name, 'queries'))) do
    if step ~= STEP_NUMBER or not gone[query] then
      kept[#kept + 1] = query
    end
  end
  for _, query in ipairs(coming) do
    kept[#kept + 1] = query
  end
  redis.call('HSET', name, 'queries', next(kept) and cjson.encode(kept) or '[]')
end

for _, query in ipairs(added) do
  redis.call('HSET', QUERIES, query, 0)
  redis.call('HINCRBY', STEP, 'expected', size)
  ask(query)
end
for _, query in ipairs(dropped) do
  -- The names of trajectories that have not ended are unknown, so each gets a placeholder; a real
  -- name has no tab.
  for number = gone[query] + 1, size do
    redis.call('HSET', ENDED, query .. '\t' .. number,
      'ABORTED\t\t' .. query .. '\t' .. reason .. '\t\t\t')
    redis.call('HINCRBY', STEP, 'ended', 1)
  end
  redis.call('HDEL', QUERIES, query)
  redis.call('HSET', LEFT, query, 'dropped\t' .. (size - gone[query]) .. '\t' .. reason)
end
if next(carried) then
  local moving = {}
  for _, query in ipairs(carried) do
    moving[query] = true
    redis.call('HDEL', QUERIES, query)
    redis.call('HSET', LEFT, query, 'carried\t' .. target)
    redis.call('HSET', key_of(target, 'queries'), query, gone[query])
    redis.call('HSET', key_of(target, 'came'), query, STEP_NUMBER)
    local completed = redundant > 0 and redis.call('HGET', COMPLETED, query)
    if completed then
      redis.call('HDEL', COMPLETED, query)
      redis.call('HSET', key_of(target, 'completed'), query, completed)
    end
    redis.call('HINCRBY', STEP, 'expected', -size)
    redis.call('HINCRBY', TO, 'expected', size)
  end
  local endings = redis.call('HGETALL', ENDED)
  for index = 1, #endings, 2 do
    if moving[endings[index + 1]:match('^[^\t]*\t[^\t]*\t([^\t]*)')] then
      redis.call('HDEL', ENDED, endings[index])
      redis.call('HSET', key_of(target, 'ended'), endings[index], endings[index + 1])
      redis.call('HINCRBY', STEP, 'ended', -1)
      redis.call('HINCRBY', TO, 'ended', 1)
    end
  end
  rewrite(target, carried)
end
if next(added) or next(gone) then
  rewrite(STEP_NUMBER, added)
end
if closing then
  redis.call('HDEL', STEP, 'held_open')
end
if cursor then
  redis.call('HSET', STEP, 'cursor', cursor)
end
redis.call('INCR', ROSTERS)
return {'amended', complete}
