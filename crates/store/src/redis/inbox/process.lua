-- Does the work of each arrival and marks it, one after the other.
begin(KEYS[1])
local read, where = arguments(1)
open_inbox(read(), read_rules(read))
local kind, code = read(), read()
-- What a handler's script sees; on one line with it, so that its line numbers stay.
local chunk, wrong
if kind == 'script' then chunk, wrong = loadstring('local message, postrider = ...; ' .. code, '@handler') end

local function run(arrival)
  if kind == 'mark' then return { kind = 'done' } end
  if not chunk then return { kind = 'unavailable', error = "the handler's script does not compile: " .. wrong } end
  local readable, headers = pcall(cjson.decode, arrival.headers)
  local message = { id = arrival.id, topic = arrival.topic, type = arrival.type, key = arrival.key,
    payload = arrival.payload, headers = readable and headers or {}, occurred_at = tonumber(arrival.occurred_at),
    seq = tonumber(arrival.seq), group = inbox.group }
  open_versions()
  local good, said = pcall(chunk, message, { send = send, newer = newer, swap = swap })
  if type(said) == 'table' and said.err then good, said = false, said.err end
  if good then
    close_versions()
    return { kind = 'done' }
  end
  return { kind = 'retry', error = tostring(said), after = 0 }
end

local receipts, unavailable = {}, nil
local ids = read_arrivals(read, where, 0)
local held = reserved(ids)
-- Keys of which another worker has a message: nothing behind it is done.
local stuck = {}
for place, id in ipairs(ids) do
  local arrival = arrival_at(place)
  local lane = inbox.rules.ordered and arrival.key and arrival.topic .. ':' .. arrival.key
  local receipt = unavailable or (lane and stuck[lane])
  if not receipt then
    local attempts
    receipt, attempts = standing(arrival)
    if not receipt then
      if held[id] then
        receipt = 'busy'
        if lane then stuck[lane] = receipt end
      else
        local handled = run(arrival)
        receipt = conclude(arrival, attempts, handled)
        if handled.kind == 'unavailable' then unavailable = receipt end
      end
    end
  end
  receipts[place] = receipt
end
close_inbox()
return receipts
