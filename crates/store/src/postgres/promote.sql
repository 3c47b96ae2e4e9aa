-- Messages of these lanes whose wait is over are sendable again.
UPDATE outbox_events SET ready = true, next_attempt_at = NULL
WHERE seq IN (SELECT seq FROM outbox_events
              WHERE NOT ready AND next_attempt_at IS NOT NULL AND next_attempt_at <= $1 AND (slot & $2) = ANY ($3)
              ORDER BY next_attempt_at LIMIT $4)
RETURNING topic, slot, seq
