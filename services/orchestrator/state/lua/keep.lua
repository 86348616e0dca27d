-- Adds trajectories of a job, and deletes all but the newest `cap`.
-- KEYS order, summaries, full. ARGV cap, id, summary, full, id, summary, full, ...
for i = 2, #ARGV, 3 do
  if redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1]) == 1 then
    redis.call('RPUSH', KEYS[1], ARGV[i])
  end
  redis.call('HSET', KEYS[3], ARGV[i], ARGV[i + 2])
end
local surplus = redis.call('LLEN', KEYS[1]) - tonumber(ARGV[1])
while surplus > 0 do
  local id = redis.call('LPOP', KEYS[1])
  redis.call('HDEL', KEYS[2], id)
  redis.call('HDEL', KEYS[3], id)
  surplus = surplus - 1
end
return redis.call('LLEN', KEYS[1])
