-- For other languages, in their own MULTI or alone.
redis.register_function('postrider_send', function(keys, args)
  begin(keys[1])
  return send(unpack(args))
end)

redis.register_function('postrider_once', function(keys, args)
  begin(keys[1])
  return once(args[1], args[2]) and 1 or 0
end)
