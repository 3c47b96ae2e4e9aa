-- One turn of a relay: settle the last batches, take the next ones.
begin(KEYS[1])
even_when_full()
local read = arguments(1)
local settlements = read_settlements(read)
for _, settlement in ipairs(settlements) do
  if not settlement.fenced and not settlement.whole then
    return { 'torn', settlement.id, settlement.size }
  end
end
local fenced = settle(settlements)
local batches, more, due, unknown = {}, false, false, {}
if read() == 'claim' then batches, more, due, unknown = claim(read) end
finish()
return { 'turned', fenced, batches, more and 1 or 0, due, unknown }
