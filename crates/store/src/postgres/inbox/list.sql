-- {sign} and {order} are the direction of the page.
SELECT e.id, e.topic, e.type, e.key, e.payload, e.content_type, e.headers::text, e.occurred_at, e.seq, e.delivery,
       e.attempts, e.next_attempt_at, e.dead, e.error, e.position
FROM inbox_parked e
WHERE e.grp = (SELECT grp FROM inbox_groups WHERE name = $1) AND e.position {sign} $2
ORDER BY e.position {order} LIMIT $3
