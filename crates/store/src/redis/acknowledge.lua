-- Recording that groups are done: see amend.rs.

-- 'new', 'repeated', 'unknown', 'not_asked', or the status in which it is refused. `hint` is where it probably stands.
local function acknowledge(id, hint, group, seen)
  local seq = hint
  if not seq or redis.call('HGET', message_key(seq), 'id') ~= id then
    seq = redis.call('HGET', key('ids'), id)
  end
  if not seq then return 'unknown' end
  local slot, sent_at, ack_groups, status, attempts, crashes, delivery, erred =
    unpack(redis.call('HMGET', message_key(seq), 'slot', 'sent_at', 'ack_groups', 'status', 'attempts', 'crashes',
      'delivery', 'last_error'))
  if not slot then return 'unknown' end
  if ack_groups then
    local asked = false
    for _, name in ipairs(names(ack_groups)) do
      asked = asked or name == group
    end
    if not asked then return 'not_asked' end
  end
  local state = state_of(status, attempts, crashes, delivery)
  -- One that rests after a relay had it may have been sent all the same: that nobody answered proves nothing.
  local rests = state.status == 'pending' or state.status == 'failed'
  local tried = erred or state.attempts > 0 or state.crashes > 0
  if rests and (tried or flies(seq, tonumber(slot), seen)) then state = in_flight(state) end
  if not step(state, 'acknowledged') then return state.status end
  if redis.call('HSETNX', key('acks:' .. seq), group, now) == 0 then return 'repeated' end
  redis.call('ZREM', key('unacked:' .. group), seq)
  count('acknowledged_total', 1)
  waited('sent_to_acknowledged', sent_at and now - sent_at or 0)
  return 'new'
end

