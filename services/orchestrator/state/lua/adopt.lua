-- Takes a job over: advances its epoch and sets its owner.
-- KEYS record. ARGV owner. Returns the epoch.
redis.call('HSET', KEYS[1], 'owner', ARGV[1])
return redis.call('HINCRBY', KEYS[1], 'epoch', 1)
