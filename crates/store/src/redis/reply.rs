//! Reading answers of scripts: the one place where Redis's values meet fields.

use std::collections::HashMap;

use ::redis::Value;
use bytes::Bytes;
use chrono::{DateTime, Utc};
use message::{Message, MessageId, State, Status};
use uuid::Uuid;

use crate::Error;
use crate::column::{headers, time};

/// Reads the items of an answer one after the other.
pub(super) struct Reader(std::vec::IntoIter<Value>);

impl From<Value> for Reader {
    /// What is not a list is a list of one.
    fn from(value: Value) -> Self {
        Self(match value {
            Value::Array(items) => items.into_iter(),
            other => vec![other].into_iter(),
        })
    }
}

impl Iterator for Reader {
    type Item = Value;

    fn next(&mut self) -> Option<Value> {
        self.0.next()
    }
}

impl Reader {
    pub(super) fn optional_bytes(&mut self) -> Result<Option<Vec<u8>>, Error> {
        match self.next() {
            Some(Value::BulkString(bytes)) => Ok(Some(bytes)),
            Some(Value::SimpleString(text)) => Ok(Some(text.into_bytes())),
            Some(Value::Int(number)) => Ok(Some(number.to_string().into_bytes())),
            Some(Value::Nil) => Ok(None),
            _ => Err(odd("a text")),
        }
    }

    /// Text as it is, or nearly: a script may have written bytes that are no UTF-8, and one such message must not
    /// stop a relay.
    pub(super) fn optional_text(&mut self) -> Result<Option<String>, Error> {
        Ok(self.optional_bytes()?.map(text))
    }

    pub(super) fn text(&mut self) -> Result<String, Error> {
        self.optional_text()?.ok_or_else(|| odd("a text"))
    }

    pub(super) fn optional_number(&mut self) -> Result<Option<i64>, Error> {
        self.optional_text()?.map(|text| text.parse().map_err(|_| odd("a number"))).transpose()
    }

    pub(super) fn number(&mut self) -> Result<i64, Error> {
        self.optional_number()?.ok_or_else(|| odd("a number"))
    }

    pub(super) fn size(&mut self) -> Result<usize, Error> {
        usize::try_from(self.number()?).map_err(|_| odd("a size"))
    }

    pub(super) fn total(&mut self) -> Result<u64, Error> {
        Ok(u64::try_from(self.number()?).unwrap_or(0))
    }

    pub(super) fn flag(&mut self) -> Result<bool, Error> {
        Ok(self.number()? == 1)
    }

    pub(super) fn uuid(&mut self) -> Result<Uuid, Error> {
        self.text()?.parse().map_err(|_| odd("a UUID"))
    }

    pub(super) fn list(&mut self) -> Result<Self, Error> {
        match self.next() {
            Some(Value::Array(items)) => Ok(Self(items.into_iter())),
            _ => Err(odd("a list")),
        }
    }

    pub(super) fn texts(&mut self) -> Result<Vec<String>, Error> {
        let mut list = self.list()?;
        let mut texts = Vec::new();
        while list.0.len() > 0 {
            texts.push(list.text()?);
        }
        Ok(texts)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.len() == 0
    }

    /// Pairs of names and values, as HGETALL gives them.
    pub(super) fn fields(&mut self) -> Result<Fields, Error> {
        let mut list = self.list()?;
        let mut fields = HashMap::new();
        while !list.is_empty() {
            let name = list.text()?;
            fields.insert(name, list.optional_bytes()?.unwrap_or_default());
        }
        Ok(Fields(fields))
    }
}

/// A hash.
pub(super) struct Fields(pub(super) HashMap<String, Vec<u8>>);

impl Fields {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn optional(&mut self, name: &str) -> Option<String> {
        self.0.remove(name).map(text)
    }

    pub(super) fn text(&mut self, name: &str) -> Result<String, Error> {
        self.optional(name).ok_or_else(|| odd(name))
    }

    pub(super) fn optional_number(&mut self, name: &str) -> Result<Option<i64>, Error> {
        self.optional(name).map(|text| text.parse().map_err(|_| odd(name))).transpose()
    }

    pub(super) fn number(&mut self, name: &str) -> Result<i64, Error> {
        Ok(self.optional_number(name)?.unwrap_or(0))
    }

    pub(super) fn small(&mut self, name: &str) -> Result<u32, Error> {
        u32::try_from(self.number(name)?).map_err(|_| odd(name))
    }

    pub(super) fn optional_time(&mut self, name: &str) -> Result<Option<DateTime<Utc>>, Error> {
        Ok(self.optional_number(name)?.map(time))
    }

    pub(super) fn id(&mut self, name: &str) -> Result<MessageId, Error> {
        self.text(name)?.parse().map_err(|_| odd(name))
    }

    /// The parts of a message. What its writer left out is what it usually is.
    pub(super) fn message(&mut self) -> Result<Message, Error> {
        Ok(Message {
            id: self.id("id")?,
            topic: self.text("topic")?,
            kind: self.optional("type"),
            key: self.optional("key"),
            payload: Bytes::from(self.0.remove("payload").unwrap_or_default()),
            content_type: self
                .optional("content_type")
                .unwrap_or_else(|| Message::DEFAULT_CONTENT_TYPE.to_owned()),
            headers: self.optional("headers").as_deref().map(headers).unwrap_or_default(),
            occurred_at: time(self.number("occurred_at")?),
        })
    }

    pub(super) fn state(&mut self, in_flight: bool) -> Result<State, Error> {
        let rest = self.optional("status").map_or(Ok(Status::Pending), |word| status(&word))?;
        Ok(State {
            status: if in_flight { Status::InFlight } else { rest },
            rest,
            attempts: self.small("attempts")?,
            crashes: self.small("crashes")?,
            delivery: self.small("delivery")?,
        })
    }
}

/// The status for a word in a hash.
pub(super) fn status(word: &str) -> Result<Status, Error> {
    match word {
        "in_flight" => Ok(Status::InFlight),
        other => other.parse().map_err(|_| odd("status")),
    }
}

/// The word for a status in scripts.
pub(super) fn word(status: Status) -> &'static str {
    match status {
        Status::InFlight => "in_flight",
        other => crate::column::word(other),
    }
}

fn text(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
}

pub(super) fn odd(what: &str) -> Error {
    Error::Broken(format!(
        "what Redis answered is not what a script of the store answers ({what}): have keys been changed by hand?"
    ))
}
