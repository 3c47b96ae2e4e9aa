-- Sending from scripts and from other languages: `postrider.send`.

local UUID = '^%x%x%x%x%x%x%x%x%-%x%x%x%x%-%x%x%x%x%-%x%x%x%x%-%x%x%x%x%x%x%x%x%x%x%x%x$'

local function text(name, value, most)
  if value == nil or value == '' then return nil end
  if type(value) ~= 'string' then refuse(name .. ' must be a text') end
  if #value > most then refuse(name .. ' has ' .. #value .. ' bytes and the limit is ' .. most) end
  if string.find(value, '[%z\1-\31\127]') then refuse(name .. ' has a control character: remove it') end
  return value
end

local function whole(name, value)
  if value == nil or value == '' then return nil end
  if not string.find(value, '^%d+$') then refuse(name .. ' must be milliseconds since 1970') end
  return value
end

-- JSON as it will be read again, or an error.
local function headers_text(json)
  if json == nil or json == '' then return nil end
  local readable, headers = pcall(cjson.decode, json)
  local good = readable and type(headers) == 'table'
  for name, value in pairs(good and headers or {}) do
    good = good and type(name) == 'string' and type(value) == 'string'
  end
  if not good then refuse('headers must be a JSON object of texts, like {"traceparent":"00-…"}') end
  if next(headers) == nil then return nil end
  return cjson.encode(headers)
end

-- A fresh id (UUIDv7): the time, then what nobody else has.
local function fresh_id()
  local seed = table.concat({ redis.call('HGET', key('settings'), 'store_id') or '', P,
    redis.call('GET', key('seq')) or '0', unpack(redis.call('TIME')) }, ' ')
  return uuid(seed, string.format('%012x', now))
end

-- Everything is looked at before anything is written: Redis does not undo what a script wrote before it failed.
local function send(topic, name, payload, id, headers, kind, content_type, occurred_at)
  if type(topic) ~= 'string' or #topic > 249 or not string.find(topic, '^[%w._-]+$') or topic == '.' or topic == '..' then
    refuse('a topic has 1 to 249 letters, digits, dots, dashes or underscores')
  end
  if type(payload) ~= 'string' then refuse('the payload must be a text') end
  open_writes()
  if id == nil or id == '' then
    id = fresh_id()
  else
    id = type(id) == 'string' and string.lower(id) or ''
    if not string.find(id, UUID) then refuse('an id must be a UUID: leave it out to get a fresh one') end
    if taken(id) then refuse('another message has the id ' .. id .. ': leave the id out to get a fresh one') end
  end
  local message = {
    id = id,
    topic = topic,
    key = text('the key', name, 1024),
    payload = payload,
    headers = headers_text(headers),
    type = text('the type', kind, 255),
    content_type = text('the content type', content_type, 255),
    occurred_at = whole('the time', occurred_at),
  }
  write(message)
  close_writes()
  return id
end

