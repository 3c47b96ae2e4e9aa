SELECT l.lane, l.epoch,
       CASE WHEN l.locked_until > clock_timestamp() THEN coalesce(i.name, l.owner::text) END,
       CASE WHEN l.locked_until > clock_timestamp() THEN l.locked_until END,
       coalesce((SELECT sum(b.size) FROM outbox_batches b WHERE b.lane = l.lane AND b.position > l.settled_to), 0)
FROM outbox_lanes l LEFT JOIN outbox_instances i ON i.id = l.owner
WHERE l.lane < (SELECT value::smallint FROM outbox_settings WHERE name = 'lanes')
ORDER BY l.lane
