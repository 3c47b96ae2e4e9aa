-- A partitioned log and who has read how far. Tables carry the prefix `broker_` so that the file may be shared.

CREATE TABLE broker_topics (
    id         INTEGER PRIMARY KEY,
    name       TEXT    NOT NULL UNIQUE,
    -- Its partitions are numbered without a gap from `base`, so a key's partition is found by arithmetic.
    base       INTEGER NOT NULL,
    partitions INTEGER NOT NULL CHECK (partitions > 0)
) STRICT;

CREATE TABLE broker_partitions (
    id    INTEGER PRIMARY KEY,
    topic INTEGER NOT NULL REFERENCES broker_topics (id),
    -- Offsets from `first` up to, but not including, `next` are kept, without gaps: counts need no scan.
    -- `first` is always the beginning of a block.
    first INTEGER NOT NULL DEFAULT 0,
    next  INTEGER NOT NULL DEFAULT 0 CHECK (next >= first)
) STRICT;

-- What one call stored in one partition.
CREATE TABLE broker_blocks (
    -- partition * 2^40 + the offset of the first message: the table itself is sorted as it is read, and no index
    -- is kept beside it.
    position  INTEGER PRIMARY KEY,
    messages  INTEGER NOT NULL CHECK (messages > 0),
    stored_at INTEGER NOT NULL,
    -- Last, so that looking at the others does not read it.
    data      BLOB    NOT NULL
) STRICT;

CREATE TABLE broker_groups (
    id         INTEGER PRIMARY KEY,
    name       TEXT    NOT NULL UNIQUE,
    -- Rises whenever partitions might have to move: members that see another number than theirs look again.
    generation INTEGER NOT NULL DEFAULT 0
) STRICT;

-- What each group has ever asked for. By name, because the topic may be created later.
CREATE TABLE broker_subscriptions (
    group_id INTEGER NOT NULL REFERENCES broker_groups (id) ON DELETE CASCADE,
    topic    TEXT    NOT NULL,
    PRIMARY KEY (group_id, topic)
) STRICT, WITHOUT ROWID;
CREATE INDEX broker_subscriptions_by_topic ON broker_subscriptions (topic);

CREATE TABLE broker_members (
    -- AUTOINCREMENT: the number of a member that is gone never comes back, so it fences.
    id           INTEGER PRIMARY KEY AUTOINCREMENT,
    group_id     INTEGER NOT NULL REFERENCES broker_groups (id) ON DELETE CASCADE,
    presence     TEXT    NOT NULL,
    locked_until INTEGER NOT NULL
) STRICT;
CREATE INDEX broker_members_by_group ON broker_members (group_id);

-- What each living member asks for.
CREATE TABLE broker_interests (
    member INTEGER NOT NULL REFERENCES broker_members (id) ON DELETE CASCADE,
    topic  TEXT    NOT NULL,
    PRIMARY KEY (member, topic)
) STRICT, WITHOUT ROWID;

CREATE TABLE broker_offsets (
    group_id  INTEGER NOT NULL REFERENCES broker_groups (id) ON DELETE CASCADE,
    partition INTEGER NOT NULL REFERENCES broker_partitions (id),
    -- Everything before this is acknowledged.
    committed INTEGER NOT NULL,
    member    INTEGER,
    -- Rises with every change of hands and never falls.
    epoch     INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (group_id, partition)
) STRICT, WITHOUT ROWID;
