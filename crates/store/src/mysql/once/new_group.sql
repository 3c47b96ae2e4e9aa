INSERT IGNORE INTO inbox_groups (name) VALUES (?)
