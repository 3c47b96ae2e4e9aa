-- Forgets old idempotency keys and audit entries, a bounded number of each. Answers how many.
begin(KEYS[1])
even_when_full()
local keys, audits, most = now - tonumber(ARGV[1]), now - tonumber(ARGV[2]), tonumber(ARGV[3])
local old = {}
for _, entry in ipairs(redis.call('LRANGE', key('once_order'), 0, most - 1)) do
  local at, once = string.match(entry, '^(%d+) (.*)$')
  if tonumber(at) >= keys then break end
  old[#old + 1] = once
end
if #old > 0 then
  redis.call('HDEL', key('once'), unpack(old))
  redis.call('LTRIM', key('once_order'), #old, -1)
end
local entries = {}
for _, entry in ipairs(redis.call('XRANGE', key('audit'), '-', '+', 'COUNT', most)) do
  if tonumber(entry[2][2]) >= audits then break end
  entries[#entries + 1] = entry[1]
end
if #entries > 0 then redis.call('XDEL', key('audit'), unpack(entries)) end
return #old + #entries
