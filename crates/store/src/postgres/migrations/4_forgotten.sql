-- How many ids of a group were forgotten: those that were processed less these are kept, and nobody has to count them.
CREATE TABLE inbox_forgotten (
    grp bigint PRIMARY KEY,
    ids bigint NOT NULL
);
INSERT INTO inbox_forgotten (grp, ids)
SELECT grp, coalesce((SELECT sum(c.processed) FROM inbox_counters c WHERE c.grp = g.grp), 0)
            - (SELECT count(*) FROM inbox_ids i WHERE i.grp = g.grp)
FROM inbox_groups g;
