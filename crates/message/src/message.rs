//! A message as its writer sees it, and what makes one unacceptable.

use std::collections::BTreeMap;

use bytes::Bytes;
use chrono::{DateTime, Utc};
use serde::Serialize;

use crate::MessageId;

/// What is written once and then carried, unchanged, to everyone who must hear of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// The same through every retry and on every broker.
    pub id: MessageId,
    /// Where it goes; routes are chosen by it.
    pub topic: String,
    /// What happened, in the words of the business: "OrderPlaced".
    pub kind: Option<String>,
    /// Messages of one topic and key arrive in the order they were written.
    pub key: Option<String>,
    /// Opaque to Postrider.
    pub payload: Bytes,
    /// The media type of the payload.
    pub content_type: String,
    /// The writer's own headers, trace context among them.
    pub headers: BTreeMap<String, String>,
    /// When it happened, by the writer's clock. Never used for order or timeouts.
    pub occurred_at: DateTime<Utc>,
}

impl Message {
    /// The media type when the writer names none.
    pub const DEFAULT_CONTENT_TYPE: &'static str = "application/json";

    /// The header of a copy that names the message it was made of.
    pub const COPY_OF: &'static str = "copy-of";

    /// A message with a fresh id, happening now. The payload is taken to be JSON until said otherwise.
    pub fn new(topic: impl Into<String>, payload: impl Into<Bytes>) -> Self {
        Self {
            id: MessageId::new(),
            topic: topic.into(),
            kind: None,
            key: None,
            payload: payload.into(),
            content_type: Self::DEFAULT_CONTENT_TYPE.to_owned(),
            headers: BTreeMap::new(),
            occurred_at: Utc::now(),
        }
    }

    /// A message whose payload is `value` as JSON.
    ///
    /// # Errors
    /// When `value` cannot be written as JSON (a map with keys that are not strings, say).
    pub fn json(topic: impl Into<String>, value: &impl Serialize) -> Result<Self, serde_json::Error> {
        Ok(Self::new(topic, serde_json::to_vec(value)?))
    }

    /// Keep this message in order with others of the same topic and key.
    #[must_use]
    pub fn key(mut self, key: impl Into<String>) -> Self {
        self.key = Some(key.into());
        self
    }

    /// Name what happened: "OrderPlaced".
    #[must_use]
    pub fn kind(mut self, kind: impl Into<String>) -> Self {
        self.kind = Some(kind.into());
        self
    }

    /// Use this id instead of a fresh one.
    #[must_use]
    pub fn id(mut self, id: MessageId) -> Self {
        self.id = id;
        self
    }

    /// Add a header.
    #[must_use]
    pub fn header(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.headers.insert(name.into(), value.into());
        self
    }

    /// A second message with the same content for another topic, which names this one. It has no schedule: what is to be
    /// there whatever becomes of this one must not expire with it.
    #[must_use]
    pub fn copy_to(&self, topic: &str) -> Self {
        let id = MessageId::of_copy(topic, self.id);
        let copy = Self { id, topic: topic.to_owned(), ..self.clone() }.unscheduled();
        copy.header(Self::COPY_OF, self.id.to_string())
    }

    /// Bytes that this message takes in a batch, near enough for limits.
    pub fn size(&self) -> usize {
        let headers: usize = self.headers.iter().map(|(name, value)| name.len() + value.len()).sum();
        self.payload.len() + self.topic.len() + self.key.as_ref().map_or(0, String::len) + headers
    }

    /// Whether some broker on the way would choke on this message.
    ///
    /// # Errors
    /// Says what is wrong and what would be accepted.
    pub fn check(&self, limits: &Limits) -> Result<(), Invalid> {
        check_topic(&self.topic)?;
        text("key", self.key.as_deref(), 1024)?;
        text("type", self.kind.as_deref(), 255)?;
        text("contentType", Some(&self.content_type), 255)?;
        if self.payload.len() > limits.payload {
            return Err(Invalid::PayloadTooLarge { size: self.payload.len(), limit: limits.payload });
        }
        let mut total = 0;
        for (name, value) in &self.headers {
            total += name.len() + value.len();
            if name.is_empty() || !name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b)) {
                return Err(Invalid::HeaderName(name.chars().take(64).collect()));
            }
            if value.chars().any(char::is_control) {
                return Err(Invalid::HeaderValue(name.clone()));
            }
        }
        if total > limits.headers {
            return Err(Invalid::HeadersTooLarge { size: total, limit: limits.headers });
        }
        self.check_schedule()
    }
}

/// How much a message may weigh.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bytes of payload.
    pub payload: usize,
    /// Bytes of all header names and values together.
    pub headers: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { payload: 1 << 20, headers: 16 << 10 }
    }
}

/// Whether `topic` is a name that every broker accepts.
///
/// # Errors
/// Says which names are.
pub fn check_topic(topic: &str) -> Result<(), Invalid> {
    name(topic).then_some(()).ok_or_else(|| Invalid::Topic(topic.chars().take(64).collect()))
}

