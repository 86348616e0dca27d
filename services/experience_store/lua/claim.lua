-- Leases ready samples: a full micro-batch, or the rest once no more can come.
-- ARGV: step, claim, claimant, max samples, max tokens (0: no bound), max bytes, lease in ms,
--       oldest version ('': any), whole groups (0/1), balance tokens (0/1), most bytes of a group
drains()
if redis.call('EXISTS', STEP) == 0 then
  return {'missing'}
end
local claim, claimant = ARGV[2], ARGV[3]
local max_samples, max_tokens, max_bytes = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local whole, balance = ARGV[9] == '1', ARGV[10] == '1'
if committed() then
  return {'exhausted'}
end
expire()

-- State, tokens, size, reward, query, group, reason, origin and stem, in the text of a record.
local LOOK = '^(.)\t([^\t]*)\t([^\t]*)\t[^\t]*\t([^\t]*)' .. ('\t[^\t]*'):rep(3) .. '\t([^\t]*)'
  .. ('\t[^\t]*'):rep(2) .. '\t([^\t]*)\t([^\t]*)' .. ('\t[^\t]*'):rep(3)
  .. '\t([^\t]*)\t([^\t]*)\t[^\t]*$'
local looks = {}
local function look(sample, text)
  local found = looks[sample]
  if not found then
    local state, tokens, size, reward, query, group, reason, origin, stem = text:match(LOOK)
    found = {
      state = state, reason = reason, tokens = tonumber(tokens), size = tonumber(size), reward = reward,
      family = origin == '' and query or query .. '@' .. origin, group = group,
      -- With the raw rows that it refers to, which its claim may have to bring.
      whole_size = tonumber(size) + (stem == '' and 0 or tonumber(stem:match(' (%d+)$'))),
    }
    looks[sample] = found
  end
  return found
end

