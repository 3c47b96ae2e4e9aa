-- The outbox. Any program may insert with plain SQL, on a connection that speaks utf8mb4; only topic and payload are
-- required:
--   INSERT INTO outbox_events (topic, `key`, payload) VALUES ('order-events', '42', '{"total": 10}');
-- Times are UTC. Statements can be run again: MySQL commits each table by itself, and a run may stop between two.
CREATE TABLE IF NOT EXISTS outbox_events (
    seq             BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    -- A UUIDv7: time first, so that the index grows at its end.
    id              VARCHAR(36) NOT NULL DEFAULT (lower(concat(
                        lpad(hex(floor(unix_timestamp(now(3)) * 1000) >> 16), 8, '0'), '-',
                        lpad(hex(floor(unix_timestamp(now(3)) * 1000) & 65535), 4, '0'), '-7',
                        insert(insert(left(sha2(uuid(), 256), 18), 4, 0, '-8'), 9, 0, '-')))),
    topic           VARCHAR(249) NOT NULL,
    `type`          VARCHAR(255),
    -- Compared byte by byte wherever that matters: the collation takes 'a' and 'a ' for one.
    `key`           VARCHAR(1024),
    payload         LONGBLOB NOT NULL,
    content_type    VARCHAR(255) NOT NULL DEFAULT 'application/json',
    headers         LONGTEXT NOT NULL DEFAULT ('{}'),
    occurred_at     DATETIME(3) NOT NULL DEFAULT (utc_timestamp(3)),
    written_at      DATETIME(3) NOT NULL DEFAULT (utc_timestamp(3)),
    ack_groups      LONGTEXT,
    -- Below is Postrider's own bookkeeping: writers leave it alone.
    ready           TINYINT NOT NULL DEFAULT 1,
    held            TINYINT NOT NULL DEFAULT 0,
    status          ENUM ('pending', 'sent', 'failed', 'dead') NOT NULL DEFAULT 'pending',
    attempts        INT UNSIGNED NOT NULL DEFAULT 0,
    crashes         INT UNSIGNED NOT NULL DEFAULT 0,
    delivery_epoch  INT UNSIGNED NOT NULL DEFAULT 0,
    next_attempt_at DATETIME(3),
    last_error      TEXT,
    sent_at         DATETIME(3),
    dead_reason     TEXT,
    dead_at         DATETIME(3),
    -- 0 to 1023, from the bytes of the key (or of the id): all of a key share a lane.
    slot            SMALLINT UNSIGNED GENERATED ALWAYS AS (crc32(coalesce(`key`, id)) & 1023) STORED,
    -- What the claim index is cut into: with up to 16 lanes no relay steps over the rows of another's lane.
    stripe          TINYINT UNSIGNED GENERATED ALWAYS AS (crc32(coalesce(`key`, id)) & 15) STORED,
    -- The key of one that waits behind another, as bytes. MySQL has no index of some rows only; one in which nearly
    -- all are NULL is the next best.
    held_key        VARBINARY(1024) GENERATED ALWAYS AS (if(held = 1, cast(`key` AS BINARY), NULL)) STORED,
    CONSTRAINT outbox_id_is_a_uuid CHECK (id RLIKE '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$'),
    CONSTRAINT outbox_topic_is_a_name CHECK (topic RLIKE '^[A-Za-z0-9._-]+$' AND topic NOT IN ('.', '..')),
    CONSTRAINT outbox_key_has_at_most_1024_bytes CHECK (length(`key`) <= 1024),
    CONSTRAINT outbox_headers_are_a_json_object CHECK (json_type(headers) = 'OBJECT'),
    CONSTRAINT outbox_ack_groups_are_a_json_array CHECK (ack_groups IS NULL OR json_type(ack_groups) = 'ARRAY'),
    UNIQUE INDEX outbox_id (id),
    -- The claim reads this and nothing else.
    INDEX outbox_ready (ready, topic, stripe, seq, slot),
    -- What is where, in the order of writing: lists, counts and the oldest.
    INDEX outbox_status_seq (status, ready, seq),
    INDEX outbox_due (next_attempt_at, slot),
    INDEX outbox_held (held_key, topic, seq)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- A key whose later messages wait for one of them.
CREATE TABLE IF NOT EXISTS outbox_holds (
    topic       VARCHAR(249) NOT NULL,
    `key`       VARBINARY(1024) NOT NULL,
    slot        SMALLINT UNSIGNED NOT NULL,
    seq         BIGINT NOT NULL,
    -- Followers up to here may pass: the hold is being drained, in order, a bounded number at a time.
    released_to BIGINT NOT NULL DEFAULT 0,
    draining    TINYINT NOT NULL DEFAULT 0,
    PRIMARY KEY (topic, `key`),
    INDEX outbox_holds_seq (seq),
    INDEX outbox_holds_draining (draining, slot)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS outbox_lanes (
    lane         SMALLINT UNSIGNED NOT NULL PRIMARY KEY,
    epoch        BIGINT NOT NULL DEFAULT 0,
    lease_id     VARCHAR(36),
    owner        VARCHAR(36),
    locked_until DATETIME(3) NOT NULL DEFAULT '1970-01-01'
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
INSERT IGNORE INTO outbox_lanes (lane)
WITH RECURSIVE n (lane) AS (SELECT 0 UNION ALL SELECT lane + 1 FROM n WHERE lane < 900)
SELECT lane FROM n UNION ALL SELECT lane + 901 FROM n WHERE lane < 123;

CREATE TABLE IF NOT EXISTS outbox_instances (
    id          VARCHAR(36) NOT NULL PRIMARY KEY,
    name        TEXT NOT NULL,
    alive_until DATETIME(3) NOT NULL
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Messages in flight: the exact ones, for as long as the batch is open. A lane has several when they go to several
-- brokers; while one is open, no other message of its topics is claimed on the lane.
CREATE TABLE IF NOT EXISTS outbox_batches (
    lane       SMALLINT UNSIGNED NOT NULL,
    -- The lowest that no other open batch of the lane has: records take each other's place, so that an old snapshot
    -- does not make them pile up.
    place      SMALLINT UNSIGNED NOT NULL,
    id         VARCHAR(36) NOT NULL,
    epoch      BIGINT NOT NULL,
    lease_id   VARCHAR(36) NOT NULL,
    topics     LONGTEXT NOT NULL,
    seqs       LONGTEXT NOT NULL,
    size       INT NOT NULL,
    failed     INT NOT NULL,
    claimed_at DATETIME(3) NOT NULL,
    PRIMARY KEY (lane, place)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- What SQL users look at: in flight is a fact about batches, not a column of the message.
CREATE OR REPLACE SQL SECURITY INVOKER VIEW outbox_status AS
SELECT e.seq, e.id, e.topic, e.`type`, e.`key`,
       CASE WHEN f.seq IS NULL THEN e.status ELSE 'in_flight' END AS status,
       e.attempts, e.held, e.last_error, e.dead_reason,
       e.written_at, e.next_attempt_at, e.sent_at, f.locked_until
FROM outbox_events e
LEFT JOIN (SELECT j.seq, l.locked_until
           FROM outbox_batches b JOIN outbox_lanes l ON l.lane = b.lane
           JOIN json_table(b.seqs, '$[*]' COLUMNS (seq BIGINT PATH '$')) j) f ON f.seq = e.seq;

CREATE TABLE IF NOT EXISTS outbox_acknowledgements (
    seq             BIGINT NOT NULL,
    grp             VARCHAR(249) NOT NULL,
    acknowledged_at DATETIME(3) NOT NULL,
    PRIMARY KEY (seq, grp)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Sent, and this group had not said that it is done. Who reads it looks into acknowledgements too: a group that is
-- quicker than the settlement may leave its row here until the next cleaning.
CREATE TABLE IF NOT EXISTS outbox_unacknowledged (
    grp VARCHAR(249) NOT NULL,
    seq BIGINT NOT NULL,
    PRIMARY KEY (grp, seq)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Tries in vain.
CREATE TABLE IF NOT EXISTS outbox_attempts (
    position BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    seq      BIGINT NOT NULL,
    at       DATETIME(3) NOT NULL,
    outcome  VARCHAR(16) NOT NULL,
    error    TEXT NOT NULL,
    INDEX outbox_attempts_seq (seq, position)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS outbox_audit (
    position   BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    at         DATETIME(3) NOT NULL,
    actor      TEXT NOT NULL,
    action     VARCHAR(64) NOT NULL,
    message_id VARCHAR(36),
    detail     LONGTEXT NOT NULL
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Names under which a write happens once. They outlive the messages.
CREATE TABLE IF NOT EXISTS outbox_idempotency_keys (
    position    BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    `key`       VARBINARY(1024) NOT NULL,
    fingerprint BINARY(32) NOT NULL,
    message_id  VARCHAR(36) NOT NULL,
    created_at  DATETIME(3) NOT NULL,
    UNIQUE INDEX outbox_idempotency_key (`key`)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE IF NOT EXISTS outbox_settings (
    name  VARCHAR(64) NOT NULL PRIMARY KEY,
    value TEXT NOT NULL
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
INSERT IGNORE INTO outbox_settings VALUES ('lanes', '16'), ('lanes_wanted', '16'), ('store_id', replace(uuid(), '-', ''));

-- Totals, in parts that are added up when somebody asks: one part for each lane, 0 to 1023, and 64 more for what
-- happens outside of lanes. Whoever changes the messages of a lane locks its part first; the heartbeat, which writes
-- `lanes`, never waits for that.
CREATE TABLE IF NOT EXISTS outbox_counters (
    part                  SMALLINT UNSIGNED NOT NULL PRIMARY KEY,
    sent                  BIGINT NOT NULL DEFAULT 0,
    publish_success_total BIGINT NOT NULL DEFAULT 0,
    publish_failure_total BIGINT NOT NULL DEFAULT 0,
    dead_total            BIGINT NOT NULL DEFAULT 0,
    acknowledged_total    BIGINT NOT NULL DEFAULT 0
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
INSERT IGNORE INTO outbox_counters (part)
WITH RECURSIVE n (part) AS (SELECT 0 UNION ALL SELECT part + 1 FROM n WHERE part < 900)
SELECT part FROM n UNION ALL SELECT part + 901 FROM n WHERE part < 187;

CREATE TABLE IF NOT EXISTS outbox_latencies (
    part   SMALLINT UNSIGNED NOT NULL,
    name   VARCHAR(32) NOT NULL,
    bucket TINYINT UNSIGNED NOT NULL,
    n      BIGINT NOT NULL,
    millis BIGINT NOT NULL,
    PRIMARY KEY (part, name, bucket)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
