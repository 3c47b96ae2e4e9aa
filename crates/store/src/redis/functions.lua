-- For other languages, in their own MULTI or alone.
redis.register_function('postrider_send', function(keys, args)
  begin(keys[1])
  return send(unpack(args))
end)

redis.register_function('postrider_once', function(keys, args)
  begin(keys[1])
  return once(args[1], args[2]) and 1 or 0
end)

-- What follows the version is a command of Redis, run in the same step if this version is to be applied: an answer to a
-- client that dies before it writes would be a version that nobody applied.
local function apply(may, args, first)
  if not may then return 0 end
  if args[first] then redis.call(unpack(args, first)) end
  close_versions()
  return 1
end

redis.register_function('postrider_newer', function(keys, args)
  begin(keys[1])
  open_versions()
  return apply(newer(args[1], args[2], args[3]), args, 4)
end)

redis.register_function('postrider_swap', function(keys, args)
  begin(keys[1])
  open_versions()
  return apply(swap(args[1], args[2], args[3], args[4]), args, 5)
end)
