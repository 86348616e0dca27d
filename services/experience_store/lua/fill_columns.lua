-- Fills columns of samples, or drops the samples of which a column cannot be computed. The first
-- value of a column wins. Idempotent.
-- ARGV: step, samples that get a reward and nothing else (lines: its id, TAB, reward), then for
-- each other sample: its id, reward (or ''), reason to drop it (or ''), number of columns, and
-- these: column, bytes, column, bytes... `bytes` is a serialized Sample with this column only:
-- appended to the raw row, it is merged by the protobuf decoder.
if redis.call('EXISTS', STEP) == 0 then
  return {'missing'}
end

-- The steps in which `sample` may be, as its query was carried there.
local function carried_to(sample)
  local roster, steps = redis.call('HGETALL', ROSTER), {}
  for index = 1, #roster, 2 do
    local to = roster[index + 1]:match('^to\t(.*)$')
    if to and sample:sub(1, #roster[index] + 1) == roster[index] .. '_' then
      steps[#steps + 1] = to
    end
  end
  return table.concat(steps, ',')
end

-- Groups that may be ready now, by their query; `over`: queries that are complete.
local touched, waiting, over = {}, false, {}
local function touch(family, group)
  if over[family] == nil then
    -- The query of a sample that came back from an earlier step has always ended.
    over[family] = query_ended(family)
  end
  if over[family] then
    waiting = true
    touched[family] = touched[family] or {}
    touched[family][group] = true
  end
end

-- Called when a PENDING sample has got its last column.
local function lacks_less(family)
  tally(family, 'L', -1)
end

-- Fast path for the most common fill, a reward and nothing else: reads only the start of the
-- record.
local REWARDLESS = '^(.)(' .. ('\t[^\t]*'):rep(3) .. '\t)([^\t]*)\t([^\t]*)(\t.*)$'
local function fill_reward(sample, text, reward)
  local state, sizes, known, missing, rest = text:match(REWARDLESS)
  if state == 'D' or known ~= '' then
    return 'repeated', state
  elseif state ~= 'P' and state ~= 'R' then
    return 'final', state
  end
  if missing == 'reward' then
    missing = ''
  elseif missing ~= '' then
    local names = set_of(missing)
    names['reward'] = nil
    missing = text_of(names)
  end
  book[sample] = state .. sizes .. reward .. '\t' .. missing .. rest
  unsaved[sample] = true
  changes('counts')
  -- A sample that still lacks a column cannot make its group ready.
  if state == 'P' and missing == '' then
    local family, group = family_of(text)
    lacks_less(family)
    touch(family, group)
  end
  return 'filled', state
end

-- ARGV[first..last] are the columns.
local function fill(sample, reward, reason, first, last)
  local text = book[sample]
  if not text then
    return 'unknown', carried_to(sample)
  elseif reason == '' and reward ~= '' and last < first then
    return fill_reward(sample, text, reward)
  end
  local record = parse(text)
  local state = record[F.state]
  if state == 'D' then
    return 'repeated', state
  end
  if reason ~= '' then
    if state ~= 'P' then
      return 'final', state
    end
    drop(sample, record, reason)
    touch(family(record), record[F.group])
    return 'filled', 'D'
  end
  local early, late, fresh = set_of(record[F.early]), set_of(record[F.late]), {}
  for index = first, last, 2 do
    if not early[ARGV[index]] and not late[ARGV[index]] then
      fresh[ARGV[index]] = ARGV[index + 1]
    end
  end
  local rewarded = reward ~= '' and record[F.reward] == ''
  if not rewarded and not next(fresh) then
    return 'repeated', state
  elseif state ~= 'P' and state ~= 'R' then
    return 'final', state
  end
  local missing, lacked = set_of(record[F.missing]), record[F.missing] ~= ''
  if rewarded then
    record[F.reward] = reward
    missing['reward'] = nil
  end
  for name, bytes in pairs(fresh) do
    redis.call('HSET', rows_of(record), record[F.turn] .. '\t' .. name, bytes)
    record[F.size] = tonumber(record[F.size]) + #bytes
    weigh(#bytes)
    if state == 'R' then
      count('ready_bytes', #bytes)
    end
    late[name] = true
    missing[name] = nil
  end
  record[F.missing], record[F.late] = text_of(missing), text_of(late)
  save(sample, record)
  changes('counts')
  if state == 'P' then
    if lacked and record[F.missing] == '' then
      lacks_less(family(record))
    end
    touch(family(record), record[F.group])
  end
  return 'filled', state
end

local samples, outcomes, states = {}, {}, {}
for sample in ARGV[2]:gmatch('([^\t\n]+)\t') do
  samples[#samples + 1] = sample
end
local plain, places, index = #samples, {}, 3
while index <= #ARGV do
  samples[#samples + 1], places[#places + 1] = ARGV[index], index
  index = index + 4 + 2 * tonumber(ARGV[index + 3])
end
prefetch(samples)
local number = 0
for reward in ARGV[2]:gmatch('\t([^\n]*)') do
  number = number + 1
  outcomes[number], states[number] = fill(samples[number], reward, '', 1, 0)
end
for place, at in ipairs(places) do
  local last = at + 3 + 2 * tonumber(ARGV[at + 3])
  outcomes[plain + place], states[plain + place] =
    fill(ARGV[at], ARGV[at + 1], ARGV[at + 2], at + 4, last)
end
for query, groups in pairs(touched) do
  local number = 0
  for _ in pairs(groups) do
    number = number + 1
  end
  local rows, _, lacking = tallies_of(query)
  -- Finding a group costs as much as reading several rows.
  if rows <= 8 * number then
    ripen_those(query, nil, lacking == 0)
  else
    for group in pairs(groups) do
      ripen_those(query, group, lacking == 0)
    end
  end
end
if waiting then
  if sealed() then
    -- If these were the last samples, a smaller micro-batch may be claimed, or the step is over.
    changes('claimable')
  end
  for at, outcome in ipairs(outcomes) do
    if outcome == 'filled' then
      states[at] = book[samples[at]]:sub(1, 1)
    end
  end
end
-- One string: the client's cost grows with the elements of a reply.
local claimed
for at, outcome in ipairs(outcomes) do
  local state = states[at]
  if state == 'C' then
    claimed = claimed or (committed() and 'T' or 'C')
    state = claimed
  end
  outcomes[at] = outcome .. '\t' .. state
end
return finish({'done', table.concat(outcomes, '\n')})
