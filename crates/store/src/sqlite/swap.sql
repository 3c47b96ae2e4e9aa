INSERT INTO inbox_versions (scope, entity, version) SELECT ?1, ?2, ?4
WHERE ?3 = coalesce((SELECT version FROM inbox_versions WHERE scope = ?1 AND entity = ?2), 0)
ON CONFLICT DO UPDATE SET version = excluded.version
