-- Carrying of queries from one step of a table to another. Appended to return.lua.

-- Counts a row that enters the current step (`by` is 1) or leaves it (-1).
local function tally_row(record, by)
  count(record[F.state], by)
  tally(record[F.query], 'rows', by)
  if record[F.state] == 'D' then
    count_dropped(record[F.reason], by)
  end
  if record[F.state] == 'P' or record[F.state] == 'D' then
    tally(record[F.query], record[F.state], by)
    if record[F.state] == 'P' and record[F.missing] ~= '' then
      tally(record[F.query], 'L', by)
    end
  end
end

-- Counts the raw row of a dropped row that others still refer to, in the same way.
local function tally_left(record, by)
  if record[F.state] == 'D' then
    count('stem_bytes', by * redis.call('HSTRLEN', rows_of(record), record[F.turn]))
  end
end

-- Removes all rows of these queries (query -> true) from the current step; returns them by query.
local function take_out(queries)
  local taken = {}
  for query in pairs(queries) do
    local ended = tonumber(redis.call('HGET', QUERIES, query) or 0)
    taken[query] = {
      rows = members(query), endings = {}, staged = {}, ended = ended,
      completed = redis.call('HGET', COMPLETED, query),
    }
    for _, member in ipairs(taken[query].rows) do
      local sample, record = member[1], member[2]
      if record[F.state] ~= 'P' and record[F.state] ~= 'D' then
        error('sample ' .. sample .. ' is ' .. record[F.state] .. ': its query cannot leave')
      end
      redis.call('HDEL', BOOK, sample)
      redis.call('ZREM', MEMBERS, query .. '\t' .. record[F.group] .. '\t' .. sample)
      tally_row(record, -1)
      tally_left(record, -1)
    end
    redis.call('HDEL', QUERIES, query)
    redis.call('HDEL', COMPLETED, query)
  end
  local endings = redis.call('HGETALL', ENDED)
  for index = 1, #endings, 2 do
    local query, reason = endings[index + 1]:match('^[^\t]*\t([^\t]*)\t(.*)$')
    if taken[query] then
      table.insert(taken[query].endings, {endings[index], endings[index + 1], reason})
      redis.call('HDEL', ENDED, endings[index])
      count('ended', -1)
      if reason ~= '' then
        count_dropped(reason, -1)
      end
    end
  end
  for _, name in ipairs(redis.call('SMEMBERS', STAGES)) do
    local text = redis.call('HGET', staged_key(name), RECORDS)
    local query = text and text:match('^[^\n]*')
    if query and taken[query] then
      table.insert(taken[query].staged, name)
      redis.call('SREM', STAGES, name)
    end
  end
  return taken
end

-- Adds the rows of a query that were removed from step `from` to the current step.
local function put_in(query, from, taken)
  local function old(name)
    return BASE .. ':' .. from .. ':' .. name
  end
  for _, ending in ipairs(taken.endings) do
    redis.call('HSET', ENDED, ending[1], ending[2])
    count('ended', 1)
    if ending[3] ~= '' then
      count_dropped(ending[3])
    end
    local rows = old('rows') .. ':' .. ending[1]
    if redis.call('EXISTS', rows) == 1 then
      redis.call('RENAME', rows, key('rows') .. ':' .. ending[1])
    end
  end
  for _, name in ipairs(taken.staged) do
    redis.call('RENAME', old('staged') .. ':' .. name, staged_key(name))
    redis.call('SADD', STAGES, name)
  end
  for _, member in ipairs(taken.rows) do
    local sample, record = member[1], member[2]
    tally_left(record, 1)
    if redis.call('HSETNX', BOOK, sample, table.concat(record, '\t')) == 1 then
      redis.call('ZADD', MEMBERS, 0, query .. '\t' .. record[F.group] .. '\t' .. sample)
      tally_row(record, 1)
    else
      if record[F.state] ~= 'D' then
        free(record)
      end
      count_dropped('sample_id_taken')
    end
  end
  redis.call('HINCRBY', QUERIES, query, taken.ended)
  if taken.completed then
    redis.call('HINCRBY', COMPLETED, query, taken.completed)
  end
  if query_ended(query) then
    ripen_those(query)
  end
end
