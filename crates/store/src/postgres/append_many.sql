INSERT INTO outbox_events (id, topic, type, key, payload, content_type, headers, occurred_at, ack_groups)
SELECT id, topic, type, key, payload, content_type, headers::jsonb, occurred_at, ack_groups::jsonb
FROM unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::bytea[], $6::text[], $7::text[], $8::timestamptz[],
            $9::text[]) WITH ORDINALITY
     AS m(id, topic, type, key, payload, content_type, headers, occurred_at, ack_groups, place)
ORDER BY place
ON CONFLICT DO NOTHING
RETURNING id
