-- Appends the messages of one call, each once, in their order. Answers `moved` when a topic is not what the caller took it
-- for; then nothing was written. Otherwise `done`, and the number and error of each message that was not stored.
--
-- Redis takes nothing back when a script fails halfway: all that can fail for good is looked at before the first write.
local window, topics = tonumber(read()), {}
for number = 1, tonumber(read()) do
  topics[number] = { name = read(), partitions = read(), count = tonumber(read()) }
end
-- The names of an entry, each with room for its value behind it; messages of one form share them.
local forms = {}
for number = 1, tonumber(read()) do
  local form = { count = tonumber(read()) }
  for at = 1, form.count do form[2 * at - 1], form[2 * at] = read(), '' end
  forms[number] = form
end
for _, topic in ipairs(topics) do
  if redis.call('HGET', prefix .. ':topics', topic.name) ~= topic.partitions then return { 'moved' } end
end

-- What was stored lately, in slices of time. Two are looked at, so that each message is known for one slice at least.
local slice = math.floor(clock() / window)
for _, topic in ipairs(topics) do
  topic.seen = prefix .. ':seen:' .. topic.name .. ':'
  topic.marks, place = place, place + topic.count
  topic.now = redis.call('SMISMEMBER', topic.seen .. slice, unpack(ARGV, topic.marks + 1, place))
  topic.before = redis.call('SMISMEMBER', topic.seen .. (slice - 1), unpack(ARGV, topic.marks + 1, place))
end

local answer, message = { 'done' }, 0
for _, topic in ipairs(topics) do
  local stored, met, broken, streams = {}, {}, {}, {}
  for number = 1, topic.count do
    local mark, partition, form = ARGV[topic.marks + number], ARGV[place + 1], forms[tonumber(ARGV[place + 2])]
    local stream = streams[partition]
    if not stream then
      stream = stream_of(topic.name, partition)
      streams[partition] = stream
    end
    place, message = place + 2, message + 1
    if topic.now[number] == 0 and topic.before[number] == 0 and not met[mark] and not broken[stream] then
      for at = 1, form.count do form[2 * at] = ARGV[place + at] end
      local added = redis.pcall('XADD', stream, '*', unpack(form))
      -- Nothing more goes into a stream that refused: a later message must not overtake.
      if type(added) == 'table' then broken[stream] = added.err end
    end
    if broken[stream] then
      answer[#answer + 1] = message
      answer[#answer + 1] = broken[stream]
    else
      stored[#stored + 1], met[mark] = mark, true
    end
    place = place + form.count
  end
  if #stored > 0 then
    local seen = topic.seen .. slice
    if redis.call('SADD', seen, unpack(stored)) == redis.call('SCARD', seen) then
      redis.call('UNLINK', topic.seen .. (slice - 2))
    end
    -- Also a write where all was stored before, so that the WAIT after it speaks of now: one that follows no write of its
    -- own connection counts replicas that may not have it.
    redis.call('PEXPIRE', seen, 3 * window)
  end
end
return answer
