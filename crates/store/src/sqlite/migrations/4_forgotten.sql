-- How many ids of a group were forgotten: those that were processed less these are kept, and nobody has to count them.
CREATE TABLE inbox_forgotten (
    grp INTEGER PRIMARY KEY,
    ids INTEGER NOT NULL
) STRICT;
INSERT INTO inbox_forgotten (grp, ids)
SELECT grp, processed - (SELECT count(*) FROM inbox_ids i WHERE i.grp = g.grp) FROM inbox_groups g;
