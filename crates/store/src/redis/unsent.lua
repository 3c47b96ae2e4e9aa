-- Those of these messages that are kept and not sent.
begin(KEYS[1])
local unsent = {}
for _, seq in ipairs(ARGV) do
  local status = redis.call('HGET', message_key(seq), 'status')
  if status and status ~= 'sent' then unsent[#unsent + 1] = tonumber(seq) end
end
return unsent
