-- The lock shows what another transaction has just made, whatever this one has seen before.
SELECT grp FROM inbox_groups WHERE name = ? LOCK IN SHARE MODE
