-- The inbox: what each consumer group has done, is doing, and will try again.
-- The row of a group is also its lock: shared by those who only make marks, exclusive for those who park or unpark.
CREATE TABLE IF NOT EXISTS inbox_groups (
    grp      BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    name     VARCHAR(249) NOT NULL,
    -- How long its ids are kept, in milliseconds, as its consumer last said: others may clean up after it.
    keep_ids BIGINT,
    UNIQUE INDEX inbox_groups_name (name)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- A group's counters, in 64 parts that are added up when somebody asks: its consumers need not wait for each other.
CREATE TABLE IF NOT EXISTS inbox_counters (
    grp        BIGINT NOT NULL,
    part       TINYINT UNSIGNED NOT NULL,
    processed  BIGINT NOT NULL DEFAULT 0,
    duplicates BIGINT NOT NULL DEFAULT 0,
    parked     BIGINT NOT NULL DEFAULT 0,
    dead       BIGINT NOT NULL DEFAULT 0,
    PRIMARY KEY (grp, part)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Done. The unique index is what lets only one of two equal arrivals win.
CREATE TABLE IF NOT EXISTS inbox_ids (
    position     BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    grp          BIGINT NOT NULL,
    id           VARCHAR(36) NOT NULL,
    -- What the message said; empty when only its id was told.
    digest       VARBINARY(16) NOT NULL,
    topic        VARCHAR(249) NOT NULL,
    `key`        VARCHAR(1024),
    seq          BIGINT,
    processed_at DATETIME(3) NOT NULL,
    UNIQUE INDEX inbox_ids_id (grp, id),
    INDEX inbox_ids_group (grp, position)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- In the hands of a handler that works outside the transaction.
CREATE TABLE IF NOT EXISTS inbox_reserved (
    grp   BIGINT NOT NULL,
    id    VARCHAR(36) NOT NULL,
    token VARCHAR(36) NOT NULL,
    until DATETIME(3) NOT NULL,
    PRIMARY KEY (grp, id)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Kept for a later try (next_attempt_at), behind another of its key (none), or for a person (dead).
CREATE TABLE IF NOT EXISTS inbox_parked (
    position        BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    grp             BIGINT NOT NULL,
    id              VARCHAR(36) NOT NULL,
    digest          VARBINARY(16) NOT NULL,
    topic           VARCHAR(249) NOT NULL,
    `type`          VARCHAR(255),
    `key`           VARBINARY(1024),
    payload         LONGBLOB NOT NULL,
    content_type    VARCHAR(255) NOT NULL,
    headers         LONGTEXT NOT NULL,
    occurred_at     DATETIME(3) NOT NULL,
    seq             BIGINT,
    delivery        INT UNSIGNED NOT NULL,
    attempts        INT UNSIGNED NOT NULL,
    next_attempt_at DATETIME(3),
    dead            TINYINT NOT NULL,
    error           TEXT NOT NULL,
    UNIQUE INDEX inbox_parked_id (grp, id),
    INDEX inbox_parked_group (grp, position),
    INDEX inbox_parked_key (grp, topic, `key`, position),
    INDEX inbox_parked_due (grp, next_attempt_at)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
