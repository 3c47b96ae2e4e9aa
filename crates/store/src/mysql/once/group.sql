SELECT grp FROM inbox_groups WHERE name = ?
