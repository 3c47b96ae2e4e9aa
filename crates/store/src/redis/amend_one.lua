-- Does what an operator asked, if the message is still what the operator's audit entry says it was.
begin(KEYS[1])
local read = arguments(1)
local seq, event, actor, action, id, detail = read(), read(), read(), read(), read(), read()
local seen = { read(), read(), read(), read(), read() }
local status, attempts, crashes, delivery, last_error, slot, now_id =
  unpack(redis.call('HMGET', message_key(seq), 'status', 'attempts', 'crashes', 'delivery', 'last_error', 'slot', 'id'))
if now_id ~= id then return 'changed' end
local state = state_of(status, attempts, crashes, delivery)
if flies(seq, tonumber(slot), {}) then state = in_flight(state) end
local is = { state.status, tostring(state.attempts), tostring(state.crashes), tostring(state.delivery), last_error or '' }
for place = 1, #seen do
  if seen[place] ~= is[place] then return 'changed' end
end
local after = step(state, event)
if not after then return 'refused' end
audit(actor, action, id, detail)
if after == 'gone' then
  remove(seq)
else
  start_again(seq, state, after)
  local payload, content_type, headers = optional(read()), optional(read()), optional(read())
  if payload then
    redis.call('SET', payload_key(seq), payload)
    redis.call('HSET', message_key(seq), 'size', #payload)
  end
  if content_type then redis.call('HSET', message_key(seq), 'content_type', content_type) end
  if headers then redis.call('HSET', message_key(seq), 'headers', headers) end
end
finish()
return 'done'
