-- Finishes each partition up to a message, if the member still owns it. Answers 1, or 0 where it does not.
local group, me = read(), read()
local answer = {}
for number = 1, (#ARGV - 2) / 4 do
  local topic, partition, epoch, last = read(), read(), read(), read()
  local ours = redis.call('HGET', group_key(group), 'p:' .. topic .. ':' .. partition) == epoch .. ' ' .. me
  local stream = stream_of(topic, partition)
  while ours do
    local pending = redis.call('XPENDING', stream, group, '-', last, 1000)
    if #pending == 0 then break end
    for place, one in ipairs(pending) do pending[place] = one[1] end
    redis.call('XACK', stream, group, unpack(pending))
  end
  answer[number] = ours and 1 or 0
end
return answer
