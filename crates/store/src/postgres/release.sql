UPDATE outbox_lanes l SET owner = NULL, lease_id = NULL, locked_until = 'epoch'
FROM (SELECT l.lane FROM outbox_lanes l
      JOIN unnest($1::smallint[], $2::bigint[], $3::uuid[]) AS h(lane, epoch, id)
           ON l.lane = h.lane AND l.epoch = h.epoch AND l.lease_id = h.id
      ORDER BY l.lane FOR UPDATE OF l) held
WHERE l.lane = held.lane
RETURNING l.lane
