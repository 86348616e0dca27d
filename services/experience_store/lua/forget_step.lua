-- Frees all keys of a step in one table after it was logged as committed or as not committed; does
-- nothing if that has changed since. The step's contribution to the totals is kept.
-- ARGV: step, whether it was logged as committed (0/1)
drains()
local TOTALS = BASE .. ':totals'
if redis.call('EXISTS', STEP) == 1 then
  if committed() ~= (ARGV[2] == '1') then
    return {'changed'}
  end
  for _, state in ipairs({'P', 'R', 'C', 'T', 'D'}) do
    -- Samples that are not final were dropped with the job.
    redis.call('HINCRBY', TOTALS, state == 'T' and 'T' or 'D', get(state))
    if state ~= 'T' and state ~= 'D' and get(state) > 0 then
      redis.call('HINCRBY', TOTALS, 'reason:job_over', get(state))
    end
  end
  local dropped = redis.call('HGETALL', DROPPED)
  for index = 1, #dropped, 2 do
    redis.call('HINCRBY', TOTALS, 'reason:' .. dropped[index], dropped[index + 1])
  end
end
for _, trajectory in ipairs(redis.call('HKEYS', ENDED)) do
  redis.call('UNLINK', key('rows') .. ':' .. trajectory)
end
for _, rows in ipairs(redis.call('SMEMBERS', RETURNED)) do
  redis.call('UNLINK', rows)
end
for _, name in ipairs(redis.call('SMEMBERS', STAGES)) do
  redis.call('UNLINK', staged_key(name))
end
free_keeping(false)
free_sums()
redis.call('UNLINK', STEP, ENDED, QUERIES, BOOK, MEMBERS, READY, CLAIMS, OWNERS, LEASES, HELD,
  FENCED, DROPPED, STAGES, ROSTER, TALLIES, LEAVING, RETURNED, GONE, COMPLETED)
redis.call('HDEL', COMMITS, STEP_NUMBER)
return finish({'forgotten'})
