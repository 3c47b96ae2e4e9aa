//! A message as an entry of a stream: the payload first, then everything that travels beside it, each a field.
//!
//! Field names of an entry may repeat, so a header that is called `payload` is no trouble: the first is the payload.

use std::fmt;
use std::str::FromStr;

use bytes::Bytes;
use chrono::{DateTime, Utc};
use redis::Value;

use crate::envelope::{self, Arrived, CONTENT_TYPE, Wire};
use crate::{Delivery, Outgoing, Position};

/// The field of the payload.
const PAYLOAD: &str = "payload";

/// What the attributes of CloudEvents begin with.
const EVENT: &str = "ce_";

/// The id of an entry: its place in the stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct EntryId {
    ms: u64,
    seq: u64,
}

impl EntryId {
    /// The least that is greater.
    pub(super) fn next(self) -> Self {
        match self.seq.checked_add(1) {
            Some(seq) => Self { seq, ..self },
            None => Self { ms: self.ms.saturating_add(1), seq: 0 },
        }
    }

    /// The first that may be of this moment.
    pub(super) fn at(time: DateTime<Utc>) -> Self {
        Self { ms: u64::try_from(time.timestamp_millis()).unwrap_or(0), seq: 0 }
    }

    /// When it was stored.
    pub(super) fn time(self) -> Option<DateTime<Utc>> {
        i64::try_from(self.ms).ok().and_then(DateTime::from_timestamp_millis)
    }

    /// The first moment that is later.
    pub(super) fn next_time(self) -> Option<DateTime<Utc>> {
        Self { ms: self.ms.checked_add(1)?, seq: 0 }.time()
    }
}

impl fmt::Display for EntryId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.ms, self.seq)
    }
}

impl FromStr for EntryId {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (ms, seq) = text.split_once('-').ok_or(())?;
        Ok(Self { ms: ms.parse().map_err(drop)?, seq: seq.parse().map_err(drop)? })
    }
}

/// The names and values of an entry.
pub(super) struct Texts<'a> {
    wire: Wire<'a>,
}

impl<'a> Texts<'a> {
    pub(super) fn of(outgoing: &'a Outgoing) -> Self {
        Self { wire: envelope::wire(outgoing, EVENT) }
    }

    /// How many names there are, and values.
    pub(super) fn count(&self) -> usize {
        2 + self.wire.fields.len()
    }

    /// Bytes, near enough.
    pub(super) fn size(&self) -> usize {
        self.wire.payload.len()
            + self.wire.fields.iter().map(|(name, value)| name.len() + value.len()).sum::<usize>()
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        [PAYLOAD, CONTENT_TYPE].into_iter().chain(self.wire.fields.iter().map(|(name, _)| &**name))
    }

    /// In the order of the names.
    pub(super) fn values(&self) -> impl Iterator<Item = &[u8]> {
        let Wire { payload, content_type, fields } = &self.wire;
        let first = [&payload[..], content_type.as_bytes()];
        first.into_iter().chain(fields.iter().map(|(_, value)| value.as_bytes()))
    }
}

/// An entry as Redis answers it.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) id: EntryId,
    texts: Vec<Value>,
}

impl Entry {
    pub(super) fn from_value(value: Value) -> Option<Self> {
        let Value::Array(parts) = value else { return None };
        let [id, Value::Array(texts)] = <[Value; 2]>::try_from(parts).ok()? else { return None };
        Some(Self { id: text(id)?.parse().ok()?, texts })
    }

    /// The message in it, ours or somebody else's. `stream` and the id name it for good.
    pub(super) fn read(self, topic: &str, stream: &str, position: Position) -> Delivery {
        let Self { id, texts } = self;
        let mut payload = None;
        let mut fields = Vec::with_capacity(texts.len() / 2);
        let mut texts = texts.into_iter().map(bytes_of);
        while let (Some(name), Some(value)) = (texts.next(), texts.next()) {
            match payload.is_none() && name == PAYLOAD.as_bytes() {
                true => payload = Some(Bytes::from(value)),
                false => fields.push((lossy(name), lossy(value))),
            }
        }
        let payload = payload.unwrap_or_else(|| whole(&mut fields));
        let arrived = Arrived {
            topic,
            payload,
            content_type: None,
            key: None,
            fields,
            place: format!("{stream}/{id}"),
            stored_at: id.time(),
        };
        envelope::read(arrived, EVENT, position)
    }
}

