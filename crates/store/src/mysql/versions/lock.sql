-- Makes the row, or locks it as it is: two who ask at the same time wait for each other instead of locking each other out.
INSERT INTO inbox_versions (scope, entity) VALUES (?, ?) ON DUPLICATE KEY UPDATE version = version
