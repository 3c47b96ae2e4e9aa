//! A block: the messages that one call stored in one partition, one after another in one row.
//!
//! A row per message costs more than the message itself: a batch of 500 over 1,000 keys touches 16 rows instead
//! of 500, and its payloads are read as slices of the block instead of one by one. A block begins with the
//! version of its format; integers are little-endian, texts and bytes have their length before them.

use std::collections::BTreeMap;

use bytes::Bytes;
use chrono::DateTime;
use message::{Message, MessageId};
use uuid::Uuid;

use crate::{Format, Outgoing};

/// The format that is written.
const VERSION: u8 = 1;

/// The length of a text that is not there.
const ABSENT: u32 = u32::MAX;

/// A full block takes no more: reading one message means reading its block.
const MAX_MESSAGES: u32 = 256;
const MAX_BYTES: usize = 128 << 10;

/// Messages on their way into one row.
#[derive(Debug)]
pub(super) struct Block {
    pub(super) messages: u32,
    pub(super) data: Vec<u8>,
}

impl Block {
    pub(super) fn new() -> Self {
        Self { messages: 0, data: vec![VERSION] }
    }

    pub(super) fn is_full(&self) -> bool {
        self.messages >= MAX_MESSAGES || self.data.len() >= MAX_BYTES
    }

    /// Adds a message whose headers are already JSON.
    pub(super) fn push(&mut self, outgoing: &Outgoing, headers: Option<&str>) {
        let Outgoing { message, seq, delivery, .. } = outgoing;
        let data = &mut self.data;
        data.extend_from_slice(message.id.0.as_bytes());
        data.extend_from_slice(&seq.to_le_bytes());
        data.extend_from_slice(&delivery.to_le_bytes());
        data.extend_from_slice(&message.occurred_at.timestamp().to_le_bytes());
        data.extend_from_slice(&message.occurred_at.timestamp_subsec_nanos().to_le_bytes());
        put(data, message.kind.as_ref().map(String::as_bytes));
        put(data, message.key.as_ref().map(String::as_bytes));
        put(data, Some(message.content_type.as_bytes()));
        put(data, headers.map(str::as_bytes));
        put(data, Some(&message.payload));
        self.messages += 1;
    }
}

fn put(data: &mut Vec<u8>, bytes: Option<&[u8]>) {
    let length = bytes.map_or(ABSENT, |bytes| u32::try_from(bytes.len()).unwrap_or(ABSENT));
    data.extend_from_slice(&length.to_le_bytes());
    data.extend_from_slice(bytes.unwrap_or_default());
}

/// Reads the messages of a block one after another.
#[derive(Debug)]
pub(super) struct Messages {
    rest: Bytes,
}

/// A block that this program did not write, or that was damaged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Unreadable;

impl Messages {
    pub(super) fn of(data: Vec<u8>) -> Result<Self, Unreadable> {
        let mut rest = Bytes::from(data);
        match take(&mut rest, 1)?[0] {
            VERSION => Ok(Self { rest }),
            _ => Err(Unreadable),
        }
    }

    /// Passes over a message without looking into it.
    pub(super) fn skip(&mut self) -> Result<(), Unreadable> {
        take(&mut self.rest, 16 + 8 + 4 + 8 + 4)?;
        for _ in 0..5 {
            get(&mut self.rest)?;
        }
        Ok(())
    }

    /// Id, place and delivery of the next message, which is passed over.
    pub(super) fn head(&mut self) -> Result<(MessageId, i64, u32), Unreadable> {
        let mut head = self.rest.clone();
        self.skip()?;
        let id = MessageId(Uuid::from_bytes(array(&mut head)?));
        Ok((id, i64::from_le_bytes(array(&mut head)?), u32::from_le_bytes(array(&mut head)?)))
    }

