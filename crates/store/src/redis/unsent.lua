-- Those of these messages that are kept and not sent.
begin(KEYS[1])
local unsent = {}
for _, seq in ipairs(ARGV) do
  -- A message that was never settled has no status yet.
  local topic, status = unpack(redis.call('HMGET', message_key(seq), 'topic', 'status'))
  if topic and status ~= 'sent' then unsent[#unsent + 1] = tonumber(seq) end
end
return unsent
