-- What is the newest version of an entity that somebody has applied: an older one must not overwrite it.
CREATE TABLE inbox_versions (
    scope   TEXT NOT NULL,
    entity  TEXT NOT NULL,
    version INTEGER NOT NULL,
    PRIMARY KEY (scope, entity)
) STRICT, WITHOUT ROWID;
