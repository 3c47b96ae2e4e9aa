//! A message as a request, and back.
//!
//! What begins with `postrider-` or `ce-` is percent-encoded as CloudEvents' HTTP binding does it. A header of the
//! writer's goes out as it is; where HTTP could not carry it or would take it for its own, it travels as
//! `postrider-header-NAME`, percent-encoded.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use message::Message;
use percent_encoding::{AsciiSet, CONTROLS, percent_decode_str, utf8_percent_encode};

use super::{Config, sign};
use crate::envelope::{Arrived, ESCAPED, wire};
use crate::{Outgoing, Position, Unopened};

const TOPIC: &str = "postrider-topic";
const IDEMPOTENCY_KEY: &str = "idempotency-key";

/// What the names of ours begin with, and those of CloudEvents.
const OURS: &str = "postrider-";
const EVENT: &str = "ce-";

/// What CloudEvents' HTTP binding percent-encodes, beside everything that is not ASCII.
const UNSAFE: &AsciiSet = &CONTROLS.add(b' ').add(b'"').add(b'%');

/// Headers that belong to HTTP, to a proxy on the way or to webhooks: never the writer's.
fn reserved(name: &str) -> bool {
    const NAMES: [&str; 20] = [
        "accept",
        "accept-encoding",
        "authorization",
        "connection",
        "content-length",
        "cookie",
        "date",
        "expect",
        "forwarded",
        "host",
        IDEMPOTENCY_KEY,
        "keep-alive",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "user-agent",
        "via",
        "x-real-ip",
        "http2-settings",
    ];
    const BEGINNINGS: [&str; 4] = ["proxy-", "sec-", "webhook-", "x-forwarded-"];
    let name = name.to_ascii_lowercase();
    NAMES.contains(&&*name) || BEGINNINGS.iter().any(|beginning| name.starts_with(beginning))
}

/// What every request to a destination has.
pub(super) fn always(config: &Config) -> Result<HeaderMap, Unopened> {
    let mut headers = HeaderMap::new();
    headers.insert(header::ACCEPT, HeaderValue::from_static("*/*"));
    let us = concat!("postrider/", env!("CARGO_PKG_VERSION"));
    headers.insert(header::USER_AGENT, HeaderValue::from_static(us));
    if let Some((user, password)) = &config.login {
        let login = BASE64.encode(format!("{user}:{}", password.reveal()));
        let mut value = HeaderValue::try_from(format!("Basic {login}"))
            .map_err(|error| Unopened::Broken(format!("the login of the URL: {error}")))?;
        value.set_sensitive(true);
        headers.insert(header::AUTHORIZATION, value);
    }
    Ok(headers)
}

/// A message that is ready to be sent, again and again.
pub(super) struct Letter {
    /// The same at every attempt; another one when somebody sends the message again on purpose.
    pub(super) id: String,
    pub(super) payload: Bytes,
    headers: HeaderMap,
}

impl Letter {
    /// Writes a message down.
    ///
    /// # Errors
    /// When HTTP cannot carry it.
    pub(super) fn new(outgoing: &Outgoing, always: &HeaderMap) -> Result<Self, String> {
        let message = &outgoing.message;
        let id = match outgoing.delivery {
            0 => message.id.to_string(),
            again => format!("{}_{again}", message.id),
        };
        let wire = wire(outgoing, EVENT);
        let mut headers = always.clone();
        let mut add = |name: &str, value: &str| {
            let wrong =
                |error: &dyn std::fmt::Display| format!("the header `{name}` cannot be sent: {error}");
            let header = HeaderName::try_from(name).map_err(|error| wrong(&error))?;
            headers.append(header, HeaderValue::try_from(value).map_err(|error| wrong(&error))?);
            Ok::<(), String>(())
        };
        add(header::CONTENT_TYPE.as_str(), wire.content_type)?;
        add(TOPIC, &encoded(&message.topic))?;
        add(sign::ID, &id)?;
        add(IDEMPOTENCY_KEY, &id)?;
        for (name, value) in &wire.fields {
            if name.starts_with(OURS) || name.starts_with(EVENT) {
                add(name, &encoded(value))?;
            } else if reserved(name) || !is_plain(value) {
                add(&format!("{ESCAPED}{name}"), &encoded(value))?;
            } else {
                add(name, value)?;
            }
        }
        Ok(Self { id, payload: wire.payload, headers })
    }

