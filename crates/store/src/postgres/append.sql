INSERT INTO outbox_events (id, topic, type, key, payload, content_type, headers, occurred_at, ack_groups)
VALUES ($1::uuid, $2, $3, $4, $5, $6, $7::jsonb, $8::timestamptz, $9::jsonb)
