e.seq, e.slot, e.ack_groups::text, e.written_at, e.status, e.attempts, e.crashes, e.delivery_epoch, e.behind, e.met
-- The range is written as one on (topic, seq), not as `topic = … AND seq > …`: only the index of sendable rows has that
-- order, so nothing else can be chosen for it, whatever the statistics say of a table full of sent rows.
FROM (SELECT o.*, h.seq IS NOT NULL AS behind, count(*) OVER () AS met,
             sum(octet_length(o.payload)) OVER (ORDER BY o.seq) - octet_length(o.payload) AS bytes_before
      FROM (SELECT f.seq
            FROM unnest($1::text[], $2::bigint[], $3::bigint[]) AS t(topic, start, take)
            CROSS JOIN LATERAL (
                SELECT o.seq FROM outbox_events o
                WHERE o.ready AND (o.topic, o.seq) > (t.topic, t.start) AND o.topic <= t.topic
                      AND (o.slot & $4) = ANY ($5)
                ORDER BY o.topic, o.seq LIMIT t.take) f
            ORDER BY f.seq LIMIT $6) first
      JOIN outbox_events o ON o.seq = first.seq
      LEFT JOIN outbox_holds h ON h.topic = o.topic AND h.key = o.key AND h.seq < o.seq AND h.released_to < o.seq) e
-- No more payloads than fit, and one that does not, so that it is known that more is there.
WHERE e.bytes_before < $7
ORDER BY e.seq
