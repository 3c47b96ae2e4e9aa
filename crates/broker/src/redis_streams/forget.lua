-- Forgets a group, so that nothing is kept for it any more. Answers how many members it has at work; then nothing is done.
local group = read()
local key, now, alive = group_key(group), clock(), 0
local all = redis.call('HGETALL', key)
for field = 1, #all, 2 do
  if string.find(all[field], '^m:') and tonumber(string.match(all[field + 1], '^%d+')) > now then alive = alive + 1 end
end
if alive > 0 then return alive end
local topics = redis.call('HGETALL', prefix .. ':topics')
for field = 1, #topics, 2 do
  for partition = 0, tonumber(topics[field + 1]) - 1 do
    -- The stream may not be there, or not know the group: then it is forgotten already.
    redis.pcall('XGROUP', 'DESTROY', stream_of(topics[field], partition), group)
  end
end
redis.call('DEL', key, prefix .. ':bell:' .. group)
return 0
