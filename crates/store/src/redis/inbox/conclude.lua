-- Writes what handlers did with reserved arrivals. The answer ends before the first of which more must be known.
begin(KEYS[1])
local read, where = arguments(1)
open_inbox(read(), read_rules(read))
local TOKEN, KIND, ERROR, AFTER = OWN, OWN + 1, OWN + 2, OWN + 3
local ids = read_arrivals(read, where, 4)
read_marks(ids)

-- The work was done outside under a valid token: that cannot be undone, wherever its key stands by now.
local function conclude_done(arrival)
  local known, same = mark_of(arrival)
  -- A handler with a transaction of its own made the mark in it: done, not a duplicate.
  if same then return finished(arrival) end
  if known then return done_before(arrival) end
  return conclude(arrival, 0, { kind = 'done' })
end

local function conclude_at(place, arrival)
  local kind = column(KIND, place)
  if kind == 'done' then return conclude_done(arrival) end
  -- Looked at again: the reservation kept others from working on it, not from parking it.
  local receipt, attempts = standing(arrival)
  local handled = { kind = kind, error = column(ERROR, place), after = tonumber(column(AFTER, place)) }
  return receipt or conclude(arrival, attempts, handled)
end

local receipts, held, ended = {}, reserved(ids), {}
for place, id in ipairs(ids) do
  local receipt = 'busy'
  if held[id] == column(TOKEN, place) then
    if is_plain(id) and not inbox.rules.acknowledge and column(KIND, place) == 'done' then
      mark(id, column(DIGEST, place), column(TOPIC, place), column(KEY, place), column(SEQ, place))
      receipt = 'done'
    else
      local arrival = arrival_at(place)
      if is_lacking(arrival) then break end
      receipt = conclude_at(place, arrival)
    end
    -- A token ends one reservation, once.
    held[id] = nil
    ended[#ended + 1] = id
  end
  receipts[place] = receipt
end
end_reservations(ended)
close_inbox()
return receipts
