//! Taking messages in, once each.

use std::time::Duration;

use bytes::Bytes;
use message::{Message, MessageId, Status};
use serde_json::value::RawValue;
use sha2::{Digest, Sha256};
use store::{Appended, Arrival, NewMessage, Once, Turned};

use super::{Desk, Express};
use crate::payload::{compact, depth};
use crate::request::{EXAMPLE_ID, IdFrom, TestRequest};
use crate::{Problem, ProblemKind, SendAnswer, SendRequest};

/// Deeper JSON makes recursive readers overflow their stack: consumers would crash on it.
const DEEPEST: usize = 128;

impl Desk {
    /// Takes a message in. With an `idempotency_key`, an id of the caller's or one made from the message,
    /// it is stored once however often it is asked for.
    ///
    /// # Errors
    /// Says what is wrong with the request, or that its key or id belongs to a different one.
    ///
    /// # Cancel safety
    /// A call that is dropped may or may not have stored the message; with a key it can be repeated.
    pub async fn send(
        &self,
        request: SendRequest,
        idempotency_key: Option<&str>,
    ) -> Result<SendAnswer, Problem> {
        check_depth(request.message.get())?;
        message::check_topic(&request.topic)?;
        self.topology.check_route(&request.topic)?;
        let mut ack_groups = self.topology.ack_groups(&request.topic, request.consumer_group.as_deref())?;
        if request.consumer_group.is_none() && !self.topology.sends_again(&request.topic) {
            // What may be lost would be waited for, and kept, for ever.
            ack_groups.clear();
        }
        let deliver_after = wait("deliverAfter", request.deliver_after.as_deref())?;
        let expires_after = wait("expiresAfter", request.expires_after.as_deref())?;
        let chosen = chosen_id(&request)?;
        let once = once(&request, idempotency_key, chosen)?;
        let by_key = idempotency_key.is_some();

        let mut message = Message::new(request.topic, bytes(request.message));
        message.id = chosen.unwrap_or(message.id);
        message.kind = request.kind;
        message.key = request.key;
        message.headers = request.headers;
        if let Some(wait) = deliver_after {
            message = message.deliver_after(wait);
        }
        if let Some(wait) = expires_after {
            message = message.expires_after(wait);
        }
        message.check(&self.limits)?;

        // Only the store can recognise a repetition, and only it waits.
        if once.is_none()
            && !message.is_scheduled()
            && self.topology.bypasses_store(&message.topic)
            && let Some(express) = &self.express
        {
            return self.send_past_the_store(&**express, message);
        }
        let new = NewMessage { message, ack_groups: Some(ack_groups), once };
        let (message_id, repeated) = match self.store.append(vec![new]).await?.pop() {
            Some(Ok(Appended::New(id))) => (id, false),
            Some(Ok(Appended::Repeated(id))) => (id, true),
            Some(Err(turned)) => return Err(turned_away(&turned, by_key, chosen)),
            None => {
                return Err(Problem::new(
                    ProblemKind::Internal,
                    "store-broken",
                    "The store needs attention",
                    "The store did not say what became of the message. Its operator has to look at it.",
                ));
            }
        };
        Ok(SendAnswer { message_id, status: Status::Pending, repeated, stored: true })
    }

    fn send_past_the_store(&self, express: &dyn Express, message: Message) -> Result<SendAnswer, Problem> {
        let (message_id, topic) = (message.id, message.topic.clone());
        let route = self.topology.route_of(&topic).map_or("", |route| &route.name);
        match express.send(route, message) {
            Ok(()) => Ok(SendAnswer { message_id, status: Status::InFlight, repeated: false, stored: false }),
            Err(reason) => Err(Problem::new(
                ProblemKind::Unavailable,
                "not-taken",
                "The message was not taken",
                format!(
                    "The route `{route}` keeps nothing and does not wait: {reason}. The message is lost unless it is sent \
                     again."
                ),
            )),
        }
    }