/// Whether `group` is a name that every broker accepts for a consumer group.
///
/// # Errors
/// Says which names are.
pub fn check_group(group: &str) -> Result<(), Invalid> {
    name(group).then_some(()).ok_or_else(|| Invalid::Group(group.chars().take(64).collect()))
}

fn name(text: &str) -> bool {
    (1..=249).contains(&text.len())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
        && text != "."
        && text != ".."
}

fn text(field: &'static str, value: Option<&str>, limit: usize) -> Result<(), Invalid> {
    let Some(value) = value else { return Ok(()) };
    if value.len() > limit {
        return Err(Invalid::TooLong { field, size: value.len(), limit });
    }
    if value.chars().any(char::is_control) {
        return Err(Invalid::ControlCharacter { field });
    }
    Ok(())
}

/// Why a message is not accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    /// A topic that some broker would refuse.
    #[error("`{0}` cannot be a topic: use 1 to 249 letters, digits, dots, dashes or underscores")]
    Topic(String),
    /// A consumer group that some broker would refuse.
    #[error("`{0}` cannot be a consumer group: use 1 to 249 letters, digits, dots, dashes or underscores")]
    Group(String),
    /// More payload than the limit.
    #[error(
        "the payload has {size} bytes and the limit is {limit}: send a reference to it, or raise the limit"
    )]
    PayloadTooLarge {
        /// Bytes found.
        size: usize,
        /// Bytes allowed.
        limit: usize,
    },
    /// More headers than the limit.
    #[error("the headers have {size} bytes together and the limit is {limit}: put such data in the payload")]
    HeadersTooLarge {
        /// Bytes found.
        size: usize,
        /// Bytes allowed.
        limit: usize,
    },
    /// A header name that HTTP and others cannot carry.
    #[error("`{0}` cannot be a header name: use letters, digits, dots, dashes or underscores")]
    HeaderName(String),
    /// A header value that could smuggle another header.
    #[error("the header `{0}` has a control character (a line break or NUL, say): remove it")]
    HeaderValue(String),
    /// A header that should say a time and does not.
    #[error("the header `{0}` is not a time: write it like 2026-11-16T18:30:00Z")]
    Time(&'static str),
    /// It would be Dead before anybody may send it.
    #[error("the message expires before it may be sent: let it expire later, or send it sooner")]
    NeverSent,
    /// A text longer than its limit.
    #[error("`{field}` has {size} bytes and the limit is {limit}")]
    TooLong {
        /// Which.
        field: &'static str,
        /// Bytes found.
        size: usize,
        /// Bytes allowed.
        limit: usize,
    },
    /// A text with a line break, NUL or the like.
    #[error("`{field}` has a control character (a line break or NUL, say): remove it")]
    ControlCharacter {
        /// Which.
        field: &'static str,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plain_message_is_accepted() {
        let message = Message::new("order-events", "{}").key("42").kind("OrderPlaced").header("a-b", "c d");
        assert_eq!(message.check(&Limits::default()), Ok(()));
    }

    #[test]
    fn a_copy_has_the_content_of_its_message_and_names_it() {
        let alarm = Message::new("alarms", "{}").key("gate-3").kind("Raised").header("a", "b");
        let alarm =
            alarm.deliver_after(std::time::Duration::from_secs(1)).header("Postrider-Expires-At", "soon");
        let copy = alarm.copy_to("record");
        assert_eq!(copy, alarm.copy_to("record"), "made again, it is the same message");
        assert!(copy.id != alarm.id && copy.id != alarm.copy_to("other").id);
        assert_eq!(copy.headers[Message::COPY_OF], alarm.id.to_string());
        let same = Message {
            topic: "record".to_owned(),
            headers: [("a".to_owned(), "b".to_owned())].into(),
            ..alarm.id(copy.id)
        };
        assert_eq!(copy, same.header(Message::COPY_OF, copy.headers[Message::COPY_OF].clone()));
    }

    #[test]
    fn what_a_broker_would_choke_on_is_refused_with_its_name() {
        let limits = Limits { payload: 4, headers: 10 };
        let ok = || Message::new("t", "1");
        let cases = [
            (Message::new("", "1"), "cannot be a topic"),
            (Message::new("a b", "1"), "cannot be a topic"),
            (Message::new("..", "1"), "cannot be a topic"),
            (Message::new("t".repeat(250), "1"), "cannot be a topic"),
            (Message::new("t", "12345"), "5 bytes and the limit is 4"),
            (ok().key("a\0b"), "`key` has a control character"),
            (ok().key("k".repeat(1025)), "`key` has 1025 bytes"),
            (ok().kind("a\nb"), "`type` has a control character"),
            (ok().header("x y", "1"), "cannot be a header name"),
            (ok().header("x", "a\r\nb: c"), "`x` has a control character"),
            (ok().header("x", "0123456789"), "11 bytes together"),
        ];
        for (message, expected) in cases {
            let error = message.check(&limits).expect_err(expected).to_string();
            assert!(error.contains(expected), "{error:?} should say {expected:?}");
        }
    }
}
