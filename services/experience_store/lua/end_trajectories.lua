-- Decides endings and applies them to this table, if one server holds the keys of the job and of
-- all its tables: one script per table for all endings, of which the first decides. Their rows are
-- staged already in every table, unless Redis refused those and not this script. Idempotent.
-- ARGV: step, base of the job's keys, then for each ending: trajectory, query, ending
-- (records.Ending), attempt, how it ended, why (or ''), keys of its staged rows (one a line)
local known = tonumber(redis.call('HGET', BASE .. ':head', 'rosters') or -1)
local open = redis.call('EXISTS', STEP) == 1
local decide = decider(ARGV[2], STEP_NUMBER)
local ENDINGS = ARGV[2] .. ':' .. STEP_NUMBER .. ':ended'

-- Whether all rows of an ending are staged; those of a decided ending may have moved into the
-- table.
local function has_rows(trajectory, keys)
  local staged = lines(keys)
  return #staged == 0 or redis.call('EXISTS', unpack(staged)) == #staged
    or redis.call('HEXISTS', ENDINGS, trajectory) == 1
end

local replies = {}
for index = 3, #ARGV, 7 do
  local trajectory, query, attempt = ARGV[index], ARGV[index + 1], ARGV[index + 3]
  -- All other cases take more than one script (trajectories.py).
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
-- One string: the client's cost grows with the elements of a reply.
return finish({'done', table.concat(replies, '\n')})
