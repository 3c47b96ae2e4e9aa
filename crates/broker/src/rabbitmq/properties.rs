//! A message as RabbitMQ carries it: what AMQP has a property for is there, and everything is in the headers too, under
//! the names that all brokers share.

use chrono::DateTime;
use lapin::BasicProperties;
use lapin::message::Delivery as Delivered;
use lapin::types::{AMQPValue, FieldTable, ShortString};
use message::MessageId;

use crate::envelope::{Arrived, ID, TYPE, Wire, read, wire};
use crate::{Delivery, Outgoing, Position};

/// What the attributes of CloudEvents begin with among our texts. On the wire it is written as their binding to AMQP
/// has it: [`BINDING`].
const EVENT: &str = "cloudevents_";

/// The first is what we write; others write the second.
const BINDING: [&str; 2] = ["cloudEvents_", "cloudEvents:"];

/// What quorum queues add of their own when they deliver once more: not a header of the writer's.
const COUNTS: [&str; 2] = ["x-delivery-count", "x-acquired-count"];

/// AMQP's number for: on disk.
const PERSISTENT: u8 = 2;

/// The payload and its properties, or why AMQP cannot carry them.
pub(super) fn write(outgoing: &Outgoing) -> Result<(bytes::Bytes, BasicProperties), String> {
    let Wire { payload, content_type, fields } = wire(outgoing, EVENT);
    let mut headers = FieldTable::default();
    for (name, value) in fields {
        let name = match name.strip_prefix(EVENT) {
            Some(attribute) => format!("{}{attribute}", BINDING[0]),
            None => name.into(),
        };
        headers
            .insert(short("the name of a header", name)?, AMQPValue::LongString(value.into_owned().into()));
    }
    let message = &outgoing.message;
    let mut properties = BasicProperties::default()
        .with_delivery_mode(PERSISTENT)
        .with_message_id(short("the id", message.id.to_string())?)
        .with_content_type(short("the content type", content_type.to_owned())?)
        .with_headers(headers);
    if let Ok(seconds) = u64::try_from(message.occurred_at.timestamp()) {
        properties = properties.with_timestamp(seconds);
    }
    if let Some(kind) = &message.kind {
        properties = properties.with_type(short("the type", kind.clone())?);
    }
    Ok((payload, properties))
}

fn short(what: &str, text: String) -> Result<ShortString, String> {
    ShortString::try_new(text)
        .map_err(|_| format!("{what} is longer than the 255 bytes that AMQP has for it"))
}

/// Reads a message of ours or of somebody else.
pub(super) fn arrived(topic: &str, delivered: Delivered, position: Position) -> Delivery {
    let Delivered { properties, data, .. } = delivered;
    let mut fields: Vec<(String, String)> = Vec::new();
    for (name, value) in properties.headers().iter().flatten() {
        let name = name.as_str();
        if let Some(value) = text(value).filter(|_| !COUNTS.contains(&name)) {
            let attribute = BINDING.iter().find_map(|binding| name.strip_prefix(binding));
            fields.push((attribute.map_or(name.to_owned(), |name| format!("{EVENT}{name}")), value));
        }
    }
    let id = properties.message_id().as_ref().map(ShortString::to_string);
    let has = |fields: &[(String, String)], name| fields.iter().any(|(field, _)| field == name);
    if let Some(id) = id.as_ref().filter(|id| id.parse::<MessageId>().is_ok() && !has(&fields, ID)) {
        fields.push((ID.to_owned(), id.clone()));
    }
    if let Some(kind) = properties.kind().as_ref().filter(|_| !has(&fields, TYPE)) {
        fields.push((TYPE.to_owned(), kind.to_string()));
    }
    let seconds = properties.timestamp().and_then(|seconds| i64::try_from(seconds).ok());
    let arrived = Arrived {
        topic,
        payload: data.into(),
        content_type: properties.content_type().as_ref().map(ShortString::to_string),
        key: None,
        fields,
        // RabbitMQ itself has nothing that names a message. One that was sent without an id is a new one at every
        // delivery: to go by its content would take the second of two equal orders for the first.
        place: id.unwrap_or_else(|| uuid::Uuid::now_v7().to_string()),
        stored_at: seconds.and_then(|seconds| DateTime::from_timestamp(seconds, 0)),
    };
    read(arrived, EVENT, position)
}

