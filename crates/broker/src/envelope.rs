//! What travels beside a payload, the same on every broker: id, sequence, delivery, type, key, time and headers as named
//! texts, in Postrider's own names or in those of CloudEvents 1.0.
//!
//! A backend turns a [`Wire`] into the broker's own headers, properties or attributes, and what it received into an
//! [`Arrived`]. Messages that others produced have none of the names: they get an id from their place in the broker, so
//! that a redelivery is the same message.

use std::borrow::Cow;

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use chrono::{DateTime, SecondsFormat, Utc};
use message::{CAPABILITY, DELIVER_AT, EXPIRES_AT, Message, MessageId};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use crate::{Delivery, Format, Outgoing, Position};

pub(crate) const ID: &str = "postrider-id";
pub(crate) const SEQ: &str = "postrider-seq";
pub(crate) const DELIVERY: &str = "postrider-delivery";
pub(crate) const TYPE: &str = "postrider-type";
pub(crate) const KEY: &str = "postrider-key";
pub(crate) const OCCURRED_AT: &str = "postrider-occurred-at";
pub(crate) const CONTENT_TYPE: &str = "content-type";

/// What all names of ours begin with.
const OURS: &str = "postrider-";

/// A header of the writer's that has a name of ours travels under this.
pub(crate) const ESCAPED: &str = "postrider-header-";

/// Fields of a message that has no headers of its writer's, at most.
const FIELDS: usize = 9;

/// The media type of an event in structured mode.
const STRUCTURED: &str = "application/cloudevents+json";

/// A message as it is written down for a broker. What the message has is borrowed from it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Wire<'a> {
    pub(crate) payload: Bytes,
    /// For brokers that have a place of their own for it; not among the fields.
    pub(crate) content_type: &'a str,
    /// Everything else: names are made of ASCII letters, digits, `-`, `_`, `.` (and of what `prefix` is), values may be
    /// any text without control characters.
    pub(crate) fields: Vec<(Text<'a>, Text<'a>)>,
}

/// A name or a value: mostly one that is there already.
pub(crate) type Text<'a> = Cow<'a, str>;

/// Writes a message down. `prefix` is what the attributes of CloudEvents begin with on this broker (`ce_`, `ce-`).
pub(crate) fn wire<'a>(outgoing: &'a Outgoing, prefix: &str) -> Wire<'a> {
    let Outgoing { message, seq, delivery, format } = outgoing;
    let mut fields: Vec<(Text<'a>, Text<'a>)> = Vec::with_capacity(FIELDS + message.headers.len());
    fields.push((SEQ.into(), seq.to_string().into()));
    if *delivery > 0 {
        fields.push((DELIVERY.into(), delivery.to_string().into()));
    }
    let (payload, content_type) = match format {
        Format::Native => {
            fields.push((ID.into(), message.id.to_string().into()));
            fields.extend(message.kind.iter().map(|kind| (TYPE.into(), kind.into())));
            fields.extend(message.key.iter().map(|key| (KEY.into(), key.into())));
            fields.push((OCCURRED_AT.into(), time(message.occurred_at).into()));
            (message.payload.clone(), message.content_type.as_str())
        }
        Format::CloudEvents { source } => {
            let attributes = attributes(message, source);
            fields.extend(attributes.map(|(name, value)| (format!("{prefix}{name}").into(), value)));
            (message.payload.clone(), message.content_type.as_str())
        }
        Format::CloudEventsStructured { source } => (structured(message, source), STRUCTURED),
    };
    fields.extend(message.headers.iter().map(|(name, value)| match taken(name, prefix) {
        true => (format!("{ESCAPED}{name}").into(), value.into()),
        false => (name.into(), value.into()),
    }));
    Wire { payload, content_type, fields }
}

/// The attributes of a message as a CloudEvent.
fn attributes<'a>(
    message: &'a Message,
    source: &'a str,
) -> impl Iterator<Item = (&'static str, Text<'a>)> + 'a {
    let always = [
        ("specversion", "1.0".into()),
        ("id", message.id.to_string().into()),
        ("source", source.into()),
        ("type", message.kind.as_ref().unwrap_or(&message.topic).into()),
        ("time", time(message.occurred_at).into()),
    ];
    let key = message.key.iter().flat_map(|key| [("subject", key.into()), ("partitionkey", key.into())]);
    always.into_iter().chain(key)
}

