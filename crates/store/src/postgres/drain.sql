-- Keys of these lanes that are being drained, and the first followers of each: those that are in trouble themselves
-- hold the rest back. A key without followers has one row of nulls.
SELECT h.topic, h.key, f.seq, f.trouble
FROM (SELECT topic, key FROM outbox_holds WHERE draining AND (slot & $1) = ANY ($2) LIMIT $3) h
LEFT JOIN LATERAL (
    SELECT e.seq, e.status = 'dead' OR (NOT e.ready AND e.next_attempt_at IS NOT NULL) AS trouble
    FROM outbox_events e WHERE e.held AND e.topic = h.topic AND e.key = h.key ORDER BY e.seq LIMIT $4) f ON true
ORDER BY h.topic, h.key, f.seq
