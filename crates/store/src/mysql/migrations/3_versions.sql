-- What is the newest version of an entity that somebody has applied: an older one must not overwrite it.
CREATE TABLE IF NOT EXISTS inbox_versions (
    scope   VARCHAR(249) NOT NULL,
    entity  VARBINARY(1024) NOT NULL,
    -- None while somebody only asked.
    version BIGINT,
    PRIMARY KEY (scope, entity)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
