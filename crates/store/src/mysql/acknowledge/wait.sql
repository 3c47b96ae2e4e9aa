INSERT INTO outbox_latencies (part, name, bucket, n, millis)
VALUES (1024 + (connection_id() & 63), 'sent_to_acknowledged', ?, 1, ?)
ON DUPLICATE KEY UPDATE n = n + 1, millis = millis + VALUES(millis)
