SELECT position, id, seq, delivery, type, key, content_type, headers, occurred_s, occurred_ns, payload
FROM broker_messages
WHERE position >= ?1 AND position < ?2
ORDER BY position
