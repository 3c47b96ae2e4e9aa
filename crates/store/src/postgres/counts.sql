-- Sums of what was written as things changed; what is in flight; the unsent, of which no more than $1 are counted; and
-- when the oldest of them was written: the first of each index that holds such.
WITH RECURSIVE first AS (
    (SELECT topic, seq FROM outbox_events WHERE ready ORDER BY topic, seq LIMIT 1)
    UNION ALL
    SELECT next.topic, next.seq
    FROM first
    CROSS JOIN LATERAL (SELECT topic, seq FROM outbox_events WHERE ready AND topic > first.topic
                        ORDER BY topic, seq LIMIT 1) next
),
oldest AS (
    SELECT least((SELECT min(seq) FROM first),
                 (SELECT min(seq) FROM outbox_events WHERE NOT ready AND status IN ('pending', 'failed'))) AS seq
)
SELECT c.*, b.*,
       (SELECT count(*) FROM (
            (SELECT 1 FROM outbox_events WHERE ready LIMIT $1)
            UNION ALL
            (SELECT 1 FROM outbox_events WHERE NOT ready AND status IN ('pending', 'failed') LIMIT $1)) unsent),
       (SELECT written_at FROM outbox_events WHERE seq = (SELECT seq FROM oldest)),
       clock_timestamp()
FROM (SELECT coalesce(sum(failed), 0)::bigint, coalesce(sum(sent), 0)::bigint, coalesce(sum(dead), 0)::bigint,
             coalesce(sum(publish_success_total), 0)::bigint, coalesce(sum(publish_failure_total), 0)::bigint,
             coalesce(sum(dead_total), 0)::bigint, coalesce(sum(acknowledged_total), 0)::bigint
      FROM outbox_counters) c,
     (SELECT coalesce(sum(size), 0)::bigint, coalesce(sum(failed), 0)::bigint FROM outbox_open_batches) b
