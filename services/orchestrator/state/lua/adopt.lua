-- Takes a job over: the next epoch, and whose it is.
-- KEYS record. ARGV owner. Returns the epoch.
redis.call('HSET', KEYS[1], 'owner', ARGV[1])
return redis.call('HINCRBY', KEYS[1], 'epoch', 1)
