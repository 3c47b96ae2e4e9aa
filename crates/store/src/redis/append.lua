-- Writing messages: see append.rs.

-- What goes into sets once all messages are written: one command for each set.
local added

local function note(list, one, other)
  list[#list + 1] = one
  list[#list + 1] = other
end

local function open_writes()
  added = { known = {}, ids = {}, unsent = {}, buckets = {}, topics = {} }
end

local function close_writes()
  if #added.ids == 0 then return end
  redis.call('HSET', key('ids'), unpack(added.ids))
  redis.call('ZADD', key('unsent'), unpack(added.unsent))
  for name, seqs in pairs(added.buckets) do redis.call('ZADD', name, unpack(seqs)) end
  for name, topics in pairs(added.topics) do
    for topic in pairs(topics) do redis.call('SADD', name, topic) end
  end
end

local function taken(id)
  return added.known[id] or redis.call('HEXISTS', key('ids'), id) == 1
end

-- Writes one message whose id is free. Only topic, id and payload are required; nil is left out.
local function write(message)
  local seq = redis.call('INCR', key('seq'))
  local slot = tonumber(string.sub(redis.sha1hex(message.key or message.id), 1, 4), 16) % 1024
  local fields = { 'id', message.id, 'topic', message.topic, 'slot', slot, 'size', #message.payload,
    'written_at', now, 'occurred_at', message.occurred_at or now }
  for _, name in ipairs({ 'type', 'key', 'content_type', 'headers', 'ack_groups' }) do
    if message[name] then note(fields, name, message[name]) end
  end
  redis.call('HSET', message_key(seq), unpack(fields))
  redis.call('SET', payload_key(seq), message.payload)
  added.known[message.id] = true
  note(added.ids, message.id, seq)
  note(added.unsent, seq, seq)
  local lanes = layout()
  local lane = slot % lanes
  local name, topics = bucket(lanes, lane, message.topic), topics_key(lanes, lane)
  added.buckets[name] = added.buckets[name] or {}
  note(added.buckets[name], seq, seq)
  added.topics[topics] = added.topics[topics] or {}
  added.topics[topics][message.topic] = true
end

-- A message, the name under which it is written once, and what for.
local function read_message(read)
  local once, fingerprint = optional(read()), read()
  return { id = read(), topic = read(), payload = read(), occurred_at = read(), type = optional(read()),
    key = optional(read()), content_type = optional(read()), headers = optional(read()),
    ack_groups = optional(read()) }, once, fingerprint
end

