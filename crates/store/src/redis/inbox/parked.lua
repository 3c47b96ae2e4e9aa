-- A page of what is parked or Dead.
begin(KEYS[1])
open_inbox(ARGV[1], {})
local from, newest_first, most = ARGV[2], ARGV[3] == '1', ARGV[4]
local ids
if newest_first then
  ids = redis.call('ZREVRANGEBYSCORE', in_key('parked'), from == '' and '+inf' or '(' .. from, '-inf', 'LIMIT', 0, most)
else
  ids = redis.call('ZRANGEBYSCORE', in_key('parked'), from == '' and '-inf' or '(' .. from, '+inf', 'LIMIT', 0, most)
end
local items = {}
for place, id in ipairs(ids) do
  items[place] = redis.call('HGETALL', in_key('p:' .. id))
end
return items
