-- Forgets the ids of a group that are older than it keeps them, those of other groups by what they said last, and
-- reservations that have ended.
begin(KEYS[1])
even_when_full()
local group, keep, most = ARGV[1], ARGV[2], tonumber(ARGV[3])
local left = most
-- The group may have no consumer tomorrow; whoever calls then knows how long its ids were to be kept.
if redis.call('HEXISTS', key('groups'), group) == 1 then redis.call('HSET', key('groups'), group, keep) end

-- Removes some of a group's reservations that have ended, and the next time others.
local function end_some_reservations(name)
  open_inbox(name, {})
  local place = in_key('reserved-looked-at')
  local from, found = unpack(redis.call('HSCAN', in_key('reserved'), redis.call('GET', place) or '0', 'COUNT', most))
  local ended = {}
  for field = 1, #found, 2 do
    if not token_of(found[field + 1]) then ended[#ended + 1] = found[field] end
  end
  end_reservations(ended)
  if from == '0' then redis.call('DEL', place) else redis.call('SET', place, from) end
end

-- Forgets up to `left` old ids of one group.
local function forget(name, keep)
  open_inbox(name, {})
  local entries, ids = {}, {}
  for _, entry in ipairs(redis.call('XRANGE', in_key('log'), '-', '+', 'COUNT', left)) do
    if tonumber(entry[2][2]) >= now - keep then break end
    entries[#entries + 1], ids[#ids + 1] = entry[1], entry[2][4]
  end
  if #entries > 0 then
    redis.call('XDEL', in_key('log'), unpack(entries))
    redis.call('HDEL', in_key('done'), unpack(ids))
  end
  left = left - #entries
end

local groups = redis.call('HGETALL', key('groups'))
forget(group, tonumber(keep))
for place = 1, #groups, 2 do
  end_some_reservations(groups[place])
  if left > 0 and groups[place] ~= group and groups[place + 1] ~= '' then
    forget(groups[place], tonumber(groups[place + 1]))
  end
end
return most - left