    /// The arrival that a test of a consumer group's handler asks for.
    ///
    /// # Errors
    /// Says what is wrong with the request.
    pub fn arrival(&self, request: TestRequest) -> Result<Arrival, Problem> {
        check_depth(request.message.get())?;
        let mut message = Message::new(request.topic, bytes(request.message));
        if let Some(id) = &request.message_id {
            message.id = parse_chosen(id)?;
        }
        message.kind = request.kind;
        message.key = request.key;
        message.headers = request.headers;
        message.check(&self.limits)?;
        Ok(Arrival { message, seq: None, delivery: 0 })
    }
}

/// The JSON as it was written, without copying it.
fn bytes(json: Box<RawValue>) -> Bytes {
    Bytes::from(String::from(Box::<str>::from(json)))
}

/// Longer than anybody means to wait: more is a slip of the pen.
const LONGEST_WAIT: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

/// A time to wait, as people write it.
fn wait(field: &str, text: Option<&str>) -> Result<Option<Duration>, Problem> {
    let read = |text: &str| {
        let read = humantime::parse_duration(text.trim()).ok().filter(|wait| *wait <= LONGEST_WAIT);
        read.ok_or_else(|| {
            let shown: String = text.chars().take(40).collect();
            Problem::bad_request(
                "bad-duration",
                "That is not a duration",
                format!(
                    "`{field}` is `{}`: write a number and a unit, such as 30s, 10m or 2h, of 100 years at most.",
                    shown.escape_debug()
                ),
            )
        })
    };
    text.map(read).transpose()
}

fn check_depth(json: &str) -> Result<(), Problem> {
    let depth = depth(json);
    if depth <= DEEPEST {
        return Ok(());
    }
    Err(Problem::bad_request(
        "too-deep",
        "The message is nested too deeply",
        format!(
            "The message is nested {depth} levels deep and {DEEPEST} is the limit: flatten it, or send it as a string."
        ),
    ))
}

/// The id that the caller chose, directly or by what the message says.
fn chosen_id(request: &SendRequest) -> Result<Option<MessageId>, Problem> {
    match (&request.message_id, &request.id_from) {
        (Some(_), Some(_)) => Err(Problem::bad_request(
            "two-ids",
            "The id is given twice",
            "`messageId` and `idFrom` both choose the id: leave one of them out.",
        )),
        (Some(id), None) => parse_chosen(id).map(Some),
        (None, Some(IdFrom::Content(_))) => {
            let content = compact(request.message.get());
            Ok(Some(MessageId::from_content(&request.topic, content.as_bytes())))
        }
        (None, Some(IdFrom::Fields(fields))) => id_from_fields(request, fields).map(Some),
        (None, None) => Ok(None),
    }
}

fn id_from_fields(request: &SendRequest, fields: &[String]) -> Result<MessageId, Problem> {
    let bad =
        |detail: String| Problem::bad_request("bad-id-from", "No id can be made from the message", detail);
    if fields.is_empty() {
        return Err(bad("`idFrom` names no field: name at least one, or use \"content\".".to_owned()));
    }
    let value = serde_json::from_str(request.message.get())
        .map_err(|error| bad(format!("The message cannot be read to make its id: {error}.")))?;
    MessageId::from_fields(&request.topic, &value, fields).map_err(|missing| {
        bad(format!("`idFrom` cannot be used: {missing}. Add the field, or name others of the message."))
    })
}

fn parse_chosen(id: &str) -> Result<MessageId, Problem> {
    id.parse().map_err(|_| {
        let shown: String = id.chars().take(64).collect();
        Problem::bad_request(
            "bad-id",
            "That is not a message id",
            format!(
                "`messageId` must be a UUID such as {EXAMPLE_ID}; it is `{}`. To make the id from your own names, \
                 use `idFrom` with the fields that identify the message, or send your name as `Idempotency-Key`.",
                shown.escape_debug()
            ),
        )
    })
}

