-- Writing messages: see append.rs.

-- Writes one message whose id is free. Only topic, id and payload are required; nil is left out.
local function write(message)
  local seq = redis.call('INCR', key('seq'))
  local slot = tonumber(string.sub(redis.sha1hex(message.key or message.id), 1, 4), 16) % 1024
  local fields = { 'id', message.id, 'topic', message.topic, 'payload', message.payload, 'slot', slot,
    'written_at', now, 'occurred_at', message.occurred_at or now }
  for _, name in ipairs({ 'type', 'key', 'content_type', 'headers', 'ack_groups' }) do
    if message[name] then
      fields[#fields + 1] = name
      fields[#fields + 1] = message[name]
    end
  end
  redis.call('HSET', message_key(seq), unpack(fields))
  redis.call('HSET', key('ids'), message.id, seq)
  redis.call('ZADD', key('unsent'), seq, seq)
  make_ready(seq, message.topic, slot)
  return seq
end

local function taken(id)
  return redis.call('HEXISTS', key('ids'), id) == 1
end

