-- Topics with sendable rows strictly between the given ones: one seek for each gap, and one for each topic found.
WITH RECURSIVE met AS (
    SELECT first.topic, gap.high
    FROM unnest($1::text[], $2::text[]) AS gap(low, high)
    CROSS JOIN LATERAL (SELECT topic FROM outbox_events WHERE ready AND topic > gap.low AND topic < gap.high
                        ORDER BY topic LIMIT 1) first
    UNION ALL
    SELECT next.topic, met.high
    FROM met
    CROSS JOIN LATERAL (SELECT topic FROM outbox_events WHERE ready AND topic > met.topic AND topic < met.high
                        ORDER BY topic LIMIT 1) next
)
SELECT topic FROM met
