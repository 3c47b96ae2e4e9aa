-- No index over all partitions can refuse an id twice, so it is looked for. Two that insert one id at the same moment are
-- told apart by their idempotency key, if they have one.
INSERT INTO outbox_events (id, topic, type, key, payload, content_type, headers, occurred_at, ack_groups)
SELECT id, topic, type, key, payload, content_type, headers::jsonb, occurred_at, ack_groups::jsonb
FROM (SELECT m.*, row_number() OVER (PARTITION BY id ORDER BY place) AS nth
      FROM unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::bytea[], $6::text[], $7::text[], $8::timestamptz[],
                  $9::text[]) WITH ORDINALITY
           AS m(id, topic, type, key, payload, content_type, headers, occurred_at, ack_groups, place)) m
WHERE nth = 1 AND NOT EXISTS (SELECT 1 FROM outbox_events o WHERE o.id = m.id)
ORDER BY place
RETURNING id
