-- Mending one message: see amend.rs.

local function audit(actor, action, id, detail)
  local position = redis.call('INCR', key('audit_position'))
  redis.call('XADD', key('audit'), position .. '-0', 'at', now, 'actor', actor, 'action', action, 'message', id,
    'detail', detail)
end

-- Nobody is waited for any more.
local function forget_asked(seq, ack_groups)
  for _, group in ipairs(ack_groups and names(ack_groups) or {}) do
    redis.call('ZREM', key('unacked:' .. group), seq)
  end
end

-- Removes a record and all that hangs on it; nothing may wait for it.
local function remove(seq)
  local id, topic, name, slot, status, ack_groups, held =
    unpack(redis.call('HMGET', message_key(seq), 'id', 'topic', 'key', 'slot', 'status', 'ack_groups', 'held'))
  if name then
    if held then hold.stand(hold_name(topic, name), seq) end
    hold.lift(topic, name, tonumber(seq))
  end
  unready(seq, topic, tonumber(slot))
  for _, set in ipairs({ 'unsent', 'sent', 'dead', 'due' }) do
    redis.call('ZREM', key(set), seq)
  end
  forget_asked(seq, ack_groups)
  redis.call('HDEL', key('ids'), id)
  redis.call('DEL', message_key(seq), payload_key(seq), key('attempts:' .. seq), key('acks:' .. seq))
  moved(status or 'pending', 'gone')
end

-- A fresh start for a message, at its old place: those it holds stay behind it.
local function start_again(seq, state, after)
  local topic, name, slot, held = unpack(redis.call('HMGET', message_key(seq), 'topic', 'key', 'slot', 'held'))
  if held then hold.stand(hold_name(topic, name), seq) end
  redis.call('HSET', message_key(seq), 'status', after.status, 'attempts', after.attempts, 'crashes', after.crashes,
    'delivery', after.delivery)
  redis.call('HDEL', message_key(seq), 'next_attempt_at', 'dead_reason', 'dead_at')
  redis.call('ZREM', key('dead'), seq)
  redis.call('ZREM', key('sent'), seq)
  redis.call('ZREM', key('due'), seq)
  redis.call('ZADD', key('unsent'), seq, seq)
  make_ready(seq, topic, tonumber(slot))
  moved(state.status, after.status)
end

