-- A plain look: an INSERT that selects would lock the batches, and hold up relays until its transaction ends.
SELECT e.seq, greatest(coalesce(timestampdiff(MICROSECOND, e.sent_at, utc_timestamp(3)) DIV 1000, 0), 0)
FROM outbox_events e
WHERE e.id = ?
AND (e.ack_groups IS NULL OR json_contains(e.ack_groups, json_quote(?)))
AND (e.status = 'sent'
     OR e.status IN ('pending', 'failed') AND (e.attempts > 0 OR e.crashes > 0 OR e.last_error IS NOT NULL)
     OR EXISTS (SELECT 1 FROM outbox_batches b WHERE json_contains(b.seqs, cast(e.seq AS CHAR))))
ORDER BY e.seq LIMIT 1
