-- Forgets the ids of a group that are older than it keeps them, and those of other groups by what they said last.
begin(KEYS[1])
even_when_full()
local group, keep, left = ARGV[1], ARGV[2], tonumber(ARGV[3])
-- The group may have no consumer tomorrow; whoever calls then knows how long its ids were to be kept.
if redis.call('HEXISTS', key('groups'), group) == 1 then redis.call('HSET', key('groups'), group, keep) end

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

local most = left
local groups = redis.call('HGETALL', key('groups'))
forget(group, tonumber(keep))
for place = 1, #groups, 2 do
  if left > 0 and groups[place] ~= group and groups[place + 1] ~= '' then
    forget(groups[place], tonumber(groups[place + 1]))
  end
end
return most - left
