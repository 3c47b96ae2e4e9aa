-- How many partitions topics have, each made if it is missing and may be; 0: it is missing.
local create, partitions = read() == '1', read()
local answer = {}
for number = 1, #ARGV - 2 do
  local topic = read()
  if create then redis.call('HSETNX', prefix .. ':topics', topic, partitions) end
  answer[number] = tonumber(redis.call('HGET', prefix .. ':topics', topic) or '0')
end
return answer
