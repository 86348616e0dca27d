-- Applies decided endings of trajectories to this table: their staged rows become samples. Appended
-- to samples.lua.

-- A line of staged records: a record without query and trajectory, which all lines share. Captures
-- the part up to these, its size, turn and missing columns; the part up to `since`, its group; and
-- the rest.
local FIELD = '[^\t\n]*'
local STAGED = '\n(' .. (FIELD .. '\t'):rep(2) .. '(' .. FIELD .. ')\t(' .. FIELD .. ')\t'
  .. FIELD .. '\t(' .. FIELD .. ')\t' .. (FIELD .. '\t'):rep(2) .. ')(' .. FIELD .. '\t('
  .. FIELD .. ')\t' .. (FIELD .. '\t'):rep(3) .. ')\t(\t' .. FIELD .. '\t' .. FIELD .. ')'

-- Queries that may be complete now.
local complete, seen = {}, {}

-- Moves staged rows into the table; returns the time, in ms of the Redis clock.
local function enter(query, trajectory, name, text)
  local rows = key('rows') .. ':' .. trajectory
  redis.call('SREM', STAGES, name)
  redis.call('RENAME', staged_key(name), rows)
  redis.call('HDEL', rows, RECORDS)
  -- The same text as in the records: the appender finds its rows by this time (recent.py).
  local now = string.format('%.0f', now_ms())
  local samples, records, sizes, lacks, groups = {}, {}, {}, {}, {}
  local own = query .. '\t' .. trajectory .. '\t'
  for head, size, turn, missing, middle, group, behind in text:gmatch(STAGED) do
    local number = #samples + 1
    samples[number] = query .. '_' .. turn .. '_' .. trajectory
    records[number] = head .. own .. middle .. now .. '\t' .. behind
    sizes[number], lacks[number], groups[number] = size, missing, group
  end
  if #samples ~= select(2, text:gsub('\n', '')) then
    error('damaged records of staged rows in ' .. rows)
  end
  prefetch(samples)
  local names, bytes, lacking = {}, 0, 0
  for index, sample in ipairs(samples) do
    if not book[sample] then
      book[sample] = records[index]
      unsaved[sample] = true
      names[#names + 1] = '0'
      names[#names + 1] = query .. '\t' .. groups[index] .. '\t' .. sample
      bytes = bytes + tonumber(sizes[index])
      lacking = lacking + (lacks[index] ~= '' and 1 or 0)
    else
      -- Another trajectory has a sample with this id, whose row must not be replaced.
      count_dropped('sample_id_taken')
    end
  end
  each('ZADD', MEMBERS, names)
  count('P', #names / 2)
  tally(query, 'rows', #names / 2)
  tally(query, 'P', #names / 2)
  tally(query, 'L', lacking)
  weigh(bytes)
  return now
end

-- Moves a trajectory's staged rows into the table, and counts it as ended for its query. `spare`:
-- number of redundant trajectories of its query that were ended with it. Idempotent. Call
-- all_carried() after the last one.
local function carry(trajectory, query, attempt, how, reason, spare)
  local name = trajectory .. ':' .. attempt
  if redis.call('HEXISTS', ENDED, trajectory) == 1 then
    redis.call('UNLINK', staged_key(name))
    redis.call('SREM', STAGES, name)
    return 'repeated', ''
  end
  local left = redis.call('HGET', ROSTER, query) or ''
  if left:sub(1, 3) == 'to\t' then
    return 'carried', left:sub(4)
  end
  redis.call('HSET', ENDED, trajectory, how .. '\t' .. query .. '\t' .. reason)
  local text, now = redis.call('HGET', staged_key(name), RECORDS), ''
  if text then
    now = enter(query, trajectory, name, text)
  end
  if reason ~= '' then
    count_dropped(reason)
  end
  redis.call('HINCRBY', QUERIES, query, 1 + spare)
  count('ended', 1 + spare)
  if spare > 0 then
    count_dropped('redundant', spare)
  end
  if how == 'COMPLETED' and get('redundant') > 0 then
    redis.call('HINCRBY', COMPLETED, query, 1)
  end
  changes('counts')
  if left:sub(1, 8) == 'dropped\t' then
    drop_pending(query, left:sub(9))
  elseif not seen[query] then
    seen[query] = true
    complete[#complete + 1] = query
  end
  return 'appended', now
end

-- Makes the groups of queries that are complete now claimable.
local function all_carried()
  for _, query in ipairs(complete) do
    if query_ended(query) then
      local _, pending, lacking = tallies_of(query)
      -- Shortcut for the usual case: all samples of the query still wait for their rewards.
      if lacking ~= pending then
        ripen_those(query, nil, lacking == 0)
      end
    end
  end
  if changed.counts and sealed() then
    -- The rest may be claimed as a last, smaller micro-batch.
    changes('claimable')
  end
end
