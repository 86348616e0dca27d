-- Decides endings and carries them out in this table, where one server holds the job's keys and those
-- of all its tables: in each table one script for all of them, and the first one decides. Their rows
-- are staged already, in every table, unless Redis refused them and not this. Repeatable.
-- ARGV: step, base of the job's keys, then for each ending: trajectory, query, ending
-- (records.Ending), attempt, how it ended, why (or ''), keys of its staged rows (one a line)
local known = tonumber(redis.call('HGET', BASE .. ':head', 'rosters') or -1)
local open = redis.call('EXISTS', STEP) == 1
local decide = decider(ARGV[2], STEP_NUMBER)
local ENDINGS = ARGV[2] .. ':' .. STEP_NUMBER .. ':ended'

-- Whether an ending has all its rows here; once it is decided they may be where they belong.
local function has_rows(trajectory, keys)
  local staged = lines(keys)
  return #staged == 0 or redis.call('EXISTS', unpack(staged)) == #staged
    or redis.call('HEXISTS', ENDINGS, trajectory) == 1
end

local replies = {}
for index = 3, #ARGV, 7 do
  local trajectory, query, attempt = ARGV[index], ARGV[index + 1], ARGV[index + 3]
  -- Whatever else is the case takes more than one script (trajectories.py).
  local reply = 'other'
  local decided = open and has_rows(trajectory, ARGV[index + 6])
    and decide(trajectory, query, ARGV[index + 2]) or {}
  if decided[1] == 'decided' and known >= tonumber(decided[3]) then
    local winner, spare = decided[2]:match('^[^\t]*\t([^\t]*)\t.*\t([^\t]*)$')
    if winner == attempt then
      local number = tonumber(spare) or 0
      local outcome, detail =
        carry(trajectory, query, attempt, ARGV[index + 4], ARGV[index + 5], number)
      if outcome ~= 'carried' then
        reply = outcome .. '\t' .. detail .. '\t' .. number
      end
    end
  end
  replies[#replies + 1] = reply
end
all_carried()
-- As one text: a reply costs whoever reads it by its elements.
return finish({'done', table.concat(replies, '\n')})
