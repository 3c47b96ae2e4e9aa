-- {sign} and {order} are the direction of the page.
SELECT id, topic, `type`, `key`, payload, content_type, headers, occurred_at, seq, delivery,
       attempts, next_attempt_at, dead, error, position
FROM inbox_parked FORCE INDEX (inbox_parked_group)
WHERE grp = (SELECT grp FROM inbox_groups WHERE name = ?) AND position {sign} ?
ORDER BY position {order} LIMIT ?