    /// The headers of an attempt at this time.
    pub(super) fn headers(&self, keys: &[sign::Key], timestamp: i64) -> HeaderMap {
        let mut headers = self.headers.clone();
        headers.insert(sign::TIMESTAMP, HeaderValue::from(timestamp));
        let signature = sign::sign(keys, &self.id, &timestamp.to_string(), &self.payload);
        if let Ok(value) = HeaderValue::try_from(signature)
            && !value.is_empty()
        {
            headers.insert(sign::SIGNATURE, value);
        }
        headers
    }
}

fn encoded(value: &str) -> String {
    utf8_percent_encode(value, UNSAFE).to_string()
}

/// Whether HTTP carries this text as it is: ASCII, and no space at an end, where it would be lost.
fn is_plain(value: &str) -> bool {
    value.bytes().all(|byte| (b' '..=b'~').contains(&byte)) && value.trim() == value
}

/// A payload that knows whether a part of its request may have been sent.
pub(super) struct Payload {
    data: Option<Bytes>,
    begun: Arc<AtomicBool>,
}

impl Payload {
    pub(super) fn new(data: Bytes, begun: Arc<AtomicBool>) -> Self {
        Self { data: Some(data), begun }
    }
}

impl Body for Payload {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        self.begun.store(true, Ordering::Relaxed);
        Poll::Ready(self.data.take().filter(|data| !data.is_empty()).map(|data| Ok(Frame::data(data))))
    }

    /// The first question of a connection that is about to write the head, and the only one about an empty payload.
    fn is_end_stream(&self) -> bool {
        self.begun.store(true, Ordering::Relaxed);
        self.data.as_ref().is_none_or(Bytes::is_empty)
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.data.as_ref().map_or(0, |data| data.len() as u64))
    }
}

/// A message that a receiver got.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    /// The message. The names of its headers are in small letters, as HTTP has no others.
    pub message: Message,
    /// Its place in the producer's order.
    pub seq: Option<i64>,
    /// Which deliberate delivery this is.
    pub delivery: u32,
}

/// Reads a request that Postrider made, in any of its formats. Believe it only after [`verify`](super::verify): this
/// does not. `None` when the request has no `postrider-topic`, so that it is somebody else's.
pub fn read(headers: &HeaderMap, body: Bytes) -> Option<Received> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let topic = decoded(text(TOPIC)?);
    let fields = headers.iter().filter_map(|(name, value)| {
        let (name, value) = (name.as_str(), value.to_str().ok()?);
        let skipped = name == TOPIC || name == header::CONTENT_TYPE.as_str() || reserved(name);
        let ours = name.starts_with(OURS) || name.starts_with(EVENT);
        (!skipped).then(|| (name.to_owned(), if ours { decoded(value) } else { value.to_owned() }))
    });
    let arrived = Arrived {
        topic: &topic,
        payload: body,
        content_type: text(header::CONTENT_TYPE.as_str()).map(str::to_owned),
        key: None,
        fields: fields.collect(),
        place: text(sign::ID).unwrap_or_default().to_owned(),
        stored_at: None,
    };
    let delivery = crate::envelope::read(arrived, EVENT, Position { partition: 0, offset: 0 });
    Some(Received { message: delivery.message, seq: delivery.seq, delivery: delivery.delivery })
}

