UPDATE outbox_events e
SET status = a.status, ready = a.ready, held = e.held AND a.ready, attempts = a.attempts, crashes = a.crashes,
    next_attempt_at = a.next_attempt_at, last_error = a.last_error, dead_reason = a.dead_reason,
    dead_at = CASE WHEN a.dead_reason IS NOT NULL THEN $9 END
FROM unnest($1::bigint[], $2::text[], $3::boolean[], $4::integer[], $5::integer[], $6::timestamptz[], $7::text[],
            $8::text[]) AS a(seq, status, ready, attempts, crashes, next_attempt_at, last_error, dead_reason)
WHERE e.seq = a.seq
