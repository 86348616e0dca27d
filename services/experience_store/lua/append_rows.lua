-- Carries out in this table what was decided about a trajectory: its staged rows enter the table,
-- and its query is one trajectory nearer to being complete. Repeatable.
-- ARGV: step, trajectory, query, attempt, how it ended, why (or ''), number of the rosters that the
--       table must know at least: until then the rows may be staged in another step; redundant
--       trajectories of its query that were ended with it
local known = tonumber(redis.call('HGET', BASE .. ':head', 'rosters') or -1)
if redis.call('EXISTS', STEP) == 0 or known < tonumber(ARGV[7]) then
  return {'missing'}
end
local trajectory, query, reason = ARGV[2], ARGV[3], ARGV[6]
if redis.call('HEXISTS', ENDED, trajectory) == 1 then
  return {'repeated'}
end
local left = redis.call('HGET', ROSTER, query) or ''
if left:sub(1, 3) == 'to\t' then
  return {'carried', left:sub(4)}
end
redis.call('HSET', ENDED, trajectory, ARGV[5] .. '\t' .. query .. '\t' .. reason)
local staged = key('staged') .. ':' .. trajectory .. ':' .. ARGV[4]
local text, now = redis.call('HGET', staged, RECORDS), ''
if text then
  redis.call('HDEL', staged, RECORDS)
  redis.call('SREM', STAGES, staged)
  redis.call('RENAME', staged, key('rows') .. ':' .. trajectory)
  -- As it is in the records: who appended finds its rows by it (recent.py).
  now = string.format('%.0f', now_ms())
  local samples, records, names = {}, {}, {}
  for _, line in ipairs(lines(text)) do
    local sample, record = line:match('^([^\t]*)\t(.*)$')
    samples[#samples + 1], records[#records + 1] = sample, record
  end
  prefetch(samples)
  for index, sample in ipairs(samples) do
    local fields = parse(records[index])
    fields[F.since] = now
    if not book[sample] then
      save(sample, fields)
      names[#names + 1] = 0
      names[#names + 1] = query .. '\t' .. fields[F.group] .. '\t' .. sample
      count('P', 1)
      weigh(fields[F.size])
      tally(query, 'rows', 1)
      tally(query, 'P', 1)
    else
      -- Another trajectory has a sample of this id: its row must not be replaced.
      count_dropped('sample_id_taken')
    end
  end
  each('ZADD', MEMBERS, names)
end
if reason ~= '' then
  count_dropped(reason)
end
local spare = tonumber(ARGV[8])
redis.call('HINCRBY', QUERIES, query, 1 + spare)
count('ended', 1 + spare)
if spare > 0 then
  count_dropped('redundant', spare)
end
if ARGV[5] == 'COMPLETED' and get('redundant') > 0 then
  redis.call('HINCRBY', COMPLETED, query, 1)
end
changes('counts')
if left:sub(1, 8) == 'dropped\t' then
  drop_pending(query, left:sub(9))
elseif query_ended(query) then
  ripen(members(query))
end
if sealed() then
  -- What is left may be claimed as a last, smaller micro-batch.
  changes('claimable')
end
return finish({'appended', now})
