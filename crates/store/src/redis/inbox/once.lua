-- Marks a message as done by a group: true when it was not before.
local function once(group, id)
  if type(group) ~= 'string' or group == '' then refuse('name the consumer group') end
  id = type(id) == 'string' and string.lower(id) or ''
  if not string.find(id, UUID) then refuse('an id must be a UUID') end
  open_inbox(group, {})
  local new = redis.call('HEXISTS', in_key('done'), id) == 0
  if new then mark(id, '', '', '', '') else tell('duplicates', 1) end
  close_inbox()
  return new
end

