//! Writing messages: in a shared transaction of ours, or in one of the application's.

use async_trait::async_trait;
use message::{Message, MessageId, check_topic};
use rusqlite::{Connection, ErrorCode, OptionalExtension, params};

use super::SqliteStore;
use super::row::{id, now};
use crate::column::{groups_json, headers_json};
use crate::{Append, Appended, Error, NewMessage, Once, Turned};

#[async_trait]
impl Append for SqliteStore {
    async fn append(&self, messages: Vec<NewMessage>) -> Result<Vec<Result<Appended, Turned>>, Error> {
        let results = self
            .file
            .write(move |connection| {
                messages.iter().map(|new| store(connection, new)).collect::<Result<Vec<_>, Error>>()
            })
            .await?;
        self.ring();
        Ok(results)
    }
}

/// Writes `message` in the transaction that is open on `connection`, for applications that use rusqlite.
///
/// # Errors
/// What SQLite says; a message whose id is taken violates `outbox_id`.
pub fn append(connection: &Connection, message: &Message) -> rusqlite::Result<()> {
    insert(connection, message, None)
}

/// Writes a message that a settlement carries. One whose id is taken is there already.
pub(super) fn beside(connection: &Connection, message: &Message) -> Result<(), Error> {
    match store(connection, &NewMessage::from(message.clone()))? {
        Ok(_) | Err(Turned::IdTaken(_)) => Ok(()),
        Err(turned) => Err(Error::Refused(turned.to_string())),
    }
}

fn store(connection: &Connection, new: &NewMessage) -> Result<Result<Appended, Turned>, Error> {
    if let Err(invalid) = check_topic(&new.message.topic) {
        return Ok(Err(invalid.into()));
    }
    if let Some(once) = &new.once
        && let Some(earlier) = remember(connection, once, new.message.id)?
    {
        return Ok(earlier);
    }
    let groups = new.ack_groups.as_deref().map(groups_json);
    match insert(connection, &new.message, groups) {
        Ok(()) => Ok(Ok(Appended::New(new.message.id))),
        Err(error) if error.sqlite_error_code() == Some(ErrorCode::ConstraintViolation) && taken(&error) => {
            if let Some(once) = &new.once {
                connection.execute("DELETE FROM outbox_idempotency_keys WHERE key = ?1", [&once.key])?;
            }
            Ok(Err(Turned::IdTaken(new.message.id)))
        }
        Err(error) => Err(error.into()),
    }
}

fn taken(error: &rusqlite::Error) -> bool {
    error.to_string().contains("outbox_events.id")
}

/// Takes the key for `id`, or says what it was taken for before.
fn remember(
    connection: &Connection,
    once: &Once,
    message: MessageId,
) -> Result<Option<Result<Appended, Turned>>, Error> {
    let inserted = connection
        .prepare_cached(
            "INSERT INTO outbox_idempotency_keys (key, fingerprint, message_id, created_at) VALUES (?1, ?2, ?3, ?4)
             ON CONFLICT (key) DO NOTHING",
        )?
        .execute(params![once.key, once.fingerprint, message.to_string(), now(connection)?])?;
    if inserted == 1 {
        return Ok(None);
    }
    let earlier = connection
        .prepare_cached("SELECT message_id, fingerprint = ?2 FROM outbox_idempotency_keys WHERE key = ?1")?
        .query_row(params![once.key, once.fingerprint], |row| Ok((id(row, 0)?, row.get::<_, bool>(1)?)))
        .optional()?;
    Ok(earlier.map(|(id, same)| if same { Ok(Appended::Repeated(id)) } else { Err(Turned::KeyTaken) }))
}

fn insert(connection: &Connection, message: &Message, groups: Option<String>) -> rusqlite::Result<()> {
    connection.prepare_cached(include_str!("append.sql"))?.execute(params![
        message.id.to_string(),
        message.topic,
        message.kind,
        message.key,
        &message.payload[..],
        message.content_type,
        headers_json(message),
        message.occurred_at.timestamp_millis(),
        groups,
    ])?;
    Ok(())
}
