-- The outbox. Any program may insert with plain SQL; only topic and payload are required:
--   INSERT INTO outbox_events (topic, key, payload) VALUES ('order-events', '42', '{"total": 10}');
-- Times are milliseconds since 1970. Expressions keep to what SQLite 3.37 knows, because the writer's
-- library may be older than ours.
CREATE TABLE outbox_events (
    seq             INTEGER PRIMARY KEY AUTOINCREMENT,
    -- A UUIDv7: time first, so that the index grows at its end.
    id              TEXT NOT NULL DEFAULT (lower(printf('%08x-%04x-7%s-%s%s-%s',
                        CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) >> 16,
                        CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) & 65535,
                        substr(hex(randomblob(2)), 2),
                        substr('89ab', 1 + (abs(random()) & 3), 1),
                        substr(hex(randomblob(2)), 2),
                        hex(randomblob(6)))))
                    CHECK (length(id) = 36 AND id GLOB '????????-????-????-????-????????????'
                           AND replace(id, '-', '') NOT GLOB '*[^0-9a-f]*'),
    topic           TEXT NOT NULL CHECK (length(topic) BETWEEN 1 AND 249 AND topic NOT GLOB '*[^A-Za-z0-9._-]*'),
    type            TEXT,
    key             TEXT,
    payload         ANY NOT NULL,
    content_type    TEXT NOT NULL DEFAULT 'application/json',
    headers         TEXT NOT NULL DEFAULT '{}' CHECK (json_valid(headers) AND json_type(headers) = 'object'),
    occurred_at     INTEGER NOT NULL DEFAULT (CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)),
    written_at      INTEGER NOT NULL DEFAULT (CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)),
    ack_groups      TEXT CHECK (ack_groups IS NULL OR (json_valid(ack_groups) AND json_type(ack_groups) = 'array')),
    -- Below is Postrider's own bookkeeping: writers leave it alone.
    ready           INTEGER NOT NULL DEFAULT 1,
    held            INTEGER NOT NULL DEFAULT 0,
    status          TEXT NOT NULL DEFAULT 'pending' CHECK (status IN ('pending', 'sent', 'failed', 'dead')),
    attempts        INTEGER NOT NULL DEFAULT 0,
    crashes         INTEGER NOT NULL DEFAULT 0,
    delivery_epoch  INTEGER NOT NULL DEFAULT 0,
    next_attempt_at INTEGER,
    last_error      TEXT,
    sent_at         INTEGER,
    dead_reason     TEXT,
    dead_at         INTEGER,
    -- 0 to 1023, from the last four characters of the key (or of the id): all of a key share a lane.
    slot            INTEGER GENERATED ALWAYS AS ((
                          coalesce(unicode(substr(coalesce(key, id), -1, 1)), 0)
                        + coalesce(unicode(substr(coalesce(key, id), -2, 1)), 0) * 31
                        + coalesce(unicode(substr(coalesce(key, id), -3, 1)), 0) * 961
                        + coalesce(unicode(substr(coalesce(key, id), -4, 1)), 0) * 29791
                    ) & 1023) VIRTUAL
) STRICT;

CREATE UNIQUE INDEX outbox_id ON outbox_events (id);
-- The claim reads this and nothing else: rows that wait, are sent or are dead are not in it.
CREATE INDEX outbox_ready ON outbox_events (topic, seq, slot) WHERE ready = 1;
CREATE INDEX outbox_due ON outbox_events (next_attempt_at) WHERE ready = 0 AND next_attempt_at IS NOT NULL;
CREATE INDEX outbox_held ON outbox_events (topic, key, seq) WHERE held = 1;
CREATE INDEX outbox_waiting ON outbox_events (seq) WHERE ready = 0 AND status IN ('pending', 'failed');
CREATE INDEX outbox_dead ON outbox_events (seq) WHERE status = 'dead';

-- A key whose later messages wait for one of them.
CREATE TABLE outbox_holds (
    topic       TEXT NOT NULL,
    key         TEXT NOT NULL,
    seq         INTEGER NOT NULL,
    -- Followers up to here may pass: the hold is being drained, in order, a bounded number at a time.
    released_to INTEGER NOT NULL DEFAULT 0,
    draining    INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (topic, key)
) STRICT, WITHOUT ROWID;
CREATE INDEX outbox_holds_seq ON outbox_holds (seq);
CREATE INDEX outbox_holds_draining ON outbox_holds (topic, key) WHERE draining = 1;

CREATE TABLE outbox_lanes (
    lane         INTEGER PRIMARY KEY,
    epoch        INTEGER NOT NULL DEFAULT 0,
    lease_id     TEXT,
    owner        TEXT,
    locked_until INTEGER NOT NULL DEFAULT 0
) STRICT;
WITH RECURSIVE n(lane) AS (SELECT 0 UNION ALL SELECT lane + 1 FROM n WHERE lane < 1023)
INSERT INTO outbox_lanes (lane) SELECT lane FROM n;

