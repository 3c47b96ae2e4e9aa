INSERT INTO inbox_parked (grp, id, digest, topic, type, key, payload, content_type, headers, occurred_at, seq,
                          delivery, attempts, next_attempt_at, dead, error)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9::jsonb, $10, $11, $12, $13, $14, $15, $16)
ON CONFLICT (grp, id) DO UPDATE SET attempts = excluded.attempts, next_attempt_at = excluded.next_attempt_at,
                                    dead = excluded.dead, error = excluded.error
-- A row that was there has been updated, and so has this transaction's id as its end.
RETURNING xmax = 0