-- Compares members by the bytes of their names, as Redis does: Lua's own comparison uses the
-- locale.
local function earlier(one, other)
  for at = 1, math.min(#one[1], #other[1]) do
    local a, b = one[1]:byte(at), other[1]:byte(at)
    if a ~= b then
      return a < b
    end
  end
  return #one[1] < #other[1]
end

-- The reply for claimed samples: their records, and the final rewards of their groups, in few
-- strings, since the client's cost grows with the elements of a reply. `ordered`: they are in order
-- of the bytes of their names.
local function deliver(samples, ordered)
  local records, groups, rewards, number_of = {}, {}, {}, {}
  prefetch(samples)
  local of_family = {}
  for _, sample in ipairs(samples) do
    local family = look(sample, book[sample]).family
    of_family[family] = (of_family[family] or 0) + 1
  end
  -- Groups of the queries of which most samples are claimed, family -> group -> {samples, texts},
  -- read at once: a lookup per group takes longer.
  local found, all = {}, {}
  local function add(family, group, sample, text)
    local members = found[family][group] or {{}, {}}
    found[family][group] = members
    members[1][#members[1] + 1], members[2][#members[2] + 1] = sample, text
  end
  for family, number in pairs(of_family) do
    local rows = tallies_of(family)
    if rows == number and ordered then
      found[family], all[family] = {}, true
    elseif rows > 0 and rows <= 2 * number then
      local names, texts, own = texts_of(family)
      found[family] = {}
      for place, group in ipairs(own) do
        add(family, group, names[place], texts[place])
      end
    end
  end
  for _, sample in ipairs(samples) do
    local own = look(sample, book[sample])
    if all[own.family] then
      add(own.family, own.group, sample, book[sample])
    end
  end
  for index, sample in ipairs(samples) do
    local own = look(sample, book[sample])
    local name = own.family .. '\t' .. own.group
    if not number_of[name] then
      local values, lost = {}, lost_members(name)
      local names, texts
      if found[own.family] then
        names, texts = unpack(found[own.family][own.group])
      else
        names, texts = texts_of(own.family, own.group)
      end
      local gaps = lost[1]
      for place, text in ipairs(texts) do
        local member = look(names[place], text)
        -- A sample dropped as VALUE_GONE was a member when the group's statistics became final.
        if member.state ~= 'D' or member.reason == VALUE_GONE then
          values[#values + 1] = gaps and {names[place], member.reward} or member.reward
        end
      end
      if gaps then
        for _, member in ipairs(lost) do
          values[#values + 1] = {member[1], member[3]}
        end
        -- In their earlier order: a floating-point sum depends on it.
        table.sort(values, earlier)
        for place, value in ipairs(values) do
          values[place] = value[2]
        end
      end
      rewards[#rewards + 1] = table.concat(values, ',')
      number_of[name] = #rewards
    end
    records[index] = book[sample]
    groups[index] = number_of[name]
  end
  return finish({
    'claimed', table.concat(samples, '\n'), table.concat(records, '\n'),
    table.concat(groups, ','), table.concat(rewards, '\n'),
  })
end

local known = redis.call('HGET', CLAIMS, claim)
if known then
  if known:sub(1, 1) == '\t' then
    return finish({'lost', known:sub(2)})
  elseif redis.call('HGET', OWNERS, claim) ~= claimant then
    return finish({'taken', redis.call('HGET', OWNERS, claim)})
  end
  redis.call('ZADD', LEASES, lease_now() + tonumber(ARGV[7]), claim)
  return deliver(lines(known))
end

local cause = fence(claimant)
if cause then
  return finish({'lost', cause})
end

-- The bound on versions belongs to the step and only rises: samples that it excludes are dropped.
local bound = tonumber(ARGV[8])
if bound and bound > get('oldest_version') then
  put('oldest_version', ARGV[8])
  local begun = redis.call('HGET', STEP, 'begun')
  if begun and tonumber(begun) < bound then
    evict(ready('ZRANGE', 0, -1))
  end
end

local waiting = get('R')
local full = waiting >= max_samples
  or (max_tokens > 0 and get('ready_tokens') >= max_tokens)
  or get('ready_bytes') >= max_bytes
local final = sealed() and get('P') == 0
if waiting == 0 or not (full or final) then
  if final and get('C') == held(claimant) then
    return finish({'exhausted'})
  end
  -- The end of a lease is not announced, so the caller is told when to ask again.
  local first = redis.call('ZRANGE', LEASES, 0, 0, 'WITHSCORES')
  return finish({'wait', first[2] and math.max(1, tonumber(first[2]) - lease_now()) or 0})
end

local samples, taken, moved, tokens, bytes, too_large = {}, {}, {}, 0, 0, nil

-- The samples that are claimed together with `sample`: its whole group, or the sample alone.
local function unit_of(sample)
  book[sample] = book[sample] or redis.call('HGET', BOOK, sample)
  if not whole then
    return {sample}
  end
  local unit = {}
  local own = look(sample, book[sample])
  local names, texts = texts_of(own.family, own.group)
  for index, name in ipairs(names) do
    if texts[index]:sub(1, 1) == 'R' then
      book[name] = texts[index]
      unit[#unit + 1] = name
    end
  end
  return unit
end

-- Takes a unit unless it exceeds a bound; the first unit is checked against the last bound only.
local function take(unit)
  local more_tokens, more_bytes = tokens, bytes
  for _, sample in ipairs(unit) do
    local own = look(sample, book[sample])
    more_tokens, more_bytes = more_tokens + own.tokens, more_bytes + own.whole_size
  end
  if #samples > 0 and (#samples + #unit > max_samples or more_bytes > max_bytes
      or (max_tokens > 0 and more_tokens > max_tokens)) then
    return false
  elseif more_bytes > tonumber(ARGV[11]) then
    too_large = {'too_large', looks[unit[1]].group, more_bytes}
    return false
  end
  tokens, bytes = more_tokens, more_bytes
  for _, sample in ipairs(unit) do
    local own = look(sample, book[sample])
    moved[#moved + 1] = sample
    samples[#samples + 1] = sample
    taken[sample] = true
  end
  return true
end

-- Moves the taken samples out of READY; only the state in their records is rewritten.
local function claim_taken()
  local tokens, bytes = 0, 0
  for _, sample in ipairs(moved) do
    local own = looks[sample]
    if own.state ~= 'R' then
      error('sample ' .. sample .. ': ' .. own.state .. ' -> C is not allowed here')
    end
    leaving[#leaving + 1] = sample
    tokens, bytes = tokens + own.tokens, bytes + own.size
    book[sample] = 'C' .. book[sample]:sub(2)
    unsaved[sample] = true
    changes('counts')
  end
  count('R', -#moved)
  count('C', #moved)
  count('ready_tokens', -tokens)
  count('ready_bytes', -bytes)
  count('claimed_bytes', bytes)
  moved = {}
end

local function take_in_order()
  local first = ready('ZRANGE', 0, max_samples - 1)
  prefetch(first)
  for _, sample in ipairs(first) do
    -- The sample may have been taken together with its group.
    if not taken[sample] and not take(unit_of(sample)) then
      return
    end
  end
end

-- Balances tokens over claims: takes the largest unit first, then repeatedly the largest one that
-- leaves room for the smallest units in the remaining places, up to the average tokens per claim.
local function take_balanced()
  if redis.call('HSETNX', STEP, 'order', whole and 'group' or 'tokens') == 1 then
    order = nil
    local all, places = ready('ZRANGE', 0, -1), {}
    prefetch(all)
    for _, sample in ipairs(all) do
      places[#places + 1] = place(record_of(sample))
      places[#places + 1] = sample
    end
    each('ZADD', READY, places)
  end
  local mean = get('ready_tokens') / waiting
  local unit = unit_of(ready('ZREVRANGE', 0, 0)[1])
  local size = #unit
  local places = math.max(1, math.floor(math.min(max_samples, waiting) / size))
  local target = places * size * mean
  local most = mean * waiting * max_bytes / math.max(1, get('ready_bytes'))
  if max_tokens > 0 then
    most = math.min(most, max_tokens)
  end
  -- If tokens or bytes bound the claim, rather than the number of samples, places may stay empty.
  local filling = target <= most
  target = math.min(target, most)
  while unit and take(unit) do
    places = places - 1
    claim_taken()
    local smallest = ready('ZRANGE', 0, 0, 'WITHSCORES')
    if not smallest[1] or places == 0 then
      return
    end
    local room = target - tokens
    if filling then
      room = room - (places - 1) * tonumber(smallest[2])
    end
    local next_one = ready('ZREVRANGEBYSCORE', room, '-inf', 'LIMIT', 0, 1)[1]
    next_one = next_one or (filling and smallest[1])
    unit = next_one and unit_of(next_one)
  end
end

if balance then
  take_balanced()
else
  take_in_order()
end
claim_taken()
if too_large then
  return finish(too_large)
end
order = order or redis.call('HGET', STEP, 'order') or 'id'
local ordered = order == 'id' and not whole and not balance
for index = 2, #samples do
  -- Usually they are in order of their ids already.
  if samples[index] < samples[index - 1] then
    table.sort(samples)
    ordered = false
    break
  end
end
redis.call('HSET', CLAIMS, claim, table.concat(samples, '\n'))
redis.call('HSET', OWNERS, claim, claimant)
redis.call('ZADD', LEASES, lease_now() + tonumber(ARGV[7]), claim)
redis.call('HINCRBY', HELD, claimant, #samples)
redis.call('HDEL', FENCED, claimant)
if redis.call('HSETNX', STEP, 'owner', claimant) == 1 then
  changes('counts')
end
return deliver(samples, ordered)
