-- The inbox: what each consumer group has done, is doing, and will try again.
CREATE TABLE inbox_groups (
    grp        INTEGER PRIMARY KEY,
    name       TEXT NOT NULL UNIQUE,
    processed  INTEGER NOT NULL DEFAULT 0,
    duplicates INTEGER NOT NULL DEFAULT 0,
    parked     INTEGER NOT NULL DEFAULT 0,
    dead       INTEGER NOT NULL DEFAULT 0,
    -- How long its ids are kept, in milliseconds, as its consumer last said: others may clean up after it.
    keep_ids   INTEGER
) STRICT;

-- Done. The unique index is what lets only one of two equal arrivals win.
CREATE TABLE inbox_ids (
    position     INTEGER PRIMARY KEY AUTOINCREMENT,
    grp          INTEGER NOT NULL,
    id           TEXT NOT NULL,
    digest       BLOB NOT NULL,
    topic        TEXT NOT NULL,
    key          TEXT,
    seq          INTEGER,
    processed_at INTEGER NOT NULL
) STRICT;
CREATE UNIQUE INDEX inbox_ids_id ON inbox_ids (grp, id);
-- One group's marks in the order in which they were made: an index ends with the position.
CREATE INDEX inbox_ids_group ON inbox_ids (grp);

-- In the hands of a handler that works outside the transaction.
CREATE TABLE inbox_reserved (
    grp   INTEGER NOT NULL,
    id    TEXT NOT NULL,
    token TEXT NOT NULL,
    until INTEGER NOT NULL,
    PRIMARY KEY (grp, id)
) STRICT, WITHOUT ROWID;

-- Kept for a later try (next_attempt_at), behind another of its key (none), or for a person (dead).
CREATE TABLE inbox_parked (
    position        INTEGER PRIMARY KEY AUTOINCREMENT,
    grp             INTEGER NOT NULL,
    id              TEXT NOT NULL,
    digest          BLOB NOT NULL,
    topic           TEXT NOT NULL,
    type            TEXT,
    key             TEXT,
    payload         BLOB NOT NULL,
    content_type    TEXT NOT NULL,
    headers         TEXT NOT NULL,
    occurred_at     INTEGER NOT NULL,
    seq             INTEGER,
    delivery        INTEGER NOT NULL,
    attempts        INTEGER NOT NULL,
    next_attempt_at INTEGER,
    dead            INTEGER NOT NULL,
    error           TEXT NOT NULL
) STRICT;
CREATE UNIQUE INDEX inbox_parked_id ON inbox_parked (grp, id);
CREATE INDEX inbox_parked_group ON inbox_parked (grp);
CREATE INDEX inbox_parked_key ON inbox_parked (grp, topic, key, position);
CREATE INDEX inbox_parked_due ON inbox_parked (grp, next_attempt_at) WHERE next_attempt_at IS NOT NULL;
