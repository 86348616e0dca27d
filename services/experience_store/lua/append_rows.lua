-- Applies the decided ending of a trajectory to this table (carry.lua). Idempotent.
-- ARGV: step, trajectory, query, attempt, how it ended, why (or ''), number of the rosters that the
--       table must know at least: until then the rows may be staged in another step; redundant
--       trajectories of its query that were ended with it
local known = tonumber(redis.call('HGET', BASE .. ':head', 'rosters') or -1)
if redis.call('EXISTS', STEP) == 0 or known < tonumber(ARGV[7]) then
  return {'missing'}
end
local outcome, detail = carry(ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6], tonumber(ARGV[8]))
all_carried()
return finish({outcome, detail})
