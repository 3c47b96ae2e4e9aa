-- Parked messages whose wait is over, the longest due first; in the order of their positions.
begin(KEYS[1])
open_inbox(ARGV[1], {})
local items = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', in_key('due'), '-inf', now, 'LIMIT', 0, ARGV[2])) do
  items[#items + 1] = redis.call('HGETALL', in_key('p:' .. id))
end
return items