fn once(
    request: &SendRequest,
    idempotency_key: Option<&str>,
    chosen: Option<MessageId>,
) -> Result<Option<Once>, Problem> {
    let key = match (idempotency_key, chosen) {
        (Some(key), _) => {
            check_key(key)?;
            format!("key:{key}")
        }
        (None, Some(id)) => format!("id:{id}"),
        (None, None) => return Ok(None),
    };
    Ok(Some(Once { key, fingerprint: fingerprint(request) }))
}

fn check_key(key: &str) -> Result<(), Problem> {
    if (1..=255).contains(&key.len()) && key.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Ok(());
    }
    Err(Problem::bad_request(
        "bad-idempotency-key",
        "That cannot be an idempotency key",
        "`Idempotency-Key` must have 1 to 255 visible ASCII characters without spaces: a UUID, say, or \
         `order-12345-payment-1`.",
    ))
}

/// A digest of all that the caller asked for. Spaces between tokens and the order of the outer fields mean
/// nothing; everything else does, because to take a different request for a repetition would lose it.
fn fingerprint(request: &SendRequest) -> [u8; 32] {
    let written = serde_json::to_string(request).expect("a request of strings and JSON is always JSON");
    Sha256::digest(compact(&written)).into()
}

fn turned_away(turned: &Turned, by_key: bool, chosen: Option<MessageId>) -> Problem {
    match (turned, chosen) {
        (Turned::KeyTaken, Some(id)) if !by_key => Problem::conflict(
            "id-taken",
            "The id belongs to a different message",
            format!(
                "The id {id} was used before for a different request: repeat that request as it was, or choose \
                 another id."
            ),
        ),
        (Turned::KeyTaken, _) => Problem::conflict(
            "idempotency-key-taken",
            "The idempotency key was used for a different request",
            "This `Idempotency-Key` was used before for a different request: use a new key for a new message, or \
             repeat that request as it was.",
        ),
        (Turned::IdTaken(id), _) => Problem::conflict(
            "id-taken",
            "The id belongs to a different message",
            format!(
                "Another message has the id {id}: leave the id out to get a fresh one, or choose another."
            ),
        ),
        (Turned::Invalid(invalid), _) => {
            Problem::bad_request("invalid-message", "The message cannot be kept", invalid.to_string())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(body: &str) -> SendRequest {
        SendRequest::parse(body.as_bytes()).expect("a request")
    }

    #[test]
    fn a_fingerprint_sees_what_was_asked_and_not_how_it_was_spaced() {
        let one = fingerprint(&request(r#"{"topic":"t","message":{"a":1}}"#));
        assert_eq!(one, fingerprint(&request(r#"{ "message" : { "a" : 1 }, "topic" : "t", "key": null }"#)));
        for other in [
            r#"{"topic":"t","message":{"a":2}}"#,
            r#"{"topic":"u","message":{"a":1}}"#,
            r#"{"topic":"t","message":{"a":1},"key":"k"}"#,
            r#"{"topic":"t","message":"{\"a\":1}"}"#,
            r#"{"topic":"t","message":{"a":1},"headers":{"x":"y"}}"#,
        ] {
            assert_ne!(one, fingerprint(&request(other)), "{other}");
        }
    }

    #[test]
    fn an_id_that_is_no_uuid_is_answered_with_what_can_be_done_instead() {
        let problem =
            chosen_id(&request(r#"{"topic":"t","message":1,"messageId":"order-7"}"#)).expect_err("no UUID");
        assert!(problem.detail.contains("`idFrom`") && problem.detail.contains("`Idempotency-Key`"));
    }

    #[test]
    fn an_idempotency_key_is_visible_and_short() {
        for key in ["a", "order-12345-payment-1", &"k".repeat(255)] {
            assert_eq!(check_key(key), Ok(()));
        }
        for key in ["", "a b", "a\tb", "ä", &"k".repeat(256)] {
            assert!(check_key(key).is_err(), "{key:?}");
        }
    }
}
