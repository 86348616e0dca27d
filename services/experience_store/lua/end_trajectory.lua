-- Decides how a trajectory ended (decide.lua).
-- ARGV: step, trajectory, query, ending (records.Ending)
return decider(BASE, STEP_NUMBER)(ARGV[2], ARGV[3], ARGV[4])
