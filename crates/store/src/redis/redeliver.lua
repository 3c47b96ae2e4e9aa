-- Sends a message again that is Sent and that a group has not acknowledged. Answers whether it was so.
begin(KEYS[1])
local id, group, why, actor, action, detail = unpack(ARGV)
local seq = redis.call('HGET', key('ids'), id)
if not seq then return 0 end
local status, attempts, crashes, delivery, ack_groups =
  unpack(redis.call('HMGET', message_key(seq), 'status', 'attempts', 'crashes', 'delivery', 'ack_groups'))
if status ~= 'sent' or not redis.call('ZSCORE', key('unacked:' .. group), seq) then return 0 end
local state = state_of(status, attempts, crashes, delivery)
start_again(seq, state, step(state, 'redelivered'))
redis.call('HSET', message_key(seq), 'last_error', why)
forget_asked(seq, ack_groups)
audit(actor, action, id, detail)
finish()
return 1
