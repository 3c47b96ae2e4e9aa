//! Updates that carry a version: a stale one must not overwrite a newer one.
//!
//! A message may come late or again with an old price. Whoever applies it asks here first, in the transaction of the
//! update; `scope` is usually the consumer group, `entity` what the version is of.

use rusqlite::{Connection, params};

/// Whether `version` of `entity` is newer than any that was applied; if so, it is the newest from now on.
///
/// # Errors
/// What SQLite says.
pub fn newer(connection: &Connection, scope: &str, entity: &str, version: i64) -> rusqlite::Result<bool> {
    let changed =
        connection.prepare_cached(include_str!("newer.sql"))?.execute(params![scope, entity, version])?;
    Ok(changed == 1)
}

/// Whether `expected` is the version of `entity` that was applied last (0: none); if so, it is `version` from now on.
///
/// # Errors
/// What SQLite says.
pub fn swap(
    connection: &Connection,
    scope: &str,
    entity: &str,
    expected: i64,
    version: i64,
) -> rusqlite::Result<bool> {
    let changed = connection
        .prepare_cached(include_str!("swap.sql"))?
        .execute(params![scope, entity, expected, version])?;
    Ok(changed == 1)
}
