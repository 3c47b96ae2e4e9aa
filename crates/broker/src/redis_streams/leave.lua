-- A member leaves its group: its partitions are free at once, and its consumers go where nothing is left with them.
local group, me = read(), read()
local key = group_key(group)
redis.call('HDEL', key, 'm:' .. me)
local all = redis.call('HGETALL', key)
for field = 1, #all, 2 do
  local topic, partition = string.match(all[field], '^p:(.*):(%d+)$')
  if topic then
    local epoch, owner = string.match(all[field + 1], '^(%d+) (.*)')
    if owner == me then redis.call('HSET', key, all[field], epoch .. ' -') end
    -- With a consumer its pending messages go, unread: whoever owns the partition next claims them first.
    local stream = stream_of(topic, partition)
    local pending = redis.pcall('XPENDING', stream, group, '-', '+', 1, me)
    if not pending.err and #pending == 0 then redis.call('XGROUP', 'DELCONSUMER', stream, group, me) end
  end
end
ring(group)
return 'OK'
