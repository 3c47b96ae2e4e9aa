-- Updates that carry a version: `postrider.newer` and `postrider.swap`. What they note is written when the work has
-- succeeded: Redis does not undo what a script wrote before it failed, and a version without its update would keep the
-- update out when it is tried again.
local noted

local function open_versions()
  noted = {}
end

local function close_versions()
  for _, note in pairs(noted) do
    redis.call('HSET', note.versions, note.entity, note.version)
  end
end

-- A whole number as its digits: as a number of Lua's it would be another one beyond 2^53.
local LARGEST = '9223372036854775807'

local function whole_number(value)
  if type(value) == 'number' and value == math.floor(value) and math.abs(value) < 9007199254740992 then
    value = string.format('%.0f', value)
  end
  local sign, digits
  if type(value) == 'string' then sign, digits = string.match(value, '^(%-?)0*(%d+)$') end
  if not digits then
    refuse('a version must be a whole number; give one of more than 15 digits as a text')
  end
  if #digits > #LARGEST or #digits == #LARGEST and digits > LARGEST then refuse('a version has 63 bits at most') end
  return digits == '0' and '0' or sign .. digits
end

local function is_less(one, other)
  local one_is_negative, other_is_negative = string.sub(one, 1, 1) == '-', string.sub(other, 1, 1) == '-'
  if one_is_negative ~= other_is_negative then return one_is_negative end
  if one_is_negative then one, other = other, one end
  if #one ~= #other then return #one < #other end
  return one < other
end

-- The version that was applied last, or nothing, and how to note another.
local function version_of(scope, entity)
  if type(scope) ~= 'string' or type(entity) ~= 'string' then refuse('name the scope and the entity of a version') end
  local versions = key('versions:' .. scope)
  local name = #scope .. ':' .. scope .. entity
  local function note(version)
    noted[name] = { versions = versions, entity = entity, version = version }
    return true
  end
  return noted[name] and noted[name].version or redis.call('HGET', versions, entity), note
end

-- Whether this version is newer than any that was applied; if so, it is the newest from now on.
local function newer(scope, entity, version)
  version = whole_number(version)
  local newest, note = version_of(scope, entity)
  return (not newest or is_less(newest, version)) and note(version)
end

-- Whether `expected` was applied last (0: none); if so, it is `version` from now on.
local function swap(scope, entity, expected, version)
  expected, version = whole_number(expected), whole_number(version)
  local newest, note = version_of(scope, entity)
  return (newest or '0') == expected and note(version)
end