fn structured(message: &Message, source: &str) -> Bytes {
    let mut event: Map<String, Value> =
        attributes(message, source).map(|(name, value)| (name.to_owned(), Value::from(value))).collect();
    event.insert("datacontenttype".to_owned(), Value::from(message.content_type.clone()));
    let text = std::str::from_utf8(&message.payload).ok();
    let json = text.filter(|_| is_json(&message.content_type));
    // As it was written, down to the last space: a payload is not ours to tidy.
    if let Some(data) = json.and_then(|text| serde_json::from_str::<&RawValue>(text).ok()) {
        let mut whole = serde_json::to_string(&event).expect("texts can be written as JSON");
        whole.pop();
        return Bytes::from(format!("{whole},\"data\":{data}}}"));
    }
    match text.filter(|_| message.content_type.starts_with("text/")) {
        Some(text) => event.insert("data".to_owned(), Value::from(text)),
        None => event.insert("data_base64".to_owned(), Value::from(BASE64.encode(&message.payload))),
    };
    Bytes::from(serde_json::to_vec(&event).expect("texts can be written as JSON"))
}

/// Whether a header of the writer's would be taken for something else. A capability and a schedule are not the writer's
/// own, and travel as they are.
fn taken(name: &str, prefix: &str) -> bool {
    let ours = !matches!(name, CAPABILITY | DELIVER_AT | EXPIRES_AT);
    let name = name.to_ascii_lowercase();
    (ours && name.starts_with(OURS)) || name.starts_with(prefix) || name == CONTENT_TYPE
}

fn time(time: DateTime<Utc>) -> String {
    time.to_rfc3339_opts(SecondsFormat::AutoSi, true)
}

/// What a broker gave us.
#[derive(Clone, Debug)]
pub(crate) struct Arrived<'a> {
    pub(crate) topic: &'a str,
    pub(crate) payload: Bytes,
    /// Where the broker has a place of its own for it.
    pub(crate) content_type: Option<String>,
    /// The broker's own key, for messages that carry none of ours.
    pub(crate) key: Option<String>,
    /// All named texts.
    pub(crate) fields: Vec<(String, String)>,
    /// What names this message at the broker for good, the same at every redelivery: for messages of others.
    pub(crate) place: String,
    /// When the broker stored it: for messages of others.
    pub(crate) stored_at: Option<DateTime<Utc>>,
}

/// Reads what [`wire`] wrote, and whatever others write.
pub(crate) fn read(arrived: Arrived<'_>, prefix: &str, position: Position) -> Delivery {
    let Arrived { topic, payload, content_type, key, fields, place, stored_at } = arrived;
    let mut parts = Parts { key, content_type, ..Parts::default() };
    let mut event = Map::new();
    let mut message = Message::new(topic, payload);
    for (name, value) in fields {
        let lower = name.to_ascii_lowercase();
        if let Some(attribute) = lower.strip_prefix(prefix).filter(|_| !lower.starts_with(OURS)) {
            event.insert(attribute.to_owned(), Value::from(value));
        } else if let Err(value) = parts.take(&lower, value) {
            let name = match lower.starts_with(ESCAPED) {
                true => name[ESCAPED.len()..].to_owned(),
                false => name,
            };
            message.headers.insert(name, value);
        }
    }
    if parts.content_type.as_deref().is_some_and(|kind| kind.starts_with(STRUCTURED))
        && let Ok(mut whole) = serde_json::from_slice::<Map<String, Value>>(&message.payload)
    {
        if let Some(data) = data(&message.payload, &mut whole) {
            message.payload = data;
        }
        parts.content_type = text(&mut whole, "datacontenttype");
        event = whole;
    }
    if event.contains_key("specversion") {
        parts.attributes(&mut event);
        message.headers.extend(event.into_iter().filter_map(|(name, value)| match value {
            Value::String(value) => Some((name, value)),
            Value::Null => None,
            other => Some((name, other.to_string())),
        }));
    } else {
        // Not an event after all: a header that happens to begin like one.
        let texts = event.into_iter().filter_map(|(name, value)| Some((name, value.as_str()?.to_owned())));
        message.headers.extend(texts.map(|(name, value)| (format!("{prefix}{name}"), value)));
    }
    message.id = parts.id.unwrap_or_else(|| MessageId::from_content(topic, place.as_bytes()));
    message.kind = parts.kind;
    message.key = parts.key;
    if let Some(content_type) = parts.content_type {
        message.content_type = content_type;
    }
    if let Some(time) = parts.occurred_at.or(stored_at) {
        message.occurred_at = time;
    }
    make_legible(&mut message);
    Delivery { message, seq: parts.seq, delivery: parts.delivery, position }
}

