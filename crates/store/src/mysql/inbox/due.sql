-- The positions come from the index alone, the longest due first; only those rows are read.
SELECT p.id, p.topic, p.`type`, p.`key`, p.payload, p.content_type, p.headers, p.occurred_at, p.seq, p.delivery
FROM (SELECT position FROM inbox_parked FORCE INDEX (inbox_parked_due)
      WHERE grp = (SELECT grp FROM inbox_groups WHERE name = ?) AND next_attempt_at <= utc_timestamp(3)
      ORDER BY next_attempt_at LIMIT ?) due
STRAIGHT_JOIN inbox_parked p FORCE INDEX (PRIMARY) ON p.position = due.position
ORDER BY p.position
