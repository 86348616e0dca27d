-- Applies the job's decided rosters to one policy's table. A roster is the list of queries of a
-- step. Idempotent; rosters older than those that the table knows change nothing.
-- ARGV: step, number of the rosters, drop groups without signal (0/1), rosters (rosters.lua)
local HEAD = BASE .. ':head'
if tonumber(redis.call('HGET', HEAD, 'rosters') or -1) >= tonumber(ARGV[2]) then
  return {'known'}
end
local rosters = cjson.decode(ARGV[4])
-- The job was deleted while claimants still call: a new key would never be freed.
if #rosters == 0 and redis.call('EXISTS', HEAD) == 0 then
  return {'admitted'}
end
for _, roster in ipairs(rosters) do
  on_step(roster.step)
  -- A step is committed only after its roster was closed, so it cannot have changed since.
  if not committed() then
    put('group_size', roster.group_size, 'expected', roster.expected, 'held_open', roster.held, 'signal', ARGV[3], 'redundant', roster.redundant)
    changes('counts')
    local coming = {}
    for _, query in ipairs(roster.came) do
      local name, from = query[1], query[2]
      if redis.call('HEXISTS', ROSTER, name) == 0 then
        redis.call('HSET', ROSTER, name, 'from\t' .. from)
        coming[from] = coming[from] or {}
        coming[from][name] = true
      end
    end
    for from, queries in pairs(coming) do
      on_step(from)
      local taken = take_out(queries)
      if redis.call('EXISTS', STEP) == 1 then
        for query in pairs(queries) do
          redis.call('HSET', ROSTER, query, 'to\t' .. roster.step)
        end
        changes('counts')
      end
      on_step(roster.step)
      for query in pairs(queries) do
        put_in(query, from, taken[query])
      end
    end
    for _, query in ipairs(roster.dropped) do
      local reason = query[3]
      if (redis.call('HGET', ROSTER, query[1]) or ''):sub(1, 8) ~= 'dropped\t' then
        redis.call('HSET', ROSTER, query[1], 'dropped\t' .. reason)
        for _ = 1, tonumber(query[2]) do
          count_dropped(reason)
        end
        count('ended', tonumber(query[2]))
        redis.call('HINCRBY', QUERIES, query[1], query[2])
        drop_pending(query[1], reason)
        changes('claimable')
      end
    end
    arrive()
    if sealed() then
      changes('claimable')
    end
  end
end
finish()
redis.call('HSET', HEAD, 'rosters', ARGV[2])
return {'admitted'}