/// Takes NUL out of what others wrote: a number for a key, say. No text of ours has one, and PostgreSQL keeps none.
fn make_legible(message: &mut Message) {
    let legible = |text: &mut String| {
        if text.contains('\0') {
            *text = text.replace('\0', "\u{fffd}");
        }
    };
    message.key.iter_mut().chain(&mut message.kind).for_each(legible);
    legible(&mut message.content_type);
    message.headers.values_mut().for_each(legible);
    if message.headers.keys().any(|name| name.contains('\0')) {
        let headers = std::mem::take(&mut message.headers).into_iter();
        message.headers = headers.map(|(name, value)| (name.replace('\0', "\u{fffd}"), value)).collect();
    }
}

/// What is known of a message by name.
#[derive(Debug, Default)]
struct Parts {
    id: Option<MessageId>,
    seq: Option<i64>,
    delivery: u32,
    kind: Option<String>,
    key: Option<String>,
    content_type: Option<String>,
    occurred_at: Option<DateTime<Utc>>,
}

impl Parts {
    /// Takes what is ours, or gives it back. What has our name and makes no sense is a header like any other.
    fn take(&mut self, name: &str, value: String) -> Result<(), String> {
        match name {
            ID => self.id = Some(value.parse().map_err(|_| value)?),
            SEQ => self.seq = Some(value.parse().map_err(|_| value)?),
            DELIVERY => self.delivery = value.parse().map_err(|_| value)?,
            OCCURRED_AT => self.occurred_at = Some(moment(&value).ok_or(value)?),
            TYPE => self.kind = Some(value),
            KEY => self.key = Some(value),
            CONTENT_TYPE => self.content_type = Some(value),
            _ => return Err(value),
        }
        Ok(())
    }

    /// Takes the attributes of an event; extensions of others stay.
    fn attributes(&mut self, event: &mut Map<String, Value>) {
        event.remove("specversion");
        let source = text(event, "source").unwrap_or_default();
        if let Some(id) = text(event, "id") {
            self.id = Some(id.parse().unwrap_or_else(|_| MessageId::from_content(&source, id.as_bytes())));
        }
        self.kind = text(event, "type");
        let subject = text(event, "subject");
        self.key = text(event, "partitionkey").or(subject).or(self.key.take());
        self.occurred_at = text(event, "time").and_then(|time| moment(&time)).or(self.occurred_at);
        if let Some(content_type) = text(event, "datacontenttype") {
            self.content_type = Some(content_type);
        }
    }
}

/// The payload of an event in structured mode, as it was written.
fn data(whole: &[u8], event: &mut Map<String, Value>) -> Option<Bytes> {
    #[derive(serde::Deserialize)]
    struct Data<'a> {
        #[serde(borrow)]
        data: Option<&'a RawValue>,
    }
    let kind = event.get("datacontenttype").and_then(Value::as_str).unwrap_or(Message::DEFAULT_CONTENT_TYPE);
    let json = is_json(kind);
    let value = event.remove("data");
    if let Some(encoded) = text(event, "data_base64") {
        return BASE64.decode(encoded).ok().map(Bytes::from);
    }
    match value? {
        Value::String(text) if !json => Some(Bytes::from(text)),
        _ => {
            let raw = serde_json::from_slice::<Data<'_>>(whole).ok()?.data?;
            Some(Bytes::copy_from_slice(raw.get().as_bytes()))
        }
    }
}

fn text(event: &mut Map<String, Value>, name: &str) -> Option<String> {
    match event.remove(name)? {
        Value::String(text) => Some(text),
        _ => None,
    }
}

fn is_json(content_type: &str) -> bool {
    let kind = content_type.split(';').next().unwrap_or_default().trim();
    kind == "application/json" || kind.ends_with("+json")
}