CREATE TABLE outbox_instances (
    id          TEXT PRIMARY KEY,
    name        TEXT NOT NULL,
    -- The lock file that the system frees when the process ends.
    presence    TEXT,
    alive_until INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- Messages in flight: the exact ones, for as long as the batch is open. A lane has several when they go to several
-- brokers; while one is open, no other message of its topics is claimed on the lane.
CREATE TABLE outbox_batches (
    lane       INTEGER NOT NULL,
    id         TEXT NOT NULL,
    epoch      INTEGER NOT NULL,
    lease_id   TEXT NOT NULL,
    topics     TEXT NOT NULL,
    seqs       TEXT NOT NULL,
    size       INTEGER NOT NULL,
    failed     INTEGER NOT NULL,
    claimed_at INTEGER NOT NULL,
    PRIMARY KEY (lane, id)
) STRICT, WITHOUT ROWID;

-- What SQL users look at: in flight is a fact about batches, not a column of the message.
CREATE VIEW outbox_status AS
SELECT e.seq, e.id, e.topic, e.type, e.key,
       CASE WHEN f.seq IS NULL THEN e.status ELSE 'in_flight' END AS status,
       e.attempts, e.held, e.last_error, e.dead_reason,
       datetime(e.written_at / 1000, 'unixepoch') AS written_at,
       datetime(e.next_attempt_at / 1000, 'unixepoch') AS next_attempt_at,
       datetime(e.sent_at / 1000, 'unixepoch') AS sent_at,
       datetime(f.locked_until / 1000, 'unixepoch') AS locked_until
FROM outbox_events e
LEFT JOIN (SELECT j.value AS seq, l.locked_until
           FROM outbox_batches b JOIN outbox_lanes l USING (lane), json_each(b.seqs) j) f ON f.seq = e.seq;

CREATE TABLE outbox_acknowledgements (
    seq             INTEGER NOT NULL,
    grp             TEXT NOT NULL,
    acknowledged_at INTEGER NOT NULL,
    PRIMARY KEY (seq, grp)
) STRICT, WITHOUT ROWID;

-- Sent, and this group has not said that it is done.
CREATE TABLE outbox_unacknowledged (
    grp TEXT NOT NULL,
    seq INTEGER NOT NULL,
    PRIMARY KEY (grp, seq)
) STRICT, WITHOUT ROWID;

-- Tries in vain.
CREATE TABLE outbox_attempts (
    position INTEGER PRIMARY KEY,
    seq      INTEGER NOT NULL,
    at       INTEGER NOT NULL,
    outcome  TEXT NOT NULL,
    error    TEXT NOT NULL
) STRICT;
CREATE INDEX outbox_attempts_seq ON outbox_attempts (seq, position);

CREATE TABLE outbox_audit (
    position   INTEGER PRIMARY KEY AUTOINCREMENT,
    at         INTEGER NOT NULL,
    actor      TEXT NOT NULL,
    action     TEXT NOT NULL,
    message_id TEXT,
    detail     TEXT NOT NULL
) STRICT;

-- Names under which a write happens once. They outlive the messages.
CREATE TABLE outbox_idempotency_keys (
    position    INTEGER PRIMARY KEY,
    key         TEXT NOT NULL UNIQUE,
    fingerprint BLOB NOT NULL,
    message_id  TEXT NOT NULL,
    created_at  INTEGER NOT NULL
) STRICT;

CREATE TABLE outbox_settings (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;
INSERT INTO outbox_settings VALUES ('lanes', '16'), ('lanes_wanted', '16'), ('store_id', lower(hex(randomblob(16))));

-- Kept as things change, so that counting never scans. Pending ones are what is left:
-- all that were ever inserted (sqlite_sequence) less these.
CREATE TABLE outbox_counters (
    one                        INTEGER PRIMARY KEY CHECK (one = 1),
    failed                     INTEGER NOT NULL DEFAULT 0,
    sent                       INTEGER NOT NULL DEFAULT 0,
    dead                       INTEGER NOT NULL DEFAULT 0,
    removed                    INTEGER NOT NULL DEFAULT 0,
    publish_success_total      INTEGER NOT NULL DEFAULT 0,
    publish_failure_total      INTEGER NOT NULL DEFAULT 0,
    dead_total                 INTEGER NOT NULL DEFAULT 0,
    acknowledged_total         INTEGER NOT NULL DEFAULT 0
) STRICT;
INSERT INTO outbox_counters (one) VALUES (1);

-- All that hangs on a record goes with it, also when somebody deletes it by hand: nothing may wait for it.
CREATE TRIGGER outbox_removed AFTER DELETE ON outbox_events BEGIN
    UPDATE outbox_holds SET draining = 1, seq = 0 WHERE seq = old.seq;
    DELETE FROM outbox_attempts WHERE seq = old.seq;
    DELETE FROM outbox_acknowledgements WHERE seq = old.seq;
    DELETE FROM outbox_unacknowledged WHERE seq = old.seq AND grp IN (SELECT value FROM json_each(old.ack_groups));
    UPDATE outbox_counters SET removed = removed + 1,
                        failed = failed - (old.status = 'failed'),
                        sent = sent - (old.status = 'sent'),
                        dead = dead - (old.status = 'dead');
END;

CREATE TABLE outbox_latencies (
    name   TEXT NOT NULL,
    bucket INTEGER NOT NULL,
    n      INTEGER NOT NULL,
    millis INTEGER NOT NULL,
    PRIMARY KEY (name, bucket)
) STRICT, WITHOUT ROWID;
