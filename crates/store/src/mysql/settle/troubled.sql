UPDATE json_table(?, '$[*]' COLUMNS (
           number   BIGINT PATH '$[0]',
           is_now   VARCHAR(16) CHARACTER SET utf8mb4 PATH '$[1]',
           failures INT PATH '$[2]',
           due      VARCHAR(32) CHARACTER SET utf8mb4 PATH '$[3]',
           told     TEXT CHARACTER SET utf8mb4 PATH '$[4]',
           reason   TEXT CHARACTER SET utf8mb4 PATH '$[5]',
           died     VARCHAR(32) CHARACTER SET utf8mb4 PATH '$[6]')) j
STRAIGHT_JOIN outbox_events e FORCE INDEX (PRIMARY) ON e.seq = j.number
SET e.status = j.is_now, e.ready = 0, e.held = 0, e.attempts = j.failures, e.next_attempt_at = j.due,
    e.last_error = coalesce(j.told, e.last_error), e.dead_reason = coalesce(j.reason, e.dead_reason), e.dead_at = coalesce(j.died, e.dead_at)
