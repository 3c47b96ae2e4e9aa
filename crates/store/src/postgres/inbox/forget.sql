-- Whole calls, the oldest first, until $2 ids are gone. No more are looked at, and their ids are read only where they are over.
WITH gone AS (
    DELETE FROM inbox_done WHERE grp = $1 AND call IN (
        SELECT call FROM (SELECT call, processed_at, sum(n) OVER (ORDER BY call) - n AS before
                          FROM (SELECT call, processed_at, n FROM inbox_done WHERE grp = $1 ORDER BY call LIMIT $2) d) o
        WHERE before < $2 AND processed_at < clock_timestamp() - (SELECT keep_ids FROM inbox_groups WHERE grp = $1))
    RETURNING n, ids),
unmarked AS (
    DELETE FROM inbox_ids WHERE ctid = ANY (ARRAY(
        SELECT i.place FROM gone CROSS JOIN LATERAL unnest(gone.ids) AS w(id) CROSS JOIN LATERAL
        (SELECT ctid AS place FROM inbox_ids WHERE grp = $1 AND id = w.id OFFSET 0) i)))
SELECT coalesce(sum(n), 0)::bigint FROM gone
