//! Reading rows and writing values: the one place where columns meet fields.

use bytes::Bytes;
use chrono::{DateTime, Datelike, NaiveDate, NaiveDateTime, Timelike, Utc};
use message::{Message, MessageId, State, Status};
use mysql_async::{FromValueError, Row, Value, from_value_opt};

use crate::Error;
use crate::column::{headers, time};

/// The columns that [`Read::message`] reads, in order.
macro_rules! message_columns {
    () => {
        "id, topic, `type`, `key`, payload, content_type, headers, occurred_at"
    };
}
pub(super) use message_columns;

/// How many columns that is.
pub(super) const MESSAGE_COLUMNS: usize = 8;

/// Times as they are read from a text.
const TIME: &str = "%Y-%m-%d %H:%M:%S%.f";

/// Taking fields from a row. Each can be taken once.
pub(super) trait Read {
    fn value(&mut self, column: usize) -> Result<Value, Error>;

    fn text(&mut self, column: usize) -> Result<String, Error> {
        self.optional_text(column)?.ok_or_else(|| bad(column, "no text"))
    }

    /// Text as it is, or nearly: one row with bytes that are no UTF-8 must not stop a relay.
    fn optional_text(&mut self, column: usize) -> Result<Option<String>, Error> {
        match self.value(column)? {
            Value::NULL => Ok(None),
            Value::Bytes(bytes) => Ok(Some(match String::from_utf8(bytes) {
                Ok(text) => text,
                Err(error) => String::from_utf8_lossy(error.as_bytes()).into_owned(),
            })),
            _ => Err(bad(column, "no text")),
        }
    }

    fn bytes(&mut self, column: usize) -> Result<Vec<u8>, Error> {
        match self.value(column)? {
            Value::Bytes(bytes) => Ok(bytes),
            _ => Err(bad(column, "no bytes")),
        }
    }

    fn number(&mut self, column: usize) -> Result<i64, Error> {
        self.optional_number(column)?.ok_or_else(|| bad(column, "no number"))
    }

    fn optional_number(&mut self, column: usize) -> Result<Option<i64>, Error> {
        let number: Result<Option<i64>, FromValueError> = from_value_opt(self.value(column)?);
        number.map_err(|_| bad(column, "no number"))
    }

    /// A number that cannot be negative and fits where it goes.
    fn small<T: TryFrom<i64>>(&mut self, column: usize) -> Result<T, Error> {
        T::try_from(self.number(column)?).map_err(|_| bad(column, "a number out of its range"))
    }

    fn flag(&mut self, column: usize) -> Result<bool, Error> {
        Ok(self.number(column)? != 0)
    }

    /// A time, in milliseconds since 1970.
    fn millis(&mut self, column: usize) -> Result<i64, Error> {
        self.optional_millis(column)?.ok_or_else(|| bad(column, "no time"))
    }

    fn optional_millis(&mut self, column: usize) -> Result<Option<i64>, Error> {
        let found = match self.value(column)? {
            Value::NULL => return Ok(None),
            Value::Date(year, month, day, hour, minute, second, micros) => {
                NaiveDate::from_ymd_opt(i32::from(year), u32::from(month), u32::from(day)).and_then(|date| {
                    date.and_hms_micro_opt(u32::from(hour), u32::from(minute), u32::from(second), micros)
                })
            }
            Value::Bytes(text) => std::str::from_utf8(&text)
                .ok()
                .and_then(|text| NaiveDateTime::parse_from_str(text, TIME).ok()),
            _ => None,
        };
        found.map(|time| Some(time.and_utc().timestamp_millis())).ok_or_else(|| bad(column, "no time"))
    }

    fn optional_time(&mut self, column: usize) -> Result<Option<DateTime<Utc>>, Error> {
        Ok(self.optional_millis(column)?.map(time))
    }

    fn id(&mut self, column: usize) -> Result<MessageId, Error> {
        self.text(column)?.parse().map_err(|_| bad(column, "no id"))
    }

    fn groups(&mut self, column: usize) -> Result<Option<Vec<String>>, Error> {
        Ok(self.optional_text(column)?.as_deref().map(crate::column::groups))
    }

    /// Reads the state from the columns status, attempts, crashes and `delivery_epoch`, starting at `column`.
    fn state(&mut self, column: usize, in_flight: bool) -> Result<State, Error> {
        let rest: Status = self.text(column)?.parse().map_err(|_| bad(column, "no status"))?;
        Ok(State {
            status: if in_flight { Status::InFlight } else { rest },
            rest,
            attempts: self.small(column + 1)?,
            crashes: self.small(column + 2)?,
            delivery: self.small(column + 3)?,
        })
    }

    /// Reads a message from [`message_columns`].
    fn message(&mut self) -> Result<Message, Error> {
        Ok(Message {
            id: self.id(0)?,
            topic: self.text(1)?,
            kind: self.optional_text(2)?,
            key: self.optional_text(3)?,
            payload: Bytes::from(self.bytes(4)?),
            content_type: self.text(5)?,
            headers: headers(&self.text(6)?),
            occurred_at: time(self.millis(7)?),
        })
    }
}

impl Read for Row {
    fn value(&mut self, column: usize) -> Result<Value, Error> {
        self.take(column).ok_or_else(|| bad(column, "nothing"))
    }
}

fn bad(column: usize, found: &str) -> Error {
    Error::Broken(format!("column {} of an answer has {found} in it", column + 1))
}

/// A time for a statement's parameter.
pub(super) fn at(millis: i64) -> Value {
    let time = within(millis);
    Value::Date(
        u16::try_from(time.year()).unwrap_or(9999),
        time.month() as u8,
        time.day() as u8,
        time.hour() as u8,
        time.minute() as u8,
        time.second() as u8,
        time.and_utc().timestamp_subsec_micros(),
    )
}

/// A time as a text that the database reads.
pub(super) fn at_text(millis: i64) -> String {
    within(millis).format("%Y-%m-%d %H:%M:%S%.3f").to_string()
}

/// The nearest time that a DATETIME can hold.
fn within(millis: i64) -> NaiveDateTime {
    const LAST: i64 = 253_402_300_799_999;
    time(millis.clamp(0, LAST)).naive_utc()
}

/// Numbers for an IN list. Never empty: no number is negative here.
pub(super) fn list<T: ToString>(numbers: impl IntoIterator<Item = T>) -> String {
    let texts: Vec<String> = numbers.into_iter().map(|number| number.to_string()).collect();
    if texts.is_empty() { "-1".to_owned() } else { texts.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_the_same_as_value_and_as_text() {
        for millis in [0, 1_700_000_000_123, i64::MAX] {
            let mut row = mysql_common_row(vec![at(millis), Value::Bytes(at_text(millis).into_bytes())]);
            let (value, text) = (row.millis(0).expect("a time"), row.millis(1).expect("a time"));
            assert_eq!(value, text);
            assert_eq!(value, millis.min(253_402_300_799_999));
        }
    }

    /// Values in the place of a row.
    struct Values(Vec<Value>);

    impl Read for Values {
        fn value(&mut self, column: usize) -> Result<Value, Error> {
            Ok(self.0[column].clone())
        }
    }

    fn mysql_common_row(values: Vec<Value>) -> Values {
        Values(values)
    }
}
