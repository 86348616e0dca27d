-- Token bucket of one quota that several hosts share, by Redis' clock. Same arithmetic as
-- `troupe.scheduling.elastic.quota.TokenBucket`: change both together.
-- KEYS bucket. ARGV what, holder, rate, burst, concurrency, patience, now ('': Redis' clock), ...
--   ask: wishes in units. give_back: units, unused. shut: seconds.
-- Returns granted and the wait in seconds (-1: until units are given back). Fields of the hash:
-- tokens, at, shut, turns, seen (when a script last ran); h:<holder> = "units until";
-- l:<holder> = "turn until units".
local what, holder = ARGV[1], ARGV[2]
local rate, burst, concurrency = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local patience, now = tonumber(ARGV[6]), tonumber(ARGV[7])
local EPSILON = 1e-9
local HOUR = 3600

if not now then
  local time = redis.call('TIME')
  now = tonumber(time[1]) + tonumber(time[2]) / 1e6
end

local function text(number) return string.format('%.17g', number) end

local tokens, at, shut, turns = burst, now, 0, 0
local holds, line, in_use = {}, {}, 0
local gone = {}

-- Where the wall clock was set back, all times go back with it: otherwise nothing is granted before
-- it has caught up.
local back = math.max(0, tonumber(redis.call('HGET', KEYS[1], 'seen') or now) - now)

local fields = redis.call('HGETALL', KEYS[1])
for i = 1, #fields, 2 do
  local name, value = fields[i], fields[i + 1]
  if name == 'tokens' then tokens = tonumber(value)
  elseif name == 'at' then at = tonumber(value) - back
  elseif name == 'shut' then shut = tonumber(value) - back
  elseif name == 'turns' then turns = tonumber(value)
  elseif name ~= 'seen' then
    local kind, whose = name:sub(1, 2), name:sub(3)
    local words = {}
    for word in value:gmatch('%S+') do words[#words + 1] = tonumber(word) end
    if back > 0 then
      words[2] = words[2] - back
      local texts = {}
      for index, word in ipairs(words) do texts[index] = text(word) end
      redis.call('HSET', KEYS[1], name, table.concat(texts, ' '))
    end
    if words[2] <= now then gone[#gone + 1] = name
    elseif kind == 'h:' then
      holds[whose] = { units = words[1], expires = words[2] }
      in_use = in_use + words[1]
    else line[whose] = { turn = words[1], expires = words[2], units = words[3] }
    end
  end
end
for _, name in ipairs(gone) do redis.call('HDEL', KEYS[1], name) end
tokens = math.min(burst, tokens)
if now > at then
  tokens, at = math.min(burst, tokens + (now - at) * rate), now
end

local function leave(kind) redis.call('HDEL', KEYS[1], kind .. holder) end

local granted, wait = 0, 0
if what == 'ask' then
  local wishes = {}
  for i = 8, #ARGV do wishes[#wishes + 1] = tonumber(ARGV[i]) end
  local hold = holds[holder]
  if #wishes == 0 then
    leave('l:')
  else
    local place = line[holder]
    local turn = place and place.turn or turns
    local ahead, others = 0, false
    for _, other in pairs(line) do
      if other.turn < turn then ahead, others = ahead + other.units, true end
    end
    if not others and now >= shut then
      for _, units in ipairs(wishes) do
        if (rate > 0 and tokens + EPSILON < units)
          or (concurrency > 0 and in_use + units > concurrency) then break end
        if rate > 0 then tokens = tokens - units end
        hold = hold or { units = 0 }
        hold.units, in_use = hold.units + units, in_use + units
        granted = granted + 1
      end
    end
    if granted == #wishes then
      leave('l:')
    else
      local units = wishes[granted + 1]
      if granted > 0 then turn = turns end
      turns = turns + 1
      redis.call('HSET', KEYS[1], 'l:' .. holder,
        text(turn) .. ' ' .. text(now + patience) .. ' ' .. text(units))
      local lacking = rate > 0 and ahead + units - tokens or 0
      if lacking > EPSILON then wait = math.max(0, at - now) + lacking / rate
      elseif shut > now then wait = shut - now
      else wait = -1 end
    end
  end
  if hold then
    redis.call('HSET', KEYS[1], 'h:' .. holder, text(hold.units) .. ' ' .. text(now + patience))
  end
elseif what == 'give_back' then
  local hold = holds[holder]
  if hold then
    local units = hold.units - tonumber(ARGV[8])
    if units > 0 then
      redis.call('HSET', KEYS[1], 'h:' .. holder, text(units) .. ' ' .. text(hold.expires))
    else
      leave('h:')
    end
  end
  if rate > 0 and now >= shut then tokens = math.min(burst, tokens + tonumber(ARGV[9])) end
elseif what == 'shut' then
  local till = now + tonumber(ARGV[8])
  if till > math.max(shut, now) then shut, at, tokens = till, till, 0 end
end

redis.call('HSET', KEYS[1], 'tokens', text(tokens), 'at', text(at), 'shut', text(shut),
  'turns', text(turns), 'seen', text(now))
-- A full bucket is equal to a missing key, so the key may expire.
redis.call('EXPIRE', KEYS[1], HOUR + math.ceil(math.max(patience, math.max(0, shut - now))
  + (rate > 0 and burst / rate or 0)))
return { granted, text(wait) }
