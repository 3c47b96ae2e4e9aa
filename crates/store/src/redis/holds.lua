-- Keys whose messages wait behind another: topic, key, id and status of the one they wait for.
begin(KEYS[1])
local most, answer, cursor, seen = tonumber(ARGV[1]), {}, '0', {}
repeat
  local page = redis.call('HSCAN', key('holds'), cursor, 'COUNT', 100)
  cursor = page[1]
  for place = 1, #page[2], 2 do
    if #answer >= most then break end
    local topic, name = string.match(page[2][place], '^([^:]*):(.*)$')
    local seq = page[2][place + 1]
    local id, status, slot = unpack(redis.call('HMGET', message_key(seq), 'id', 'status', 'slot'))
    local where = id and (flies(seq, tonumber(slot), seen) and 'in_flight' or status or 'pending')
    answer[#answer + 1] = { topic, name, id, where or false }
  end
until cursor == '0' or #answer >= most
return answer
