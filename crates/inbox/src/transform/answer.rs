//! What a handler answers that makes messages: read from JSON, strictly, so that a typing error is an error.

use std::collections::BTreeMap;

use bytes::Bytes;
use message::{Limits, Message, MessageId};
use serde::Deserialize;
use serde_json::value::RawValue;

/// Bytes of an answer at most.
pub(super) const MOST: usize = 8 << 20;

/// What an answer by HTTP looks like.
#[cfg(feature = "http")]
const BODY: &str = r#"answer with {"messages":[{"topic":"…","message":…}]}, or 204 where there are none"#;

/// What a line of a program looks like.
const LINE: &str = r#"write one {"topic":"…","message":…} a line"#;

#[cfg(feature = "http")]
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Answer {
    messages: Vec<Made>,
}

/// The fields of the producer's API that make sense here.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Made {
    topic: String,
    message: Box<RawValue>,
    #[serde(rename = "type")]
    kind: Option<String>,
    key: Option<String>,
    #[serde(default)]
    headers: BTreeMap<String, String>,
    message_id: Option<MessageId>,
}

/// The messages of an answer by HTTP to the message `of`. No body means none.
#[cfg(feature = "http")]
pub(super) fn of_body(body: &[u8], of: MessageId) -> Result<Vec<Message>, String> {
    if body.trim_ascii().is_empty() {
        return Ok(Vec::new());
    }
    let answer: Answer = serde_json::from_slice(body)
        .map_err(|error| format!("the answer is not messages ({error}): {BODY}"))?;
    let numbered = answer.messages.into_iter().enumerate();
    numbered.map(|(place, made)| message(made, of, place)).collect()
}

/// The messages that a program wrote of the message `of`, one a line. Empty lines are passed over.
pub(super) fn of_lines(written: &[u8], of: MessageId) -> Result<Vec<Message>, String> {
    let lines = written.split(|byte| *byte == b'\n').enumerate();
    let lines = lines.filter(|(_, line)| !line.trim_ascii().is_empty());
    let read = |(place, line): (usize, &[u8])| {
        let made = serde_json::from_slice(line);
        let made = made.map_err(|error| format!("line {} is not a message ({error}): {LINE}", place + 1))?;
        message(made, of, place)
    };
    lines.map(read).collect()
}

fn message(made: Made, of: MessageId, place: usize) -> Result<Message, String> {
    let payload = Bytes::from(String::from(Box::<str>::from(made.message)));
    let mut message = Message::new(made.topic, payload);
    // The same each time that it is made, so that whoever counts on ids is not deceived.
    let own = || MessageId::from_content(&message.topic, format!("{of}/{place}").as_bytes());
    message.id = made.message_id.unwrap_or_else(own);
    message.kind = made.kind;
    message.key = made.key;
    message.headers = made.headers;
    // How large it may be is for the broker to say.
    let limits = Limits { payload: usize::MAX, ..Limits::default() };
    let checked = message.check(&limits);
    checked.map_err(|invalid| format!("message {} cannot be sent: {invalid}", place + 1))?;
    Ok(message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_messages_with_ids_that_stay_the_same() {
        let of = MessageId::new();
        let body = br#"{"messages":[{"topic":"bills","key":"k","type":"Billed","message":{"n": 1},"headers":{"a":"b"}},
            {"topic":"bills","message":"text"}]}"#;
        let made = of_body(body, of).expect("two messages");
        assert_eq!((made[0].key.as_deref(), made[0].kind.as_deref()), (Some("k"), Some("Billed")));
        assert_eq!((&made[0].payload[..], &made[1].payload[..]), (&br#"{"n": 1}"#[..], &br#""text""#[..]));
        assert_eq!(made[0].headers["a"], "b");
        let again = of_body(body, of).expect("two messages");
        assert_eq!((made[0].id, made[1].id), (again[0].id, again[1].id));
        assert_ne!(made[0].id, made[1].id);
        let other = of_body(body, MessageId::new()).expect("two messages");
        assert_ne!(made[0].id, other[0].id, "another message makes others");
    }

    #[test]
    fn lines_are_messages_and_empty_ones_are_not() {
        let of = MessageId::new();
        let written = b"{\"topic\":\"bills\",\"message\":1}\n\n{\"topic\":\"bills\",\"message\":2}\r\n";
        let payloads: Vec<Bytes> =
            of_lines(written, of).expect("two").into_iter().map(|message| message.payload).collect();
        assert_eq!(payloads, ["1", "2"]);
        assert!(of_lines(b"", of).expect("none").is_empty());
        assert!(of_body(b" \n", of).expect("none").is_empty());
    }

    #[test]
    fn what_is_not_messages_is_refused_with_what_would_be() {
        let of = MessageId::new();
        let cases = [
            ("ok", "the answer is not messages (expected value"),
            ("[]", r#"answer with {"messages":[{"topic""#),
            (r#"{"messages":[{"message":1}]}"#, "missing field `topic`"),
            (r#"{"messages":[{"topic":"a","messages":1}]}"#, "unknown field `messages`"),
            (
                r#"{"messages":[{"topic":"a b","message":1}]}"#,
                "message 1 cannot be sent: `a b` cannot be a topic",
            ),
            (r#"{"messages":[{"topic":"a","message":1,"messageId":"x"}]}"#, "the answer is not messages"),
        ];
        for (body, expected) in cases {
            let error = of_body(body.as_bytes(), of).expect_err(body);
            assert!(error.contains(expected), "{body}: {error}");
        }
        let error = of_lines(b"{\"topic\":\"a\",\"message\":1}\ndone\n", of).expect_err("no message");
        assert!(error.starts_with("line 2 is not a message") && error.contains("one {"), "{error}");
    }
}
