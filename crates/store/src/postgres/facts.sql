-- Read after the locks: the clock, the number of lanes, what the marks need, and what waits on these lanes.
WITH size AS (SELECT value::smallint AS lanes FROM outbox_settings WHERE name = 'lanes')
SELECT clock_timestamp(), size.lanes,
       pg_snapshot_xmin(pg_current_snapshot())::text::bigint,
       pg_current_xact_id_if_assigned()::text::bigint,
       (SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM outbox_seq),
       EXISTS (SELECT 1 FROM outbox_holds WHERE draining AND (slot & (size.lanes - 1)) = ANY ($1)),
       (SELECT next_attempt_at FROM outbox_events
        WHERE NOT ready AND next_attempt_at IS NOT NULL AND (slot & (size.lanes - 1)) = ANY ($1)
        ORDER BY next_attempt_at LIMIT 1)
FROM size
