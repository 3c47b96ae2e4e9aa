-- The first sendable row of each topic and lane below the highest mark.
SELECT t.topic, o.slot & (s.value::smallint - 1::smallint), min(o.seq)
FROM outbox_settings s, unnest($1::text[]) AS t(topic)
CROSS JOIN LATERAL (SELECT seq, slot FROM outbox_events
                    WHERE ready AND (topic, seq) > (t.topic, '-9223372036854775808'::bigint) AND (topic, seq) <= (t.topic, $2)) o
WHERE s.name = 'lanes'
GROUP BY 1, 2
