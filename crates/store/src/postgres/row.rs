//! Reading rows: the one place where columns meet fields.

use std::time::Duration;

use bytes::Bytes;
use chrono::{DateTime, Utc};
use message::{Message, MessageId, State, Status};
use tokio_postgres::Row;
use uuid::Uuid;

use super::error::Trouble;
use crate::Error;
use crate::column;

/// The columns that [`message`] reads, in order.
macro_rules! message_columns {
    () => {
        "e.id, e.topic, e.type, e.key, e.payload, e.content_type, e.headers::text, e.occurred_at"
    };
}
pub(super) use message_columns;

/// How many columns that is.
pub(super) const MESSAGE_COLUMNS: usize = 8;

/// Reads a message from [`message_columns`], the first of which is `column`.
pub(super) fn message(row: &Row, column: usize) -> Result<Message, Trouble> {
    Ok(Message {
        id: id(row, column)?,
        topic: row.try_get(column + 1)?,
        kind: row.try_get(column + 2)?,
        key: row.try_get(column + 3)?,
        payload: Bytes::copy_from_slice(row.try_get(column + 4)?),
        content_type: row.try_get(column + 5)?,
        headers: column::headers(row.try_get(column + 6)?),
        occurred_at: row.try_get(column + 7)?,
    })
}

pub(super) fn id(row: &Row, column: usize) -> Result<MessageId, Trouble> {
    Ok(MessageId(row.try_get::<_, Uuid>(column)?))
}

/// Groups in a column of JSON, read as text.
pub(super) fn groups(row: &Row, column: usize) -> Result<Option<Vec<String>>, Trouble> {
    Ok(row.try_get::<_, Option<&str>>(column)?.map(column::groups))
}

/// Reads the state from the columns status, attempts, crashes and `delivery_epoch`, starting at `column`.
pub(super) fn state(row: &Row, column: usize, in_flight: bool) -> Result<State, Trouble> {
    let word: &str = row.try_get(column)?;
    let rest: Status =
        word.parse().map_err(|_| Error::Broken(format!("`{word}` is no status of a record")))?;
    let number = |column| Ok::<_, Trouble>(u32::try_from(row.try_get::<_, i32>(column)?).unwrap_or(0));
    Ok(State {
        status: if in_flight { Status::InFlight } else { rest },
        rest,
        attempts: number(column + 1)?,
        crashes: number(column + 2)?,
        delivery: number(column + 3)?,
    })
}

/// A lane, or a slot, as the table has it.
pub(super) fn lane(row: &Row, column: usize) -> Result<u16, Trouble> {
    Ok(u16::try_from(row.try_get::<_, i16>(column)?).unwrap_or(0))
}

/// A number as the table has it.
pub(super) fn small(number: u16) -> i16 {
    i16::try_from(number).unwrap_or(i16::MAX)
}

/// A count as the table has it.
pub(super) fn count(number: u32) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}

/// A limit as a statement has it.
pub(super) fn limit(number: usize) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// From `earlier` to `later`; none if the clock was set back in between.
pub(super) fn between(earlier: DateTime<Utc>, later: DateTime<Utc>) -> Duration {
    (later - earlier).to_std().unwrap_or_default()
}

/// A moment after `now`, however far.
pub(super) fn after(now: DateTime<Utc>, wait: Duration) -> DateTime<Utc> {
    chrono::TimeDelta::from_std(wait).ok().and_then(|wait| now.checked_add_signed(wait)).unwrap_or(FAR)
}

/// A moment before `now`, however far.
pub(super) fn before(now: DateTime<Utc>, wait: Duration) -> DateTime<Utc> {
    chrono::TimeDelta::from_std(wait)
        .ok()
        .and_then(|wait| now.checked_sub_signed(wait))
        .unwrap_or_default()
        .max(LONG_AGO)
}

/// The bounds of what is stored: PostgreSQL's own are wider than anybody's plans.
const FAR: DateTime<Utc> = DateTime::from_timestamp(253_402_300_799, 0).expect("the year 9999");
const LONG_AGO: DateTime<Utc> = DateTime::from_timestamp(0, 0).expect("the year 1970");
