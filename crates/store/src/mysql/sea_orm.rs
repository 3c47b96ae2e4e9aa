//! For applications that use sea-orm: the same write, in their own transaction.

use message::Message;
use sea_orm::{ConnectionTrait, DbBackend, DbErr, Statement, Value};

use super::row::at_text;
use crate::NewMessage;
use crate::column::{groups_json, headers_json};

/// Writes a message through the caller's transaction: it exists if and when that commits.
///
/// # Errors
/// What sea-orm says; a message whose id is taken violates `outbox_id`.
///
/// # Cancel safety
/// A call that is dropped may have written the message into the transaction: roll it back.
pub async fn append(connection: &impl ConnectionTrait, message: &Message) -> Result<(), DbErr> {
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
pub async fn append_for(connection: &impl ConnectionTrait, new: &NewMessage) -> Result<(), DbErr> {
    let message = &new.message;
    let values: [Value; 9] = [
        message.id.to_string().into(),
        message.topic.clone().into(),
        message.kind.clone().into(),
        message.key.clone().into(),
        message.payload.to_vec().into(),
        message.content_type.clone().into(),
        headers_json(message).into(),
        at_text(message.occurred_at.timestamp_millis()).into(),
        new.ack_groups.as_deref().map(groups_json).into(),
    ];
    let insert = Statement::from_sql_and_values(DbBackend::MySql, include_str!("append.sql"), values);
    connection.execute_raw(insert).await?;
    Ok(())
}
