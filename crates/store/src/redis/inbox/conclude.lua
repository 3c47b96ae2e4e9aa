-- Writes what handlers did with reserved arrivals. The answer ends before the first of which more must be known.
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

local asked, ids = read_arrivals(read, function()
  return { token = read(), kind = read(), error = read(), after = tonumber(read()) }
end)
local names = {}
for place, id in ipairs(ids) do
  names[place] = in_key('r:' .. id)
end
local tokens = #names > 0 and redis.call('MGET', unpack(names)) or {}
local receipts, held, ended = {}, {}, {}
for place, id in ipairs(ids) do
  held[id] = tokens[place]
end
for place, item in ipairs(asked) do
  local arrival, handled = unpack(item)
  local receipt
  if held[arrival.id] ~= handled.token then
    receipt = { 'busy' }
  elseif is_lacking(arrival) then
    break
  else
    -- A token ends one reservation, once.
    held[arrival.id] = nil
    ended[#ended + 1] = names[place]
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
if #ended > 0 then redis.call('DEL', unpack(ended)) end
close_inbox()
return receipts
