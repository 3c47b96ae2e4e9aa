-- Makes a group on all partitions of its topics, at the oldest message. Answers the topics that are missing and must not
-- be made.
local create, partitions, group = read() == '1', read(), read()
local missing = {}
for _ = 1, #ARGV - 3 do
  local topic = read()
  if create then redis.call('HSETNX', prefix .. ':topics', topic, partitions) end
  local number = redis.call('HGET', prefix .. ':topics', topic)
  if not number then missing[#missing + 1] = topic end
  for partition = 0, tonumber(number or '0') - 1 do
    local made = redis.pcall('XGROUP', 'CREATE', stream_of(topic, partition), group, '0', 'MKSTREAM')
    if made.err and not string.find(made.err, '^BUSYGROUP') then return redis.error_reply(made.err) end
  end
end
return missing
