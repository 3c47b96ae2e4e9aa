INSERT INTO broker_messages
    (position, stored_at, id, seq, delivery, type, key, content_type, headers, occurred_s, occurred_ns, payload)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12)
