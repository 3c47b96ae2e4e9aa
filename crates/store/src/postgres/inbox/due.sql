-- The positions come from the index alone, the longest due first; only those rows are read.
SELECT e.id, e.topic, e.type, e.key, e.payload, e.content_type, e.headers::text, e.occurred_at, e.seq, e.delivery
FROM inbox_parked e
JOIN (SELECT grp, id FROM inbox_parked
      WHERE grp = (SELECT grp FROM inbox_groups WHERE name = $1) AND next_attempt_at <= clock_timestamp()
      ORDER BY next_attempt_at LIMIT $2) due ON due.grp = e.grp AND due.id = e.id
ORDER BY e.position
