//! Reading rows and the clock: the one place where columns meet fields.

use bytes::Bytes;
use message::{Message, MessageId, State, Status};
use rusqlite::types::{Type, ValueRef};
use rusqlite::{Connection, Row};

use crate::column::{headers, time};

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

/// Reads a message from [`message_columns`].
pub(super) fn message(row: &Row<'_>) -> rusqlite::Result<Message> {
    Ok(Message {
        id: id(row, 0)?,
        topic: text(row, 1)?,
        kind: optional_text(row, 2)?,
        key: optional_text(row, 3)?,
        payload: payload(row.get_ref(4)?),
        content_type: text(row, 5)?,
        headers: headers(&text(row, 6)?),
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

pub(super) fn groups(row: &Row<'_>, column: usize) -> rusqlite::Result<Option<Vec<String>>> {
    Ok(optional_text(row, column)?.as_deref().map(crate::column::groups))
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
