-- Looking at messages: see inspect.rs.

-- All that is known of a message: seq, its fields, until when it is in flight, its acknowledgements.
local function record(seq, seen)
  local fields = redis.call('HGETALL', message_key(seq))
  if #fields == 0 then return nil end
  local slot = redis.call('HGET', message_key(seq), 'slot')
  fields[#fields + 1] = 'payload'
  fields[#fields + 1] = redis.call('GET', payload_key(seq)) or ''
  return { tonumber(seq), fields, flies(seq, tonumber(slot), seen) or false, redis.call('HGETALL', key('acks:' .. seq)) }
end

