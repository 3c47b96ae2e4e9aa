-- Reserves arrivals for a handler that works outside the store: 'granted', or what became of them. The answer ends before
-- the first of which more must be known.
begin(KEYS[1])
local read, where = arguments(1)
open_inbox(read(), read_rules(read))
local lease, token = read(), read()
local ids = read_arrivals(read, where, 0)
read_marks(ids)
local held, fields, answers = reserved(ids), {}, {}
local ours = reservation(token, lease)
for place, id in ipairs(ids) do
  local receipt
  if not is_plain(id) then
    local arrival = arrival_at(place)
    if is_lacking(arrival) then break end
    receipt = standing(arrival)
  end
  if not receipt and held[id] then receipt = 'busy' end
  if not receipt then
    held[id] = token
    fields[#fields + 1] = id
    fields[#fields + 1] = ours
    receipt = 'granted'
  end
  answers[place] = receipt
end
if #fields > 0 then redis.call('HSET', in_key('reserved'), unpack(fields)) end
close_inbox()
return answers
