//! For applications that use sqlx: the same writes, in their own transaction.
//!
//! The functions take any connection of sqlx's: `&mut *transaction` makes the message part of it.

use message::{Message, MessageId};
use sqlx::SqliteConnection;

use crate::column::{digest, groups_json, headers_json};
use crate::{Arrival, NewMessage};

/// Writes a message in the caller's transaction: it exists if and when that commits.
///
/// # Errors
/// What sqlx says; a message whose id is taken violates `outbox_id`.
///
/// # Cancel safety
/// A call that is dropped may have written the message into the transaction: roll it back.
pub async fn append(connection: &mut SqliteConnection, message: &Message) -> Result<(), sqlx::Error> {
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
pub async fn append_for(connection: &mut SqliteConnection, new: &NewMessage) -> Result<(), sqlx::Error> {
    let message = &new.message;
    sqlx::query(include_str!("append.sql"))
        .bind(message.id.to_string())
        .bind(&message.topic)
        .bind(&message.kind)
        .bind(&message.key)
        .bind(&message.payload[..])
        .bind(&message.content_type)
        .bind(headers_json(message))
        .bind(message.occurred_at.timestamp_millis())
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
    connection: &mut SqliteConnection,
    group: &str,
    arrival: &Arrival,
) -> Result<bool, sqlx::Error> {
    know(connection, group).await?;
    let marked = mark(connection, group, arrival).await?;
    count(connection, group, i64::from(marked), i64::from(!marked)).await?;
    Ok(marked)
}

/// Marks all of these as done by `group` in the caller's transaction. `false`: some were done before; roll back, and use
/// [`once`].
///
/// # Errors
/// What sqlx says.
///
/// # Cancel safety
/// As [`once`].
pub async fn once_all(
    connection: &mut SqliteConnection,
    group: &str,
    arrivals: &[&Arrival],
) -> Result<bool, sqlx::Error> {
    know(connection, group).await?;
    for arrival in arrivals {
        if !mark(connection, group, arrival).await? {
            return Ok(false);
        }
    }
    count(connection, group, i64::try_from(arrivals.len()).unwrap_or(i64::MAX), 0).await?;
    Ok(true)
}

async fn know(connection: &mut SqliteConnection, group: &str) -> Result<(), sqlx::Error> {
    let know = sqlx::query("INSERT INTO inbox_groups (name) VALUES (?1) ON CONFLICT DO NOTHING");
    know.bind(group).execute(connection).await.map(drop)
}

async fn mark(
    connection: &mut SqliteConnection,
    group: &str,
    arrival: &Arrival,
) -> Result<bool, sqlx::Error> {
    let message = &arrival.message;
    let marked = sqlx::query(
        "INSERT INTO inbox_ids (grp, id, digest, topic, key, seq, processed_at)
         SELECT grp, ?2, ?3, ?4, ?5, ?6, CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)
         FROM inbox_groups WHERE name = ?1
         ON CONFLICT (grp, id) DO NOTHING",
    )
    .bind(group)
    .bind(message.id.to_string())
    .bind(digest(arrival))
    .bind(&message.topic)
    .bind(&message.key)
    .bind(arrival.seq)
    .execute(connection)
    .await?;
    Ok(marked.rows_affected() == 1)
}

async fn count(
    connection: &mut SqliteConnection,
    group: &str,
    processed: i64,
    duplicates: i64,
) -> Result<(), sqlx::Error> {
    let count =
        "UPDATE inbox_groups SET processed = processed + ?2, duplicates = duplicates + ?3 WHERE name = ?1";
    sqlx::query(count).bind(group).bind(processed).bind(duplicates).execute(connection).await.map(drop)
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
    connection: &mut SqliteConnection,
    group: &str,
    id: MessageId,
) -> Result<(), sqlx::Error> {
    let new = sqlx::query(
        "INSERT INTO outbox_acknowledgements (seq, grp, acknowledged_at)
         SELECT seq, ?1, CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)
         FROM outbox_events e WHERE id = ?2
         AND (ack_groups IS NULL OR ?1 IN (SELECT value FROM json_each(e.ack_groups)))
         AND (status = 'sent'
              OR status IN ('pending', 'failed') AND (attempts > 0 OR crashes > 0 OR last_error IS NOT NULL)
              OR EXISTS (SELECT 1 FROM outbox_batches b, json_each(b.seqs) j WHERE j.value = e.seq))
         ON CONFLICT DO NOTHING",
    )
    .bind(group)
    .bind(id.to_string())
    .execute(&mut *connection)
    .await?
    .rows_affected();
    if new == 1 {
        sqlx::query("DELETE FROM outbox_unacknowledged WHERE grp = ?1 AND seq = (SELECT seq FROM outbox_events WHERE id = ?2)")
            .bind(group)
            .bind(id.to_string())
            .execute(&mut *connection)
            .await?;
        sqlx::query("UPDATE outbox_counters SET acknowledged_total = acknowledged_total + 1")
            .execute(connection)
            .await?;
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
    connection: &mut SqliteConnection,
    scope: &str,
    entity: &str,
    version: i64,
) -> Result<bool, sqlx::Error> {
    let query = sqlx::query(include_str!("newer.sql")).bind(scope).bind(entity).bind(version);
    Ok(query.execute(connection).await?.rows_affected() == 1)
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
    connection: &mut SqliteConnection,
    scope: &str,
    entity: &str,
    expected: i64,
    version: i64,
) -> Result<bool, sqlx::Error> {
    let query = sqlx::query(include_str!("swap.sql")).bind(scope).bind(entity).bind(expected).bind(version);
    Ok(query.execute(connection).await?.rows_affected() == 1)
}
