-- How many ids of a group were forgotten: those that were processed less these are kept, and nobody has to count them.
CREATE TABLE IF NOT EXISTS inbox_forgotten (
    grp BIGINT NOT NULL PRIMARY KEY,
    ids BIGINT NOT NULL
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
-- For the next statement alone: otherwise it would lock every id that it counts, and groups that run would wait for it.
SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
INSERT IGNORE INTO inbox_forgotten (grp, ids)
SELECT g.grp, coalesce((SELECT sum(c.processed) FROM inbox_counters c WHERE c.grp = g.grp), 0)
              - (SELECT count(*) FROM inbox_ids i WHERE i.grp = g.grp)
FROM inbox_groups g;
