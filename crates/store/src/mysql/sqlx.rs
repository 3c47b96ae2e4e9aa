//! For applications that use sqlx: the same writes, in their own transaction.
//!
//! The functions take any connection of sqlx's: `&mut *transaction` makes the message part of it.

use std::time::Duration;

use message::{Message, MessageId};
use sqlx::{MySql, MySqlConnection, QueryBuilder};

use super::row::at_text;
use crate::column::{MOST_MARKS, by_id, digest, groups_json, headers_json};
use crate::{Arrival, Latency, NewMessage};

/// Writes a message in the caller's transaction: it exists if and when that commits.
///
/// # Errors
/// What sqlx says; a message whose id is taken violates `outbox_id`.
///
/// # Cancel safety
/// A call that is dropped may have written the message into the transaction: roll it back.
pub async fn append(connection: &mut MySqlConnection, message: &Message) -> Result<(), sqlx::Error> {
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
pub async fn append_for(connection: &mut MySqlConnection, new: &NewMessage) -> Result<(), sqlx::Error> {
    let message = &new.message;
    sqlx::query(include_str!("append.sql"))
        .bind(message.id.to_string())
        .bind(&message.topic)
        .bind(&message.kind)
        .bind(&message.key)
        .bind(&message.payload[..])
        .bind(&message.content_type)
        .bind(headers_json(message))
        .bind(at_text(message.occurred_at.timestamp_millis()))
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
    connection: &mut MySqlConnection,
    group: &str,
    arrival: &Arrival,
) -> Result<bool, sqlx::Error> {
    let number = group_number(connection, group).await?;
    let message = &arrival.message;
    let marked = sqlx::query(include_str!("once/mark.sql"))
        .bind(number)
        .bind(message.id.to_string())
        .bind(digest(arrival))
        .bind(&message.topic)
        .bind(&message.key)
        .bind(arrival.seq)
        .execute(&mut *connection)
        .await?
        .rows_affected()
        == 1;
    count(connection, number, i64::from(marked), i64::from(!marked)).await?;
    Ok(marked)
}

/// Marks all of these as done by `group` in the caller's transaction. `false`: some were done before, or there are more
/// than 8,192; roll back, and use [`once`].
///
/// # Errors
/// What sqlx says.
///
/// # Cancel safety
/// As [`once`].
pub async fn once_all(
    connection: &mut MySqlConnection,
    group: &str,
    arrivals: &[&Arrival],
) -> Result<bool, sqlx::Error> {
    if arrivals.is_empty() || arrivals.len() > MOST_MARKS {
        return Ok(arrivals.is_empty());
    }
    let number = group_number(connection, group).await?;
    let mut marks = QueryBuilder::<MySql>::new(
        "INSERT IGNORE INTO inbox_ids (grp, id, digest, topic, `key`, seq, processed_at) ",
    );
    marks.push_values(by_id(arrivals), |mut mark, arrival| {
        let message = &arrival.message;
        mark.push_bind(number)
            .push_bind(message.id.to_string())
            .push_bind(digest(arrival))
            .push_bind(&message.topic)
            .push_bind(&message.key)
            .push_bind(arrival.seq)
            .push("utc_timestamp(3)");
    });
    let marked = marks.build().execute(&mut *connection).await?.rows_affected();
    count(connection, number, i64::try_from(marked).unwrap_or(i64::MAX), 0).await?;
    Ok(marked == arrivals.len() as u64)
}

/// The number of a group, which gets one on first use.
async fn group_number(connection: &mut MySqlConnection, group: &str) -> Result<i64, sqlx::Error> {
    let find = sqlx::query_scalar(include_str!("once/group.sql")).bind(group);
    if let Some(number) = find.fetch_optional(&mut *connection).await? {
        return Ok(number);
    }
    sqlx::query(include_str!("once/new_group.sql")).bind(group).execute(&mut *connection).await?;
    sqlx::query_scalar(include_str!("once/made_group.sql")).bind(group).fetch_one(connection).await
}

async fn count(
    connection: &mut MySqlConnection,
    group: i64,
    processed: i64,
    duplicates: i64,
) -> Result<(), sqlx::Error> {
    let count = sqlx::query(include_str!("once/count.sql")).bind(group).bind(processed).bind(duplicates);
    count.execute(connection).await.map(drop)
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
    connection: &mut MySqlConnection,
    group: &str,
    id: MessageId,
) -> Result<(), sqlx::Error> {
    let asked = sqlx::query_as(include_str!("acknowledge/asked.sql")).bind(id.to_string()).bind(group);
    let found: Option<(i64, i64)> = asked.fetch_optional(&mut *connection).await?;
    let Some((seq, waited)) = found else { return Ok(()) };
    let write = sqlx::query(include_str!("acknowledge/one.sql")).bind(seq).bind(group);
    if write.execute(&mut *connection).await?.rows_affected() == 1 {
        let done = sqlx::query(include_str!("acknowledge/one_done.sql")).bind(group).bind(seq);
        done.execute(&mut *connection).await?;
        sqlx::query(include_str!("acknowledge/count.sql")).execute(&mut *connection).await?;
        let bucket = Latency::bucket(Duration::from_millis(waited.unsigned_abs())) as u64;
        let wait = sqlx::query(include_str!("acknowledge/wait.sql")).bind(bucket).bind(waited);
        wait.execute(connection).await?;
    }
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
    connection: &mut MySqlConnection,
    scope: &str,
    entity: &str,
    version: i64,
) -> Result<bool, sqlx::Error> {
    replace(connection, scope, entity, version, |newest| newest.is_none_or(|newest| newest < version)).await
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
    connection: &mut MySqlConnection,
    scope: &str,
    entity: &str,
    expected: i64,
    version: i64,
) -> Result<bool, sqlx::Error> {
    replace(connection, scope, entity, version, |newest| newest.unwrap_or(0) == expected).await
}

async fn replace(
    connection: &mut MySqlConnection,
    scope: &str,
    entity: &str,
    version: i64,
    may: impl Fn(Option<i64>) -> bool + Send,
) -> Result<bool, sqlx::Error> {
    let entity = entity.as_bytes();
    let lock = sqlx::query(include_str!("versions/lock.sql")).bind(scope).bind(entity);
    lock.execute(&mut *connection).await?;
    let newest = sqlx::query_scalar(include_str!("versions/newest.sql")).bind(scope).bind(entity);
    let newest: Option<Option<i64>> = newest.fetch_optional(&mut *connection).await?;
    if !may(newest.flatten()) {
        return Ok(false);
    }
    let next = sqlx::query(include_str!("versions/next.sql")).bind(version).bind(scope).bind(entity);
    next.execute(connection).await?;
    Ok(true)
}
