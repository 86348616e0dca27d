-- Returns the rosters of the open steps and of the given step, for the policies' tables.
-- ARGV: step
local steps, known = redis.call('ZRANGE', LIVE, 0, -1), {}
for _, step in ipairs(steps) do
  known[step] = true
end
if not known[STEP_NUMBER] then
  steps[#steps + 1] = STEP_NUMBER
end
local found = {}
for _, step in ipairs(steps) do
  local stored = redis.call('HMGET', key_of(step, 'step'), 'group_size', 'expected', 'held_open',
    'redundant')
  if stored[1] then
    local left, dropped = redis.call('HGETALL', key_of(step, 'left')), {}
    for index = 1, #left, 2 do
      local lacking, reason = left[index + 1]:match('^dropped\t([^\t]*)\t(.*)$')
      if lacking then
        dropped[#dropped + 1] = {left[index], lacking, reason}
      end
    end
    local came, coming = redis.call('HGETALL', key_of(step, 'came')), {}
    for index = 1, #came, 2 do
      coming[#coming + 1] = {came[index], came[index + 1]}
    end
    found[#found + 1] = {
      step = step, group_size = stored[1], expected = stored[2], held = stored[3] or '0',
      redundant = stored[4] or '0',
      dropped = dropped, came = coming,
    }
  end
end
return {redis.call('GET', ROSTERS) or '0', redis.call('EXISTS', STEP), cjson.encode(found)}
