//! Updates that carry a version: a stale one must not overwrite a newer one.
//!
//! A message may come late or again with an old price. Whoever applies it asks here first, in the transaction of the
//! update; `scope` is usually the consumer group, `entity` what the version is of.

use mysql_async::Error as Driver;
use mysql_async::prelude::Queryable;

/// Whether `version` of `entity` is newer than any that was applied; if so, it is the newest from now on.
///
/// # Errors
/// What the driver says.
///
/// # Cancel safety
/// A call that is dropped may have written the version into the transaction: roll it back.
pub async fn newer(
    connection: &mut impl Queryable,
    scope: &str,
    entity: &str,
    version: i64,
) -> Result<bool, Driver> {
    replace(connection, scope, entity, version, |newest| newest.is_none_or(|newest| newest < version)).await
}

/// Whether `expected` is the version of `entity` that was applied last (0: none); if so, it is `version` from now on.
///
/// # Errors
/// What the driver says.
///
/// # Cancel safety
/// As [`newer`].
pub async fn swap(
    connection: &mut impl Queryable,
    scope: &str,
    entity: &str,
    expected: i64,
    version: i64,
) -> Result<bool, Driver> {
    replace(connection, scope, entity, version, |newest| newest.unwrap_or(0) == expected).await
}

async fn replace(
    connection: &mut impl Queryable,
    scope: &str,
    entity: &str,
    version: i64,
    may: impl Fn(Option<i64>) -> bool + Send,
) -> Result<bool, Driver> {
    let entity = entity.as_bytes();
    connection.exec_drop(include_str!("versions/lock.sql"), (scope, entity)).await?;
    let newest: Option<Option<i64>> =
        connection.exec_first(include_str!("versions/newest.sql"), (scope, entity)).await?;
    if !may(newest.flatten()) {
        return Ok(false);
    }
    connection.exec_drop(include_str!("versions/next.sql"), (version, scope, entity)).await?;
    Ok(true)
}