/// Others write `XADD … total 10 currency EUR`: then the fields are the payload, as one JSON object.
fn whole(fields: &mut Vec<(String, String)>) -> Bytes {
    let ours = |name: &str| name.starts_with("postrider-") || name == CONTENT_TYPE || name.starts_with(EVENT);
    let (beside, within): (Vec<_>, Vec<_>) =
        std::mem::take(fields).into_iter().partition(|(name, _)| ours(&name.to_ascii_lowercase()));
    *fields = beside;
    let object: serde_json::Map<_, _> =
        within.into_iter().map(|(name, value)| (name, value.into())).collect();
    Bytes::from(serde_json::Value::Object(object).to_string())
}

fn bytes_of(value: Value) -> Vec<u8> {
    match value {
        Value::BulkString(bytes) => bytes,
        Value::SimpleString(text) => text.into_bytes(),
        _ => Vec::new(),
    }
}

fn lossy(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
}

/// A text as Redis answers it.
pub(super) fn text(value: Value) -> Option<String> {
    match value {
        Value::BulkString(bytes) => String::from_utf8(bytes).ok(),
        Value::SimpleString(text) => Some(text),
        Value::Okay => Some("OK".to_owned()),
        _ => None,
    }
}

/// A list as Redis answers it.
pub(super) fn list(value: Value) -> Option<Vec<Value>> {
    match value {
        Value::Array(values) => Some(values),
        _ => None,
    }
}

/// A number as Redis answers it.
pub(super) fn number(value: &Value) -> Option<i64> {
    match value {
        Value::Int(number) => Some(*number),
        Value::BulkString(bytes) => std::str::from_utf8(bytes).ok()?.parse().ok(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use message::Message;

    use super::*;

    const HERE: Position = Position { partition: 0, offset: 1 };

    fn entry(texts: &[&[u8]]) -> Entry {
        let texts = texts.iter().map(|text| Value::BulkString(text.to_vec())).collect();
        let id = Value::BulkString(b"1700000000000-3".to_vec());
        Entry::from_value(Value::Array(vec![id, Value::Array(texts)])).expect("an entry")
    }

    #[test]
    fn an_id_is_followed_by_the_least_that_is_greater() {
        let id: EntryId = "5-18446744073709551615".parse().expect("an id");
        assert_eq!(id.next().to_string(), "6-0");
        assert_eq!("5-7".parse::<EntryId>().expect("an id").next().to_string(), "5-8");
        assert!("5".parse::<EntryId>().is_err());
        assert!("9-0".parse::<EntryId>() < "10-0".parse::<EntryId>());
    }

    #[test]
    fn a_message_comes_back_as_it_was_with_a_header_that_is_called_like_the_payload() {
        let message = Message {
            occurred_at: DateTime::from_timestamp(1_700_000_000, 5).expect("a time"),
            ..Message::new("orders", vec![0xff, 0x00]).key("42").kind("Placed").header("payload", "mine")
        };
        let outgoing = Outgoing::new(message.clone(), 7);
        let texts = Texts::of(&outgoing);
        let both = texts.names().zip(texts.values());
        let written: Vec<&[u8]> = both.flat_map(|(name, value)| [name.as_bytes(), value]).collect();
        assert_eq!(written.len(), 2 * texts.count());
        let came = entry(&written).read("orders", "s", HERE);
        assert_eq!((came.message, came.seq), (message, Some(7)));
    }

    #[test]
    fn fields_of_somebody_else_are_one_object_and_the_same_at_every_redelivery() {
        let theirs: [&[u8]; 6] = [b"total", b"10", b"postrider-key", b"42", b"currency", b"EUR"];
        let came = entry(&theirs).read("orders", "s", HERE);
        assert_eq!(&came.message.payload[..], br#"{"currency":"EUR","total":"10"}"#);
        assert_eq!(came.message.key.as_deref(), Some("42"));
        assert!(came.message.headers.is_empty());
        assert_eq!(came.message.occurred_at.timestamp(), 1_700_000_000);
        assert_eq!(entry(&theirs).read("orders", "s", HERE), came);
        assert_ne!(entry(&theirs).read("orders", "other", HERE).message.id, came.message.id);
    }
}
