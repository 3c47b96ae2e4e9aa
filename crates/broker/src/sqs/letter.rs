//! A message as SQS carries it: a body that must be text, and ten attributes at most.
//!
//! What SQS has no room for travels all the same: bytes as base64, an empty body as a dash, and whatever is too many, empty
//! or not writable as an attribute in one JSON object, [`MORE`].

use std::collections::{BTreeMap, HashMap};

use aws_sdk_sqs::types::{MessageAttributeValue, MessageSystemAttributeName as System};
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use chrono::DateTime;
use message::Message;

use crate::envelope::{self, Arrived, CONTENT_TYPE, Wire};
use crate::partition::fnv1a;
use crate::{Delivery, Outgoing, Position};

/// How the body is to be read, where it is not simply the payload.
const ENCODING: &str = "postrider-encoding";

/// The attributes that did not fit, as a JSON object.
const MORE: &str = "postrider-more";

/// What the attributes of CloudEvents begin with.
const EVENT: &str = "ce_";

/// SQS takes no more.
const MOST_ATTRIBUTES: usize = 10;

/// The type of all our attributes.
const TEXT: &str = "String";

/// SQS takes no longer ones.
const LONGEST_GROUP: usize = 128;

/// A message ready to be sent.
#[derive(Debug)]
pub(super) struct Letter {
    pub(super) body: String,
    pub(super) attributes: Vec<(String, String)>,
}

impl Letter {
    pub(super) fn new(outgoing: &Outgoing) -> Self {
        let Wire { payload, content_type, fields } = envelope::wire(outgoing, EVENT);
        let (body, encoding) = match std::str::from_utf8(&payload).ok().filter(|text| writable(text)) {
            Some("") => ("-".to_owned(), Some("empty")),
            Some(text) => (text.to_owned(), None),
            None => (BASE64.encode(&payload), Some("base64")),
        };
        let encoding = encoding.map(|encoding| (ENCODING.to_owned(), encoding.to_owned()));
        let about = encoding.into_iter().chain([(CONTENT_TYPE.to_owned(), content_type.to_owned())]);
        let fields = fields.into_iter().map(|(name, value)| (name.into(), value.into()));
        Self { body, attributes: pack(about.chain(fields).collect()) }
    }

    /// Bytes as SQS counts them.
    pub(super) fn size(&self) -> usize {
        let attributes = self.attributes.iter();
        self.body.len() + attributes.map(|(name, value)| name.len() + TEXT.len() + value.len()).sum::<usize>()
    }

    pub(super) fn into_parts(self) -> (String, HashMap<String, MessageAttributeValue>) {
        let value = |text| {
            let value = MessageAttributeValue::builder().data_type(TEXT).string_value(text).build();
            value.expect("a value with a type is whole")
        };
        (self.body, self.attributes.into_iter().map(|(name, text)| (name, value(text))).collect())
    }
}

/// At most ten that SQS accepts.
fn pack(fields: Vec<(String, String)>) -> Vec<(String, String)> {
    let fits = |(name, value): &(String, String)| possible(name) && !value.is_empty() && writable(value);
    if fields.len() <= MOST_ATTRIBUTES && fields.iter().all(fits) {
        return fields;
    }
    let mut attributes = Vec::with_capacity(MOST_ATTRIBUTES);
    let mut more = BTreeMap::new();
    for field in fields {
        if attributes.len() + 1 < MOST_ATTRIBUTES && fits(&field) {
            attributes.push(field);
        } else {
            more.insert(field.0, field.1);
        }
    }
    let more = serde_json::to_string(&more).expect("texts can be written as JSON");
    // JSON escapes all that SQS refuses, except for these two.
    let more = more.replace('\u{FFFE}', "\\uFFFE").replace('\u{FFFF}', "\\uFFFF");
    attributes.push((MORE.to_owned(), more));
    attributes
}

/// Whether SQS takes this as the name of an attribute.
fn possible(name: &str) -> bool {
    let lower = name.to_ascii_lowercase();
    (1..=256).contains(&name.len())
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
        && !(name.starts_with('.') || name.ends_with('.') || name.contains(".."))
        && !(lower.starts_with("aws.") || lower.starts_with("amazon."))
}

/// Whether SQS takes this as text: what XML 1.0 can write.
fn writable(text: &str) -> bool {
    text.chars().all(|c| match c {
        '\t' | '\n' | '\r' => true,
        '\u{FFFE}' | '\u{FFFF}' => false,
        c => c >= ' ',
    })
}

/// The message group of a message: its key, as far as SQS accepts it. Keys that share a group share no more than their order.
pub(super) fn group(message: &Message) -> String {
    let Some(key) = &message.key else { return message.id.to_string() };
    if (1..=LONGEST_GROUP).contains(&key.len()) && key.bytes().all(|b| b.is_ascii_graphic()) {
        return key.clone();
    }
    let plain: String = key.chars().filter(char::is_ascii_graphic).take(64).collect();
    format!("{plain}~{:016x}", fnv1a(key.as_bytes()))
}

/// By what a FIFO queue recognises a message that it was sent before.
pub(super) fn deduplication(outgoing: &Outgoing) -> String {
    format!("{}-{}", outgoing.message.id, outgoing.delivery)
}

