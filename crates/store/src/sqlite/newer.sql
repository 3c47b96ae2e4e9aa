INSERT INTO inbox_versions (scope, entity, version) VALUES (?1, ?2, ?3)
ON CONFLICT DO UPDATE SET version = excluded.version WHERE version < excluded.version
