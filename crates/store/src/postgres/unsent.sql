-- Sendable rows are indexed by topic first, so each topic is looked at by itself; then those that wait.
WITH RECURSIVE met AS (
    (SELECT topic FROM outbox_events WHERE ready ORDER BY topic LIMIT 1)
    UNION ALL
    SELECT next.topic
    FROM met
    CROSS JOIN LATERAL (SELECT topic FROM outbox_events WHERE ready AND topic > met.topic ORDER BY topic LIMIT 1) next
)
SELECT seq FROM (
    SELECT s.seq
    FROM met
    CROSS JOIN LATERAL (SELECT seq FROM outbox_events WHERE ready AND topic = met.topic AND seq {sign} $1
                        ORDER BY seq {order} LIMIT $2) s
    WHERE $3::text IS NULL OR met.topic = $3
    UNION ALL
    (SELECT seq FROM outbox_events WHERE NOT ready AND status IN ('pending', 'failed') AND seq {sign} $1
     ORDER BY seq {order} LIMIT $2)) unsent
ORDER BY seq {order} LIMIT $2
