-- A version that is missing is refused by the table: no update is skipped for lack of one.
INSERT INTO inbox_versions (scope, entity, version) SELECT ?1, ?2, iif(?3 IS NULL, NULL, ?4)
WHERE coalesce(?3 = coalesce((SELECT version FROM inbox_versions WHERE scope = ?1 AND entity = ?2), 0), true)
ON CONFLICT DO UPDATE SET version = excluded.version
