-- Stores messages, each by itself: 'new', 'repeated' with the id it has, 'key' or 'id' when that is taken.
begin(KEYS[1])
local read = arguments(1)
local results = {}
open_writes()
for place = 1, tonumber(read()) do
  local message, once, fingerprint = read_message(read)
  local earlier = once and redis.call('HGET', key('once'), once)
  if earlier then
    local same = string.sub(earlier, 1, 64) == fingerprint
    results[place] = same and { 'repeated', string.sub(earlier, 65) } or { 'key', '' }
  elseif taken(message.id) then
    results[place] = { 'id', '' }
  else
    write(message)
    if once then
      redis.call('HSET', key('once'), once, fingerprint .. message.id)
      redis.call('RPUSH', key('once_order'), now .. ' ' .. once)
    end
    results[place] = { 'new', '' }
  end
end
close_writes()
return results
