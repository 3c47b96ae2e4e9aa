-- Reserves arrivals for a handler that works outside the store: 'granted', or what became of them. The answer ends before
-- the first of which more must be known.
begin(KEYS[1])
local read = arguments(1)
open_inbox(read(), read_rules(read))
local lease, answers = read(), {}
for place, asked in ipairs(read_arrivals(read, read)) do
  local arrival, token = unpack(asked)
  if is_lacking(arrival) then break end
  local receipt = standing(arrival)
  if not receipt then
    local granted = redis.call('SET', in_key('r:' .. arrival.id), token, 'NX', 'PX', lease)
    receipt = { granted and 'granted' or 'busy' }
  end
  answers[place] = receipt
end
close_inbox()
return answers
