-- The table becomes the first partition of one that takes its place.
LOCK TABLE outbox_events IN ACCESS EXCLUSIVE MODE;
DROP VIEW outbox_status;
DROP TRIGGER outbox_removed ON outbox_events;
DROP TRIGGER IF EXISTS outbox_doorbell ON outbox_events;
ALTER TABLE outbox_events RENAME TO outbox_events_p0;
ALTER INDEX outbox_events_pkey RENAME TO outbox_events_p0_pkey;
DROP INDEX outbox_id;
ALTER INDEX outbox_ready RENAME TO outbox_events_p0_ready;
ALTER INDEX outbox_due RENAME TO outbox_events_p0_due;
ALTER INDEX outbox_held RENAME TO outbox_events_p0_held;
ALTER INDEX outbox_waiting RENAME TO outbox_events_p0_waiting;
ALTER INDEX outbox_dead RENAME TO outbox_events_p0_dead;

CREATE TABLE outbox_events (LIKE outbox_events_p0 INCLUDING DEFAULTS INCLUDING GENERATED INCLUDING CONSTRAINTS)
    PARTITION BY RANGE (seq);
ALTER TABLE outbox_events ADD PRIMARY KEY (seq);
CREATE INDEX outbox_id ON outbox_events (id);
CREATE INDEX outbox_ready ON outbox_events (topic, seq) INCLUDE (slot) WHERE ready;
CREATE INDEX outbox_due ON outbox_events (next_attempt_at) INCLUDE (slot)
    WHERE NOT ready AND next_attempt_at IS NOT NULL;
CREATE INDEX outbox_held ON outbox_events (topic, key, seq) WHERE held;
CREATE INDEX outbox_waiting ON outbox_events (seq) WHERE NOT ready AND status IN ('pending', 'failed');
CREATE INDEX outbox_dead ON outbox_events (seq) WHERE status = 'dead';
-- Owned by the first partition it would go with it.
ALTER SEQUENCE outbox_seq OWNED BY outbox_events.seq;

CREATE TRIGGER outbox_removed AFTER DELETE ON outbox_events
    REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION postrider_removed();
CREATE VIEW outbox_status AS
SELECT e.seq, e.id, e.topic, e.type, e.key,
       CASE WHEN f.seq IS NULL THEN e.status ELSE 'in_flight' END AS status,
       e.attempts, e.held, e.last_error, e.dead_reason, e.written_at, e.next_attempt_at, e.sent_at, f.locked_until
FROM outbox_events e
LEFT JOIN (SELECT unnest(b.seqs) AS seq, b.locked_until FROM outbox_open_batches b) f ON f.seq = e.seq;

CREATE TABLE outbox_events_beyond PARTITION OF outbox_events DEFAULT;
