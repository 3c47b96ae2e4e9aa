//! For applications that use sqlx: the same writes, in their own transaction.
//!
//! The functions take any connection of sqlx's: `&mut *transaction` makes the message part of it.

use message::{Message, MessageId};
use sqlx::{PgConnection, Row};

use crate::column::{MOST_MARKS, by_id, digest, groups_json, headers_json};
use crate::{Arrival, NewMessage};

/// Writes a message in the caller's transaction: it exists if and when that commits.
///
/// # Errors
/// What sqlx says; a message whose id is taken violates `outbox_id`.
///
/// # Cancel safety
/// A call that is dropped may have written the message into the transaction: roll it back.
pub async fn append(connection: &mut PgConnection, message: &Message) -> Result<(), sqlx::Error> {
    append_for(connection, &NewMessage::from(message.clone())).await
}

/// Like [`append`], naming the groups that must acknowledge. `once` is not looked at: the caller's own
/// transaction decides whether it writes.
///
/// # Errors
/// As [`append`].
///
/// # Cancel safety
/// As [`append`].
pub async fn append_for(connection: &mut PgConnection, new: &NewMessage) -> Result<(), sqlx::Error> {
    let message = &new.message;
    sqlx::query(include_str!("append.sql"))
        .bind(message.id.to_string())
        .bind(&message.topic)
        .bind(&message.kind)
        .bind(&message.key)
        .bind(&message.payload[..])
        .bind(&message.content_type)
        .bind(headers_json(message))
        .bind(message.occurred_at.to_rfc3339())
        .bind(new.ack_groups.as_deref().map(groups_json))
        .execute(connection)
        .await?;
    Ok(())
}

/// Marks `arrival` as done by `group` in the caller's transaction. `false`: it was done before, so do nothing.
///
/// Of two transactions that try at the same time one waits for the other, and hears `false` if that commits.
///
/// # Errors
/// What sqlx says.
///
/// # Cancel safety
/// A call that is dropped may have made the mark in the transaction: roll it back.
pub async fn once(
    connection: &mut PgConnection,
    group: &str,
    arrival: &Arrival,
) -> Result<bool, sqlx::Error> {
    let message = &arrival.message;
    sqlx::query(include_str!("once.sql"))
        .bind(group)
        .bind(message.id.to_string())
        .bind(digest(arrival))
        .bind(&message.topic)
        .bind(&message.key)
        .bind(arrival.seq)
        .fetch_one(connection)
        .await?
        .try_get(0)
}

/// Marks all of these as done by `group` in the caller's transaction. `false`: some were done before, the group has never
/// marked anything, or there are more than 8,192; roll back, and use [`once`].
///
/// # Errors
/// What sqlx says.
///
/// # Cancel safety
/// As [`once`].
pub async fn once_all(
    connection: &mut PgConnection,
    group: &str,
    arrivals: &[&Arrival],
) -> Result<bool, sqlx::Error> {
    if arrivals.len() > MOST_MARKS {
        return Ok(false);
    }
    let ids = |arrivals: &[&Arrival]| -> Vec<String> {
        arrivals.iter().map(|arrival| arrival.message.id.to_string()).collect()
    };
    let sorted = by_id(arrivals);
    let marked: i64 = sqlx::query_scalar(include_str!("once_all.sql"))
        .bind(group)
        .bind(ids(&sorted))
        .bind(sorted.iter().map(|arrival| digest(arrival)).collect::<Vec<_>>())
        .bind(sorted.iter().map(|arrival| arrival.message.topic.as_str()).collect::<Vec<_>>())
        .bind(sorted.iter().map(|arrival| arrival.message.key.as_deref()).collect::<Vec<_>>())
        .bind(sorted.iter().map(|arrival| arrival.seq).collect::<Vec<_>>())
        .bind(ids(arrivals))
        .fetch_one(connection)
        .await?;
    Ok(usize::try_from(marked) == Ok(arrivals.len()))
}

/// Acknowledges a message to its producer in the caller's transaction, when both share this database. What was
/// never sent, or asks other groups only, is left as it is.
///
/// # Errors
/// What sqlx says.
///
/// # Cancel safety
/// A call that is dropped may have written the acknowledgement into the transaction: roll it back.
pub async fn acknowledge(
    connection: &mut PgConnection,
    group: &str,
    id: MessageId,
) -> Result<(), sqlx::Error> {
    sqlx::query(include_str!("acknowledge.sql")).bind(group).bind(id.to_string()).execute(connection).await?;
    Ok(())
}

/// Whether `version` of `entity` is newer than any that was applied in `scope`; if so, it is the newest from now on.
/// Ask in the transaction of the update: a stale message then leaves nothing behind.
///
/// # Errors
/// What sqlx says.
///
/// # Cancel safety
/// A call that is dropped may have written the version into the transaction: roll it back.
pub async fn newer(
    connection: &mut PgConnection,
    scope: &str,
    entity: &str,
    version: i64,
) -> Result<bool, sqlx::Error> {
    let query = sqlx::query("SELECT postrider_newer($1, $2, $3)").bind(scope).bind(entity).bind(version);
    query.fetch_one(connection).await?.try_get(0)
}

/// Whether `expected` is the version of `entity` that was applied last in `scope` (0: none); if so, it is `version`
/// from now on.
///
/// # Errors
/// What sqlx says.
///
/// # Cancel safety
/// As [`newer`].
pub async fn swap(
    connection: &mut PgConnection,
    scope: &str,
    entity: &str,
    expected: i64,
    version: i64,
) -> Result<bool, sqlx::Error> {
    let query = sqlx::query("SELECT postrider_swap($1, $2, $3, $4)").bind(scope).bind(entity);
    query.bind(expected).bind(version).fetch_one(connection).await?.try_get(0)
}
