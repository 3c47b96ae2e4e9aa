INSERT INTO inbox_parked (grp, id, digest, topic, `type`, `key`, payload, content_type, headers, occurred_at, seq,
                          delivery, attempts, next_attempt_at, dead, error)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON DUPLICATE KEY UPDATE attempts = VALUES(attempts), next_attempt_at = VALUES(next_attempt_at), dead = VALUES(dead),
                        error = VALUES(error)
