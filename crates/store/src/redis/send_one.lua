-- Sends one message: KEYS[1] is the prefix of the store; topic, key, payload, then what may be left out or empty:
-- id, headers, type, content type, milliseconds since 1970. Answers the id.
begin(KEYS[1])
return send(unpack(ARGV))
