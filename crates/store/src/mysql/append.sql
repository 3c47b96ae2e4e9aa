INSERT INTO outbox_events (id, topic, `type`, `key`, payload, content_type, headers, occurred_at, ack_groups)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
