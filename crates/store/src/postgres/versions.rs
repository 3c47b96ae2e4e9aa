//! Updates that carry a version: a stale one must not overwrite a newer one.
//!
//! A message may come late or again with an old price. Whoever applies it asks here first, in the transaction of the
//! update; `scope` is usually the consumer group, `entity` what the version is of.

use tokio_postgres::types::Type;
use tokio_postgres::{Error as Driver, GenericClient};

/// Whether `version` of `entity` is newer than any that was applied; if so, it is the newest from now on.
///
/// # Errors
/// What the driver says.
///
/// # Cancel safety
/// A call that is dropped may have written the version into the transaction: roll it back.
pub async fn newer(
    client: &impl GenericClient,
    scope: &str,
    entity: &str,
    version: i64,
) -> Result<bool, Driver> {
    let parameters = [(&scope as _, Type::TEXT), (&entity as _, Type::TEXT), (&version as _, Type::INT8)];
    client.query_typed_one("SELECT postrider_newer($1, $2, $3)", &parameters).await?.try_get(0)
}

/// Whether `expected` is the version of `entity` that was applied last (0: none); if so, it is `version` from now on.
///
/// # Errors
/// What the driver says.
///
/// # Cancel safety
/// As [`newer`].
pub async fn swap(
    client: &impl GenericClient,
    scope: &str,
    entity: &str,
    expected: i64,
    version: i64,
) -> Result<bool, Driver> {
    let parameters = [
        (&scope as _, Type::TEXT),
        (&entity as _, Type::TEXT),
        (&expected as _, Type::INT8),
        (&version as _, Type::INT8),
    ];
    client.query_typed_one("SELECT postrider_swap($1, $2, $3, $4)", &parameters).await?.try_get(0)
}