    /// The next message.
    pub(super) fn next(&mut self, topic: &str) -> Result<Outgoing, Unreadable> {
        let rest = &mut self.rest;
        let id = MessageId(Uuid::from_bytes(array(rest)?));
        let seq = i64::from_le_bytes(array(rest)?);
        let delivery = u32::from_le_bytes(array(rest)?);
        let (seconds, nanoseconds) = (i64::from_le_bytes(array(rest)?), u32::from_le_bytes(array(rest)?));
        let kind = text(rest)?;
        let key = text(rest)?;
        let content_type = text(rest)?.ok_or(Unreadable)?;
        let headers = match get(rest)? {
            Some(json) => serde_json::from_slice(&json).map_err(|_| Unreadable)?,
            None => BTreeMap::new(),
        };
        let payload = get(rest)?.ok_or(Unreadable)?;
        let occurred_at = DateTime::from_timestamp(seconds, nanoseconds).ok_or(Unreadable)?;
        let topic = topic.to_owned();
        let message = Message { id, topic, kind, key, payload, content_type, headers, occurred_at };
        Ok(Outgoing { message: message.into(), seq, delivery, format: Format::Native })
    }
}

fn take(rest: &mut Bytes, length: usize) -> Result<Bytes, Unreadable> {
    if rest.len() < length {
        return Err(Unreadable);
    }
    Ok(rest.split_to(length))
}

fn array<const N: usize>(rest: &mut Bytes) -> Result<[u8; N], Unreadable> {
    take(rest, N)?.as_ref().try_into().map_err(|_| Unreadable)
}

fn get(rest: &mut Bytes) -> Result<Option<Bytes>, Unreadable> {
    match u32::from_le_bytes(array(rest)?) {
        ABSENT => Ok(None),
        length => take(rest, length as usize).map(Some),
    }
}

fn text(rest: &mut Bytes) -> Result<Option<String>, Unreadable> {
    let Some(bytes) = get(rest)? else { return Ok(None) };
    std::str::from_utf8(&bytes).map(|text| Some(text.to_owned())).map_err(|_| Unreadable)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sent() -> [Outgoing; 2] {
        let full = Message::new("t", vec![0, 255]).key("k\u{0}ö").kind("Placed").header("a", "\"ü\"");
        let bare = Message { content_type: String::new(), ..Message::new("t", "") };
        [Outgoing { delivery: u32::MAX, ..Outgoing::new(full, i64::MIN) }, Outgoing::new(bare, 7)]
    }

    fn block() -> Block {
        let mut block = Block::new();
        block.push(&sent()[0], Some(r#"{"a":"\"ü\""}"#));
        block.push(&sent()[1], None);
        block
    }

    #[test]
    fn messages_are_read_as_they_were_written() {
        let mut block = Block::new();
        let sent = sent();
        block.push(&sent[0], Some(r#"{"a":"\"ü\""}"#));
        block.push(&sent[1], None);
        let mut messages = Messages::of(block.data.clone()).expect("our version");
        assert_eq!(messages.next("t"), Ok(sent[0].clone()));
        assert_eq!(messages.next("t"), Ok(sent[1].clone()));
        assert_eq!(messages.next("t"), Err(Unreadable));
        let mut messages = Messages::of(block.data.clone()).expect("our version");
        assert_eq!(messages.skip(), Ok(()));
        assert_eq!(messages.next("t"), Ok(sent[1].clone()));
        let mut messages = Messages::of(block.data).expect("our version");
        assert_eq!(messages.head(), Ok((sent[0].message.id, i64::MIN, u32::MAX)));
        assert_eq!(messages.head(), Ok((sent[1].message.id, 7, 0)));
        assert_eq!(messages.head(), Err(Unreadable));
    }

    #[test]
    fn a_damaged_block_is_refused_and_nothing_panics() {
        let whole = block().data;
        for length in 0..whole.len() {
            let read = Messages::of(whole[..length].to_vec())
                .and_then(|mut messages| messages.next("t").and_then(|_| messages.next("t")));
            assert_eq!(read, Err(Unreadable), "cut after {length}");
        }
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 0xff;
            // Whatever it says, it says it without a panic.
            if let Ok(mut messages) = Messages::of(damaged) {
                let _ = messages.next("t").and_then(|_| messages.next("t"));
            }
        }
        let mut newer = whole;
        newer[0] = VERSION + 1;
        assert!(Messages::of(newer).is_err());
    }
}