fn moment(text: &str) -> Option<DateTime<Utc>> {
    Some(DateTime::parse_from_rfc3339(text).ok()?.to_utc())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    const HERE: Position = Position { partition: 0, offset: 0 };

    fn full() -> Message {
        Message {
            occurred_at: DateTime::from_timestamp(1_700_000_000, 123_456_789).expect("a time"),
            ..Message::new("orders", "{\"a\" : 1}")
                .key("k ö")
                .kind("Placed")
                .header("traceparent", "00-1-2-01")
                .header("Postrider-Id", "mine")
                .header("content-type", "mine too")
                .header("ce_extra", "a header")
                .header("empty", "")
        }
    }

    fn back(wire: Wire<'_>) -> Delivery {
        let Wire { payload, content_type, fields } = wire;
        let content_type = Some(content_type.to_owned());
        let fields = fields.into_iter().map(|(name, value)| (name.into(), value.into())).collect();
        let arrived = Arrived {
            topic: "orders",
            payload,
            content_type,
            key: None,
            fields,
            place: "0/0".to_owned(),
            stored_at: None,
        };
        read(arrived, "ce_", HERE)
    }

    #[test]
    fn a_text_of_others_has_no_nul_in_it() {
        let text = |text: &str| text.to_owned();
        let arrived = Arrived {
            topic: "orders",
            payload: Bytes::from_static(b"1\0"),
            content_type: Some(text("a\0")),
            key: Some(text("\0\0\u{1}")),
            fields: vec![(text("x\0"), text("\0y")), (text("plain"), text("as it is"))],
            place: "0/1".to_owned(),
            stored_at: None,
        };
        let Delivery { message, .. } = read(arrived, "ce_", HERE);
        assert_eq!(message.key.as_deref(), Some("\u{fffd}\u{fffd}\u{1}"));
        assert_eq!((message.content_type.as_str(), &message.payload[..]), ("a\u{fffd}", &b"1\0"[..]));
        assert_eq!((&*message.headers["x\u{fffd}"], &*message.headers["plain"]), ("\u{fffd}y", "as it is"));
    }

    #[test]
    fn a_message_comes_back_as_it_was_in_every_format() {
        let source: Arc<str> = "/shop".into();
        let formats = [
            Format::Native,
            Format::CloudEvents { source: source.clone() },
            Format::CloudEventsStructured { source },
        ];
        let binary = Message { payload: Bytes::from_static(b"\xff\x00"), ..full() };
        let binary = Message { content_type: "application/octet-stream".to_owned(), ..binary };
        let words = Message { payload: "hällo".into(), content_type: "text/plain".to_owned(), ..full() };
        let broken = Message { payload: "{not json".into(), ..full() };
        for message in [full(), binary, words, broken] {
            for format in &formats {
                let outgoing =
                    Outgoing { message: message.clone().into(), seq: 7, delivery: 2, format: format.clone() };
                let came = back(wire(&outgoing, "ce_"));
                assert_eq!(came.message, message, "{format:?}");
                assert_eq!((came.seq, came.delivery), (Some(7), 2));
            }
        }
    }

    #[test]
    fn a_message_of_somebody_else_is_the_same_at_every_redelivery() {
        let arrived = |place: &str| Arrived {
            topic: "orders",
            payload: Bytes::from_static(b"1"),
            content_type: None,
            key: Some("native".to_owned()),
            fields: vec![("x".to_owned(), "y".to_owned()), (SEQ.to_owned(), "many".to_owned())],
            place: place.to_owned(),
            stored_at: DateTime::from_timestamp(1, 0),
        };
        let (once, again, other) = (
            read(arrived("3/9"), "ce_", HERE),
            read(arrived("3/9"), "ce_", HERE),
            read(arrived("3/10"), "ce_", HERE),
        );
        assert_eq!(once, again);
        assert_ne!(once.message.id, other.message.id);
        assert_eq!((once.message.key.as_deref(), once.seq), (Some("native"), None));
        assert_eq!(once.message.headers[SEQ], "many", "what makes no sense is kept as it is");
    }

    #[test]
    fn an_event_of_somebody_else_is_read() {
        let event =
            r#"{"specversion":"1.0","id":"A-1","source":"/them","type":"paid","data":{"n": 1},"tenant":"x"}"#;
        let wire = Wire {
            payload: event.into(),
            content_type: "application/cloudevents+json; charset=utf-8",
            fields: Vec::new(),
        };
        let came = back(wire.clone());
        assert_eq!(came.message.id, back(wire).message.id);
        assert_eq!(came.message.kind.as_deref(), Some("paid"));
        assert_eq!(&came.message.payload[..], br#"{"n": 1}"#);
        assert_eq!(came.message.headers["tenant"], "x");
    }
}
