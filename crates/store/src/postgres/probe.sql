SELECT EXISTS (
    SELECT 1 FROM unnest($1::text[], $2::bigint[]) AS t(topic, start)
    CROSS JOIN LATERAL (
        SELECT 1 FROM outbox_events o
        WHERE o.ready AND (o.topic, o.seq) > (t.topic, t.start) AND o.topic <= t.topic AND (o.slot & $3) = ANY ($4)
        ORDER BY o.topic, o.seq LIMIT 1) first)
