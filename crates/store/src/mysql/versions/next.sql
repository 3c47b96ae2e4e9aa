UPDATE inbox_versions SET version = ? WHERE scope = ? AND entity = ?
