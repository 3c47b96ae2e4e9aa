-- Removes what every group of a topic has acknowledged and what is old enough, and consumers of members that are gone.
-- Answers how many messages were removed. A stream that no group reads is unread: nothing of it is removed.
local topic, age, limit = read(), tonumber(read()), tonumber(read())
local before, removed = clock() - age, 0

-- Numbers beyond this are not exact here, and a guess must not remove anything.
local exact = 9007199254740992

local function as_map(list)
  local map = {}
  for place = 1, #list, 2 do map[list[place]] = list[place + 1] end
  return map
end

-- The first message that the group still needs.
local function needed(stream, group)
  if group.pending > 0 then
    return string.match(redis.call('XPENDING', stream, group.name)[2], '(%d+)-(%d+)')
  end
  local ms, seq = string.match(group['last-delivered-id'], '(%d+)-(%d+)')
  return ms, seq + 1
end

local function sweep(stream, group)
  local key = group_key(group.name)
  -- A group of somebody else's has no such key, and its consumers are not ours to judge.
  if redis.call('EXISTS', key) == 0 then return end
  for _, one in ipairs(redis.call('XINFO', 'CONSUMERS', stream, group.name)) do
    local consumer = as_map(one)
    if consumer.pending == 0 and redis.call('HEXISTS', key, 'm:' .. consumer.name) == 0 then
      redis.call('XGROUP', 'DELCONSUMER', stream, group.name, consumer.name)
    end
  end
end

for partition = 0, tonumber(redis.call('HGET', prefix .. ':topics', topic) or '0') - 1 do
  local stream = stream_of(topic, partition)
  local groups = redis.pcall('XINFO', 'GROUPS', stream)
  local floor_ms, floor_seq = before, 0
  for _, one in ipairs(groups) do
    local group = as_map(one)
    local ms, seq = needed(stream, group)
    ms, seq = tonumber(ms), tonumber(seq)
    if ms >= exact or seq >= exact then ms, seq = 0, 0 end
    if ms < floor_ms or (ms == floor_ms and seq < floor_seq) then floor_ms, floor_seq = ms, seq end
    sweep(stream, group)
  end
  if #groups > 0 and floor_ms > 0 then
    local least = whole(floor_ms) .. '-' .. whole(floor_seq)
    removed = removed + redis.call('XTRIM', stream, 'MINID', '~', least, 'LIMIT', limit)
  end
end
return removed
