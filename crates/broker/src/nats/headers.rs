//! What travels beside a payload, as NATS headers.
//!
//! Clients trim the values of headers, and the server obeys headers that begin with `Nats-`. So a value with spaces at
//! its ends travels percent-encoded and is named in a header of ours, and a writer's own `Nats-…` is put out of the
//! server's reach.

use std::str::FromStr;

use async_nats::header::{HeaderMap, HeaderName, HeaderValue, NATS_EXPECTED_STREAM, NATS_MESSAGE_ID};
use percent_encoding::{NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};

use crate::Outgoing;
use crate::envelope::{self, CONTENT_TYPE, ESCAPED, Wire};

/// What the attributes of CloudEvents begin with.
pub(super) const EVENT: &str = "ce-";

/// Names the headers whose values are percent-encoded.
const ENCODED: &str = "postrider-encoded";

/// What the server takes for its own.
const SERVERS: &str = "nats-";

/// A message as it goes over the wire.
pub(super) struct Written {
    pub(super) headers: HeaderMap,
    pub(super) payload: bytes::Bytes,
    /// Bytes, as the server counts them.
    pub(super) size: usize,
}

/// Writes a message down for `stream`, or says why it cannot be.
pub(super) fn write(outgoing: &Outgoing, stream: &str) -> Result<Written, String> {
    let Wire { payload, content_type, fields } = envelope::wire(outgoing, EVENT);
    let mut headers = HeaderMap::new();
    // The server recognises a message by this. The same message, sent again on purpose, is another.
    let id = format!("{}.{}", outgoing.message.id, outgoing.delivery);
    let mut encoded = Vec::new();
    let mut size = b"NATS/1.0\r\n\r\n".len() + payload.len();
    let mut put = |name: &str, value: &str| -> Result<(), String> {
        let wrong = || format!("the header `{name}` cannot be sent over NATS");
        size += name.len() + value.len() + b": \r\n".len();
        let name = HeaderName::from_str(name).map_err(|_| wrong())?;
        headers.insert(name, HeaderValue::from_str(value).map_err(|_| wrong())?);
        Ok(())
    };
    put(NATS_MESSAGE_ID.as_ref(), &id)?;
    put(NATS_EXPECTED_STREAM.as_ref(), stream)?;
    put(CONTENT_TYPE, content_type)?;
    for (name, value) in &fields {
        let escaped = begins_with(name, SERVERS).then(|| format!("{ESCAPED}{name}"));
        let name = escaped.as_deref().unwrap_or(name);
        if value.trim() == value {
            put(name, value)?;
        } else {
            put(name, &utf8_percent_encode(value, NON_ALPHANUMERIC).to_string())?;
            encoded.push(name.to_owned());
        }
    }
    if !encoded.is_empty() {
        put(ENCODED, &encoded.join(" "))?;
    }
    Ok(Written { headers, payload, size })
}

/// The named texts of a message that came, without those that the server is told by.
pub(super) fn read(headers: Option<&HeaderMap>) -> Vec<(String, String)> {
    let Some(headers) = headers else { return Vec::new() };
    let encoded: Vec<&str> =
        headers.get(ENCODED).map(|names| names.as_str().split(' ').collect()).unwrap_or_default();
    let ours = headers.iter().filter(|(name, _)| {
        let name: &str = name.as_ref();
        name != ENCODED && !begins_with(name, SERVERS)
    });
    ours.filter_map(|(name, values)| {
        let (name, value) = (name.to_string(), values.last()?.as_str());
        let value = match encoded.contains(&name.as_str()) {
            true => percent_decode_str(value).decode_utf8_lossy().into_owned(),
            false => value.to_owned(),
        };
        Some((name, value))
    })
    .collect()
}

fn begins_with(name: &str, beginning: &str) -> bool {
    name.get(..beginning.len()).is_some_and(|start| start.eq_ignore_ascii_case(beginning))
}

#[cfg(test)]
mod tests {
    use message::Message;

    use super::*;
    use crate::envelope::Arrived;
    use crate::{Delivery, Position};

    fn back(written: Written) -> Delivery {
        // As a client reads them: without the spaces around a value.
        let mut headers = HeaderMap::new();
        for (name, values) in written.headers.iter() {
            headers.insert(name.clone(), values.last().expect("one").as_str().trim());
        }
        let arrived = Arrived {
            topic: "orders",
            payload: written.payload,
            content_type: None,
            key: None,
            fields: read(Some(&headers)),
            place: String::new(),
            stored_at: None,
        };
        envelope::read(arrived, EVENT, Position { partition: 0, offset: 0 })
    }

    #[test]
    fn headers_that_nats_would_change_or_obey_arrive_as_they_were() {
        let message = Message::new("orders", "1")
            .key(" k ")
            .header("spaced", "  two and one ")
            .header("Nats-Expected-Last-Sequence", "7")
            .header("nats-msg-id", "mine")
            .header("percent", "%20")
            .header("empty", "");
        let outgoing = Outgoing { delivery: 3, ..Outgoing::new(message.clone(), 1) };
        let written = write(&outgoing, "shop").expect("it can be written");
        assert_eq!(
            written.headers.get(NATS_MESSAGE_ID).map(HeaderValue::as_str),
            Some(&*format!("{}.3", message.id))
        );
        assert!(written.headers.get("Nats-Expected-Last-Sequence").is_none());
        let came = back(written);
        assert_eq!(came.message, message);
        assert_eq!(came.delivery, 3);
    }

    #[test]
    fn a_header_that_cannot_be_sent_is_the_fault_of_its_message() {
        for (name, value) in [("a b", "1"), ("a:b", "1"), ("a", "1\r\nNats-Rollup: all")] {
            let outgoing = Outgoing::new(Message::new("orders", "").header(name, value), 1);
            let error = write(&outgoing, "shop").err().expect("it cannot be written");
            assert!(error.contains(name), "{error}");
        }
    }
}