fn decoded(value: &str) -> String {
    percent_decode_str(value).decode_utf8_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use chrono::DateTime;

    use super::*;
    use crate::Format;

    fn full() -> Message {
        Message {
            occurred_at: DateTime::from_timestamp(1_700_000_000, 123_456_789).expect("a time"),
            ..Message::new("orders", "{\"a\" : 1}")
                .key("k ö \"1%\"")
                .kind("Placed")
                .header("traceparent", "00-1-2-01")
                .header("baggage", "who=a%20b, x=\"1\"")
                .header("city", "Köln")
                .header("padded", " two words ")
                .header("empty", "")
                .header("host", "elsewhere.example")
                .header("transfer-encoding", "chunked")
                .header("content-length", "0")
                .header("authorization", "Basic mine")
                .header("webhook-signature", "v1,mine")
                .header("postrider-id", "mine")
                .header("postrider-topic", "mine")
                .header("content-type", "mine too")
                .header("ce-id", "a header")
                .header("dots.and_more", "1")
        }
    }

    fn written(outgoing: &Outgoing) -> Letter {
        let config = Config::from_url("https://ann:hush@example.com/hook").expect("it is one");
        Letter::new(outgoing, &always(&config).expect("headers")).expect("it can be sent")
    }

    #[test]
    fn a_message_comes_back_as_it_was_in_every_format() {
        let source: Arc<str> = "/shop".into();
        let formats = [
            Format::Native,
            Format::CloudEvents { source: source.clone() },
            Format::CloudEventsStructured { source },
        ];
        for format in formats {
            let outgoing = Outgoing { message: full().into(), seq: i64::MAX, delivery: 2, format };
            let letter = written(&outgoing);
            let came = read(&letter.headers(&[], 7), letter.payload.clone()).expect("it is ours");
            assert_eq!(came.message, *outgoing.message, "{:?}", outgoing.format);
            assert_eq!((came.seq, came.delivery), (Some(i64::MAX), 2));
        }
        assert_eq!(read(&HeaderMap::new(), Bytes::new()), None);
    }

    #[test]
    fn no_header_of_a_writer_is_taken_for_one_of_http() {
        let headers = written(&Outgoing::new(full(), 1)).headers(&[], 7);
        for name in ["host", "transfer-encoding", "content-length", "webhook-signature"] {
            assert!(!headers.contains_key(name), "{name}");
        }
        assert_eq!(headers["authorization"], "Basic YW5uOmh1c2g=");
        assert_eq!(headers.get_all("content-type").iter().count(), 1);
        let plain = [("traceparent", "00-1-2-01"), ("baggage", "who=a%20b, x=\"1\""), ("empty", "")];
        for (name, value) in plain {
            assert_eq!(headers[name], value, "others read it by its own name");
        }
        assert_eq!(headers["postrider-header-city"], "K%C3%B6ln");
        assert_eq!(headers["postrider-key"], "k%20%C3%B6%20%221%25%22");
    }

    #[test]
    fn the_id_is_the_same_at_every_attempt_and_another_at_a_new_delivery() {
        let outgoing = Outgoing::new(full(), 1);
        let (one, two) = (written(&outgoing).headers(&[], 1), written(&outgoing).headers(&[], 2));
        assert_eq!(one["webhook-id"], two["webhook-id"]);
        assert_eq!(one["webhook-id"], outgoing.message.id.to_string());
        assert_eq!(one["idempotency-key"], one["webhook-id"]);
        assert_ne!(one["webhook-timestamp"], two["webhook-timestamp"]);
        let again = written(&Outgoing { delivery: 1, ..outgoing }).headers(&[], 1);
        assert_ne!(again["webhook-id"], one["webhook-id"]);
        assert!(
            !again["webhook-id"].to_str().expect("text").contains('.'),
            "a full stop divides what is signed"
        );
    }

    #[test]
    fn what_http_cannot_carry_is_said() {
        let always = HeaderMap::new();
        let message = Message { content_type: "text/plän\n".to_owned(), ..full() };
        let error = Letter::new(&Outgoing::new(message, 1), &always).err().expect("it cannot be sent");
        assert!(error.contains("content-type"), "{error}");
        let error =
            Letter::new(&Outgoing::new(full().header("a b", "1"), 1), &always).err().expect("nor this");
        assert!(error.contains("`a b`"), "{error}");
    }
}
