//! Reading rows and the clock: the one place where columns meet fields.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use chrono::{DateTime, Utc};
use message::{Message, MessageId, State, Status};
use rusqlite::types::{Type, ValueRef};
use rusqlite::{Connection, Row};
use serde_json::Value;

/// The columns that [`message`] reads, in order.
macro_rules! message_columns {
    () => {
        "id, topic, type, key, payload, content_type, headers, occurred_at"
    };
}
pub(super) use message_columns;

/// How many columns that is.
pub(super) const MESSAGE_COLUMNS: usize = 8;

/// The store's clock, in milliseconds since 1970.
pub(super) fn now(connection: &Connection) -> rusqlite::Result<i64> {
    connection
        .prepare_cached("SELECT CAST(unixepoch('now', 'subsec') * 1000 AS INTEGER)")?
        .query_row([], |row| row.get(0))
}

pub(super) fn time(millis: i64) -> DateTime<Utc> {
    DateTime::from_timestamp_millis(millis).unwrap_or_default()
}

/// From `earlier` to `later`; none if the clock was set back in between.
pub(super) fn between(earlier: i64, later: i64) -> Duration {
    Duration::from_millis(u64::try_from(later.saturating_sub(earlier)).unwrap_or(0))
}

pub(super) fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX / 4)
}

/// Reads a message from [`message_columns`].
pub(super) fn message(row: &Row<'_>) -> rusqlite::Result<Message> {
    Ok(Message {
        id: id(row, 0)?,
        topic: text(row, 1)?,
        kind: optional_text(row, 2)?,
        key: optional_text(row, 3)?,
        payload: payload(row.get_ref(4)?),
        content_type: text(row, 5)?,
        headers: headers(row, 6)?,
        occurred_at: time(row.get(7)?),
    })
}

pub(super) fn id(row: &Row<'_>, column: usize) -> rusqlite::Result<MessageId> {
    row.get_ref(column)?.as_str()?.parse().map_err(|error| bad(column, error))
}

/// Text as it is, or nearly: a plain-SQL writer may have stored bytes that are no UTF-8, and one such row
/// must not stop a relay.
pub(super) fn text(row: &Row<'_>, column: usize) -> rusqlite::Result<String> {
    Ok(String::from_utf8_lossy(row.get_ref(column)?.as_bytes()?).into_owned())
}

pub(super) fn optional_text(row: &Row<'_>, column: usize) -> rusqlite::Result<Option<String>> {
    match row.get_ref(column)? {
        ValueRef::Null => Ok(None),
        _ => text(row, column).map(Some),
    }
}

/// A plain-SQL writer may have given text, a number or bytes.
fn payload(value: ValueRef<'_>) -> Bytes {
    match value {
        ValueRef::Text(bytes) | ValueRef::Blob(bytes) => Bytes::copy_from_slice(bytes),
        ValueRef::Integer(number) => number.to_string().into(),
        ValueRef::Real(number) => number.to_string().into(),
        ValueRef::Null => Bytes::new(),
    }
}

/// Stands for headers that cannot be read. No header of a writer has this name: a space is not allowed in one.
pub(super) const UNREADABLE: &str = "unreadable headers";

/// A plain-SQL writer may have given headers that are not all strings: those are shown as JSON. What SQLite takes
/// for JSON and we cannot read (a lone surrogate, say) is shown as it stands, and is never sent.
fn headers(row: &Row<'_>, column: usize) -> rusqlite::Result<BTreeMap<String, String>> {
    let json = text(row, column)?;
    if json == "{}" {
        return Ok(BTreeMap::new());
    }
    Ok(match serde_json::from_str::<BTreeMap<String, Value>>(&json) {
        Ok(values) => values.into_iter().map(|(name, value)| (name, plain(value))).collect(),
        Err(_) => BTreeMap::from([(UNREADABLE.to_owned(), json)]),
    })
}

pub(super) fn groups(row: &Row<'_>, column: usize) -> rusqlite::Result<Option<Vec<String>>> {
    let Some(json) = optional_text(row, column)? else { return Ok(None) };
    // Groups that cannot be read are nobody: the message itself must go on.
    let values: Vec<Value> = serde_json::from_str(&json).unwrap_or_default();
    Ok(Some(values.into_iter().map(plain).collect()))
}

fn plain(value: Value) -> String {
    match value {
        Value::String(text) => text,
        other => other.to_string(),
    }
}

pub(super) fn headers_json(message: &Message) -> String {
    if message.headers.is_empty() {
        return "{}".to_owned();
    }
    serde_json::to_string(&message.headers).expect("a map of strings is JSON")
}

pub(super) fn groups_json(groups: &[String]) -> String {
    serde_json::to_string(groups).expect("a list of strings is JSON")
}

/// The word for a status in the table. In flight has none: it is a fact about batches.
pub(super) fn word(status: Status) -> &'static str {
    match status {
        Status::Pending | Status::InFlight => "pending",
        Status::Sent => "sent",
        Status::Failed => "failed",
        Status::Dead => "dead",
    }
}

/// Reads the state from the columns status, attempts, crashes and `delivery_epoch`, starting at `column`.
pub(super) fn state(row: &Row<'_>, column: usize, in_flight: bool) -> rusqlite::Result<State> {
    let rest = row.get_ref(column)?.as_str()?.parse::<Status>().map_err(|error| bad(column, error))?;
    Ok(State {
        status: if in_flight { Status::InFlight } else { rest },
        rest,
        attempts: row.get(column + 1)?,
        crashes: row.get(column + 2)?,
        delivery: row.get(column + 3)?,
    })
}

fn bad(column: usize, error: impl std::error::Error + Send + Sync + 'static) -> rusqlite::Error {
    rusqlite::Error::FromSqlConversionFailure(column, Type::Text, Box::new(error))
}
