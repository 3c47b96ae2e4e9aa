-- Which messages were seen with this content, no longer ago than ids are kept.
-- KEYS: the group, then one for each message. ARGV: how long ids are kept unless the group says so, then the digests.
-- Answers a list of 0 and 1, and the duplicates counted here so far.
local group = redis.call('HMGET', KEYS[1], 'keep', 'duplicates')
local keep = tonumber(group[1] or ARGV[1])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local seen = {}
for n = 2, #KEYS do
  local known = redis.call('GET', KEYS[n])
  local digest = ARGV[n]
  local same = known and string.sub(known, 1, #digest) == digest
  seen[n - 1] = same and now - tonumber(string.sub(known, #digest + 1)) < keep and 1 or 0
end
return {seen, tonumber(group[2] or 0)}
