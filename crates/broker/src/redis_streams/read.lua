-- Reads the next messages of partitions that the member still owns. Answers the generation; for each partition what was
-- read, or nothing if it is lost; and, when nothing was read at all, the ends of the streams, to wait behind.
--
-- First comes what is pending from where the member goes on: left by a former owner, given back, or read by a call whose
-- answer was lost. Only then what is new. So the order holds whatever happened to earlier calls.
local group, me, left, bytes = read(), read(), tonumber(read()), tonumber(read())
local partitions, fields = {}, { 'generation' }
for number = 1, tonumber(read()) do
  local topic, partition = read(), read()
  partitions[number] = { stream = stream_of(topic, partition), owner = read() .. ' ' .. me, next = read(), entries = {} }
  fields[number + 1] = 'p:' .. topic .. ':' .. partition
end
local owners = redis.call('HMGET', group_key(group), unpack(fields))
local answer, ready = {}, {}
for number, one in ipairs(partitions) do
  local ours = owners[number + 1] == one.owner
  answer[number] = ours and one.entries
  if ours then ready[#ready + 1] = one end
end

-- The next few of a partition. Few, because what was read cannot be put back, however large it turns out to be.
local function more(one, count)
  local entries
  if one.next then
    local claimed = redis.call('XAUTOCLAIM', one.stream, group, me, 0, one.next, 'COUNT', count)
    one.next, entries = claimed[1] ~= '0-0' and claimed[1], claimed[2]
    one.dry = false
  else
    local streams = redis.call('XREADGROUP', 'GROUP', group, me, 'COUNT', count, 'STREAMS', one.stream, '>')
    entries = streams and streams[1][2] or {}
    one.dry = #entries < count
  end
  for _, entry in ipairs(entries) do
    one.entries[#one.entries + 1] = entry
    -- Ours have the payload first; it is what weighs.
    bytes = bytes - #(entry[2][2] or '')
  end
  left = left - #entries
end

local found = left
while left > 0 and bytes > 0 and #ready > 0 do
  local part, wet = math.min(math.ceil(left / #ready), 64), {}
  for _, one in ipairs(ready) do
    if left <= 0 or bytes <= 0 then break end
    more(one, math.min(part, left))
    if not one.dry then wet[#wet + 1] = one end
  end
  ready = wet
end

local ends = {}
if left == found then
  for number, one in ipairs(partitions) do
    local last = redis.call('XREVRANGE', one.stream, '+', '-', 'COUNT', 1)[1]
    ends[number] = last and last[1] or '0-0'
  end
end
return { owners[1] or '0-0', answer, ends }
