//! How a message is named: a UUID, made fresh, or derived from what the message says.
//!
//! Derived ids let two senders who mean the same thing produce the same message. They are version 8 UUIDs
//! (free-form) over SHA-256, so they can never be taken for a time-ordered id.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};
use uuid::{Builder, Uuid};

/// The identity of a message, the same through every retry, broker and inbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MessageId(pub Uuid);

impl MessageId {
    /// A fresh, time-ordered id (UUIDv7): indexes that see it stay dense.
    pub fn new() -> Self {
        Self(Uuid::now_v7())
    }

    /// The id of this content on this topic: equal content means the same message.
    pub fn from_content(topic: &str, payload: &[u8]) -> Self {
        Self::hashed("content", topic, [payload])
    }

    /// The id made of chosen fields of a JSON payload: `["orderId", "payment.attempt"]`.
    ///
    /// # Errors
    /// A field that is absent is refused rather than hashed as nothing: two unrelated messages
    /// without it would otherwise become one.
    pub fn from_fields(topic: &str, payload: &Value, fields: &[String]) -> Result<Self, NoSuchField> {
        let mut parts = Vec::with_capacity(fields.len() * 2);
        for field in fields {
            let value = field
                .split('.')
                .try_fold(payload, |value, name| value.get(name))
                .ok_or_else(|| NoSuchField(field.clone()))?;
            parts.push(field.clone().into_bytes());
            parts.push(value.to_string().into_bytes());
        }
        Ok(Self::hashed("fields", topic, parts.iter().map(Vec::as_slice)))
    }

    /// The id of the copy of message `id` on this topic: one that is made again is the same message.
    pub fn of_copy(topic: &str, id: Self) -> Self {
        Self::hashed("copy", topic, [id.0.as_bytes().as_slice()])
    }

    fn hashed<'a>(scheme: &'a str, topic: &'a str, parts: impl IntoIterator<Item = &'a [u8]>) -> Self {
        let mut hash = Sha256::new();
        for part in [scheme.as_bytes(), topic.as_bytes()].into_iter().chain(parts) {
            // Lengths first, or ("ab", "c") and ("a", "bc") would be the same message.
            hash.update((part.len() as u64).to_be_bytes());
            hash.update(part);
        }
        let digest = hash.finalize();
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&digest[..16]);
        Self(Builder::from_custom_bytes(bytes).into_uuid())
    }
}

impl Default for MessageId {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Display for MessageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.as_hyphenated().fmt(f)
    }
}

impl FromStr for MessageId {
    type Err = uuid::Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.parse().map(Self)
    }
}

/// The payload has no field of this name, so no id can be made from it.
#[derive(Debug, thiserror::Error)]
#[error("the message has no field `{0}` to make its id from")]
pub struct NoSuchField(pub String);

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn equal_content_on_one_topic_is_the_same_message() {
        let id = MessageId::from_content("orders", b"{}");
        assert_eq!(id, MessageId::from_content("orders", b"{}"));
        assert_ne!(id, MessageId::from_content("refunds", b"{}"));
        assert_ne!(id, MessageId::from_content("orders", b"{ }"));
    }

    #[test]
    fn a_composite_id_depends_on_its_fields_only() {
        let fields = ["order".to_owned(), "payment.attempt".to_owned()];
        let id = |value| MessageId::from_fields("pay", &value, &fields).expect("fields are there");
        let one = id(json!({"order": 12345, "payment": {"attempt": 1}, "note": "a"}));
        assert_eq!(one, id(json!({"note": "b", "payment": {"attempt": 1}, "order": 12345})));
        assert_ne!(one, id(json!({"order": 12345, "payment": {"attempt": 2}})));
        assert_ne!(one, id(json!({"order": "12345", "payment": {"attempt": 1}})));
    }

    #[test]
    fn a_missing_field_is_refused_by_name() {
        let error = MessageId::from_fields("pay", &json!({"a": 1}), &["a.b".to_owned()])
            .expect_err("a.b is not there");
        assert_eq!(error.to_string(), "the message has no field `a.b` to make its id from");
    }

    #[test]
    fn field_boundaries_cannot_be_shifted() {
        let a = MessageId::hashed("x", "t", [b"ab".as_slice(), b"c"]);
        let b = MessageId::hashed("x", "t", [b"a".as_slice(), b"bc"]);
        assert_ne!(a, b);
    }
}
