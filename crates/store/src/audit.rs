//! What the audit says of an action: enough to see, and to undo by hand, what somebody did.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use message::Message;
use serde_json::{Value, json};

use crate::Record;

/// What the record was, and what became different.
pub(crate) fn changed(before: &Record, after: Option<&Record>) -> String {
    let was = view(before);
    let is = after.map(|after| {
        let mut is = view(after);
        if let (Value::Object(is), Value::Object(was)) = (&mut is, &was) {
            is.retain(|name, value| was.get(name) != Some(value));
        }
        is
    });
    json!({ "before": was, "after": is }).to_string()
}

/// Who redelivers.
pub(crate) const RELAY: &str = "relay";

/// A message is sent again for this group.
pub(crate) fn redelivered(group: &str, why: &str) -> String {
    json!({ "group": group, "why": why }).to_string()
}

/// A message of the inbox was given a fresh start for this group.
pub(crate) fn unparked(group: &str) -> String {
    json!({ "group": group }).to_string()
}

/// A message of the inbox was given up for this group.
pub(crate) fn dropped(group: &str, message: &Message) -> String {
    json!({ "group": group, "before": contents(message) }).to_string()
}

fn view(record: &Record) -> Value {
    let mut view = contents(&record.message);
    view["status"] = json!(record.state.status);
    view["attempts"] = json!(record.state.attempts);
    view["deadReason"] = json!(record.dead_reason);
    view["lastError"] = json!(record.last_error);
    view
}

/// All that a message says, to the last byte.
fn contents(message: &Message) -> Value {
    let (name, payload) = match std::str::from_utf8(&message.payload) {
        Ok(text) => ("payload", text.to_owned()),
        Err(_) => ("payloadBase64", BASE64_STANDARD.encode(&message.payload)),
    };
    json!({
        "topic": message.topic,
        "key": message.key,
        "type": message.kind,
        name: payload,
        "contentType": message.content_type,
        "headers": message.headers,
    })
}