/// A header as text, where it is something that can be one.
fn text(value: &AMQPValue) -> Option<String> {
    match value {
        AMQPValue::Boolean(value) => Some(value.to_string()),
        AMQPValue::ShortShortInt(value) => Some(value.to_string()),
        AMQPValue::ShortShortUInt(value) => Some(value.to_string()),
        AMQPValue::ShortInt(value) => Some(value.to_string()),
        AMQPValue::ShortUInt(value) => Some(value.to_string()),
        AMQPValue::LongInt(value) => Some(value.to_string()),
        AMQPValue::LongUInt(value) => Some(value.to_string()),
        AMQPValue::LongLongInt(value) => Some(value.to_string()),
        AMQPValue::Float(value) => Some(value.to_string()),
        AMQPValue::Double(value) => Some(value.to_string()),
        AMQPValue::Timestamp(value) => Some(value.to_string()),
        AMQPValue::ShortString(value) => Some(value.to_string()),
        AMQPValue::LongString(value) => Some(value.to_string()),
        AMQPValue::DecimalValue(_)
        | AMQPValue::FieldArray(_)
        | AMQPValue::FieldTable(_)
        | AMQPValue::ByteArray(_)
        | AMQPValue::Void => None,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use message::Message;

    use super::*;
    use crate::Format;

    const HERE: Position = Position { partition: 0, offset: 0 };

    fn delivered(properties: BasicProperties, data: &[u8]) -> Delivered {
        let mut delivered = Delivered::mock(1, "postrider".into(), "orders.@0".into(), false, data.to_vec());
        delivered.properties = properties;
        delivered
    }

    #[test]
    fn a_message_comes_back_as_it_was_in_every_format() {
        let source: Arc<str> = "/shop".into();
        let formats = [
            Format::Native,
            Format::CloudEvents { source: source.clone() },
            Format::CloudEventsStructured { source },
        ];
        let message = Message::new("orders", "{}").key("k").kind("Placed").header("cloudevents_x", "mine");
        for format in formats {
            let outgoing = Outgoing { format: format.clone(), ..Outgoing::new(message.clone(), 7) };
            let (payload, properties) = write(&outgoing).expect("it can be written");
            assert_eq!(properties.delivery_mode(), &Some(PERSISTENT));
            let came = arrived("orders", delivered(properties, &payload), HERE);
            assert_eq!(came.message, message, "{format:?}");
        }
    }

    #[test]
    fn a_message_of_somebody_else_is_read_by_its_properties() {
        let mut headers = FieldTable::default();
        headers.insert("tries".into(), AMQPValue::LongInt(3));
        headers.insert("x-delivery-count".into(), AMQPValue::LongInt(1));
        headers.insert("x-death".into(), AMQPValue::Void);
        let properties = BasicProperties::default()
            .with_message_id("A-1".into())
            .with_type("Paid".into())
            .with_timestamp(1_700_000_000)
            .with_content_type("text/plain".into())
            .with_headers(headers);
        let came = arrived("orders", delivered(properties.clone(), b"1"), HERE).message;
        assert_eq!(came.id, arrived("orders", delivered(properties, b"1"), HERE).message.id);
        assert_eq!((came.kind.as_deref(), came.content_type.as_str()), (Some("Paid"), "text/plain"));
        assert_eq!(came.occurred_at.timestamp(), 1_700_000_000);
        assert_eq!(came.headers.into_iter().collect::<Vec<_>>(), [("tries".to_owned(), "3".to_owned())]);
    }

    #[test]
    fn two_equal_messages_without_an_id_are_two() {
        let came = || arrived("orders", delivered(BasicProperties::default(), b"1"), HERE).message.id;
        assert_ne!(came(), came());
    }

    #[test]
    fn what_amqp_cannot_carry_is_said() {
        let outgoing = Outgoing::new(Message::new("orders", "1").kind("x".repeat(256)), 1);
        assert!(write(&outgoing).expect_err("too long").contains("the type"));
    }
}
