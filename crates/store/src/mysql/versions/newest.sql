SELECT version FROM inbox_versions WHERE scope = ? AND entity = ? FOR UPDATE
