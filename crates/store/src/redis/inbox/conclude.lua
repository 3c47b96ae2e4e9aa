-- Writes what handlers did with reserved arrivals.
begin(KEYS[1])
local read = arguments(1)
open_inbox(read(), read_rules(read))

-- The work was done outside under a valid token: that cannot be undone, wherever its key stands by now.
local function conclude_done(arrival)
  local known, same = mark_of(arrival)
  -- A handler with a transaction of its own made the mark in it: done, not a duplicate.
  if same then return finished(arrival) end
  if known then return done_before(arrival) end
  return conclude(arrival, 0, { kind = 'done' })
end

local receipts = {}
for place = 1, tonumber(read()) do
  local token, handled = read(), { kind = read(), error = read(), after = tonumber(read()) }
  local arrival = read_arrival(read)
  local receipt
  if redis.call('GET', in_key('r:' .. arrival.id)) ~= token then
    receipt = { 'busy' }
  else
    redis.call('DEL', in_key('r:' .. arrival.id))
    if handled.kind == 'done' then
      receipt = conclude_done(arrival)
    else
      -- Looked at again: the reservation kept others from working on it, not from parking it.
      local attempts
      receipt, attempts = standing(arrival)
      receipt = receipt or conclude(arrival, attempts, handled)
    end
  end
  receipts[place] = receipt
end
close_inbox()
return receipts
