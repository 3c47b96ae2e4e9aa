-- Free lanes, the lowest first. One that somebody is just locking is left for the next beat.
UPDATE outbox_lanes l SET epoch = l.epoch + 1, lease_id = gen_random_uuid(), owner = $4, locked_until = $5
FROM (SELECT lane FROM outbox_lanes WHERE lane < $1 AND locked_until <= $2 ORDER BY lane LIMIT $3 FOR UPDATE SKIP LOCKED) free
WHERE l.lane = free.lane
RETURNING l.lane, l.epoch, l.lease_id