/// Reads what [`Letter::new`] wrote, and whatever others write.
pub(super) fn read(message: aws_sdk_sqs::types::Message, topic: &str, position: Position) -> Delivery {
    let mut fields: BTreeMap<String, String> = BTreeMap::new();
    for (name, value) in message.message_attributes.unwrap_or_default() {
        let bytes = |bytes: aws_sdk_sqs::primitives::Blob| BASE64.encode(bytes);
        fields.insert(name, value.string_value.or(value.binary_value.map(bytes)).unwrap_or_default());
    }
    if let Some(more) = fields.remove(MORE) {
        match serde_json::from_str::<BTreeMap<String, String>>(&more) {
            Ok(more) => fields.extend(more),
            // Somebody else's.
            Err(_) => drop(fields.insert(MORE.to_owned(), more)),
        }
    }
    let body = message.body.unwrap_or_default();
    let payload = match fields.remove(ENCODING).as_deref() {
        Some("empty") => Bytes::new(),
        Some("base64") => BASE64.decode(&body).map_or_else(|_| Bytes::from(body), Bytes::from),
        _ => Bytes::from(body),
    };
    let mut system = message.attributes.unwrap_or_default();
    // A message of ours without a key has a group all the same.
    // Whatever the format, and an event of somebody else knows its own key too.
    let ours = fields.contains_key(envelope::SEQ) || fields.contains_key(&format!("{EVENT}id"));
    let key = system.remove(&System::MessageGroupId).filter(|_| !ours);
    let sent_at = system.remove(&System::SentTimestamp).and_then(|time| time.parse().ok());
    let arrived = Arrived {
        topic,
        payload,
        content_type: fields.remove(CONTENT_TYPE),
        key,
        fields: fields.into_iter().collect(),
        place: message.message_id.unwrap_or_default(),
        stored_at: sent_at.and_then(DateTime::from_timestamp_millis),
    };
    envelope::read(arrived, EVENT, position)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::Format;

    const HERE: Position = Position { partition: 3, offset: 4 };

    /// What SQS would give back.
    fn carried(outgoing: &Outgoing) -> aws_sdk_sqs::types::Message {
        let letter = Letter::new(outgoing);
        assert!(letter.attributes.len() <= MOST_ATTRIBUTES && !letter.body.is_empty());
        assert!(
            letter
                .attributes
                .iter()
                .all(|(name, value)| possible(name) && writable(value) && !value.is_empty())
        );
        let (body, attributes) = letter.into_parts();
        let message = aws_sdk_sqs::types::Message::builder().body(body).message_id("place");
        message
            .set_message_attributes(Some(attributes))
            .attributes(System::MessageGroupId, group(&outgoing.message))
            .build()
    }

    #[test]
    fn every_message_fits_and_comes_back_as_it_was() {
        let many = |message: Message| {
            (0..20).fold(message, |message, n| message.header(format!("h{n}"), n.to_string()))
        };
        let odd =
            Message::new("orders", "1").key("k ö").kind("Placed").header("empty", "").header("aws.x", "y");
        let odd = odd
            .header("un\u{FFFE}writable", "x")
            .header("x", "\u{FFFF}")
            .header(".dot", "1")
            .header("a..b", "2");
        let messages = [
            Message::new("orders", ""),
            Message::new("orders", "plain\r\ntext\t"),
            Message::new("orders", vec![0xff, 0, 1]),
            Message::new("orders", "bell \u{7} and \u{FFFF}"),
            many(Message::new("orders", "1").key("k")),
            odd,
        ];
        let source: Arc<str> = "/shop".into();
        let formats = [
            Format::Native,
            Format::CloudEvents { source: Arc::clone(&source) },
            Format::CloudEventsStructured { source },
        ];
        for message in messages {
            for format in &formats {
                // A CloudEvent has a type, and is no place for a body that is not JSON.
                let message = match format {
                    Format::Native => message.clone(),
                    _ => message.clone().kind("Placed"),
                };
                let outgoing =
                    Outgoing { format: format.clone(), delivery: 2, ..Outgoing::new(message.clone(), 7) };
                let came = read(carried(&outgoing), "orders", HERE);
                assert_eq!(came.message, message, "{format:?}");
                assert_eq!((came.seq, came.delivery, came.position), (Some(7), 2, HERE));
            }
        }
    }

    #[test]
    fn a_message_of_somebody_else_has_its_group_as_key_and_its_place_as_id() {
        let theirs = |place: &str| {
            let number = MessageAttributeValue::builder().data_type("Number").string_value("5").build();
            aws_sdk_sqs::types::Message::builder()
                .body("hello")
                .message_id(place)
                .attributes(System::MessageGroupId, "customer-7")
                .attributes(System::SentTimestamp, "1700000000123")
                .message_attributes("n", number.expect("it is whole"))
                .build()
        };
        let came = read(theirs("a"), "orders", HERE).message;
        assert_eq!((came.key.as_deref(), &came.payload[..]), (Some("customer-7"), &b"hello"[..]));
        assert_eq!(
            (came.headers["n"].as_str(), came.occurred_at.timestamp_millis()),
            ("5", 1_700_000_000_123)
        );
        assert_eq!(came.id, read(theirs("a"), "orders", HERE).message.id);
        assert_ne!(came.id, read(theirs("b"), "orders", HERE).message.id);
    }

    #[test]
    fn every_key_has_a_group_that_sqs_accepts() {
        let group = |key: &str| group(&Message::new("orders", "").key(key));
        assert_eq!(group("customer-7"), "customer-7");
        for key in ["", "k ö", "żółć", &"x".repeat(129), &" y".repeat(500)] {
            let group = group(key);
            assert!((1..=LONGEST_GROUP).contains(&group.len()), "{group}");
            assert!(group.bytes().all(|b| b.is_ascii_graphic()), "{group}");
        }
        assert_ne!(group("k ö"), group("k ä"));
    }
}
