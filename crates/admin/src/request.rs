//! What may be asked, and how it is read from JSON.
//!
//! The command line builds these from its arguments, the HTTP API reads them from bodies; either way the
//! same checks follow in the desk.

use std::collections::BTreeMap;

use message::{MessageId, Status};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use store::{Filter, Page};
use utoipa::ToSchema;

use crate::fields::{Fields, missing, wrong_type};
use crate::{Encoding, Problem};

/// What a message's id is made from, instead of a fresh one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum IdFrom {
    /// `"content"`: equal content on one topic is the same message.
    Content(ContentWord),
    /// Names of fields of the message: `["orderId", "payment.attempt"]`.
    Fields(Vec<String>),
}

/// The word `content`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ContentWord {
    /// The whole message.
    Content,
}

impl IdFrom {
    /// The id is made from the whole content.
    pub const CONTENT: Self = Self::Content(ContentWord::Content);
}

/// A message to send.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct SendRequest {
    /// Where it goes.
    #[schema(example = "user-events")]
    pub topic: String,
    /// The message: a string or any JSON value. It is delivered as this JSON.
    #[schema(value_type = Value, example = "A user created an account")]
    pub message: Box<RawValue>,
    /// What happened, in the words of the business: `OrderPlaced`.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    #[schema(example = "OrderPlaced")]
    pub kind: Option<String>,
    /// Messages of one topic and key arrive in the order they were sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Headers that travel with the message.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schema(required = false)]
    pub headers: BTreeMap<String, String>,
    /// The id of the message, a UUID; a fresh one when it is left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, format = Uuid)]
    pub message_id: Option<String>,
    /// Make the id from what the message says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id_from: Option<IdFrom>,
    /// The group that must acknowledge it; every configured group of the topic when it is left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(example = "default-consumer-group")]
    pub consumer_group: Option<String>,
    /// Send it when so much time has passed, and not before: `10m`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(example = "10m")]
    pub deliver_after: Option<String>,
    /// Do not send it any more when so much time has passed: it is Dead then.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(example = "1h")]
    pub expires_after: Option<String>,
}

impl SendRequest {
    const FIELDS: [&'static str; 10] = [
        "topic",
        "message",
        "type",
        "key",
        "headers",
        "messageId",
        "idFrom",
        "consumerGroup",
        "deliverAfter",
        "expiresAfter",
    ];

    /// A message with nothing but a topic and its content.
    pub fn new(topic: impl Into<String>, message: Box<RawValue>) -> Self {
        Self {
            topic: topic.into(),
            message,
            kind: None,
            key: None,
            headers: BTreeMap::new(),
            message_id: None,
            id_from: None,
            consumer_group: None,
            deliver_after: None,
            expires_after: None,
        }
    }

    /// Reads a request from JSON.
    ///
    /// # Errors
    /// Names the field that is missing, unknown or of the wrong type.
    pub fn parse(body: &[u8]) -> Result<Self, Problem> {
        let fields = Fields::read(body, &Self::FIELDS)?;
        Ok(Self {
            topic: fields.required("topic", "\"user-events\"")?,
            message: message(&fields)?,
            kind: fields.text("type")?,
            key: fields.text("key")?,
            headers: fields.texts("headers")?.unwrap_or_default(),
            message_id: fields.text("messageId")?,
            id_from: fields.read_as("idFrom", "\"content\" or a list of field names")?,
            consumer_group: fields.text("consumerGroup")?,
            deliver_after: fields.text("deliverAfter")?,
            expires_after: fields.text("expiresAfter")?,
        })
    }
}

/// A message to run through a consumer group's handler, as if a broker had delivered it.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct TestRequest {
    /// The topic it is said to come from.
    #[schema(example = "user-events")]
    pub topic: String,
    /// The message: a string or any JSON value.
    #[schema(value_type = Value, example = "A user created an account")]
    pub message: Box<RawValue>,
    /// The group that handles it.
    #[schema(example = "default-consumer-group")]
    pub consumer_group: String,
    /// Its id; a fresh one when it is left out. Given twice, the second is a duplicate.
    #[schema(value_type = Option<String>, format = Uuid)]
    pub message_id: Option<String>,
    /// Its key.
    pub key: Option<String>,
    /// What happened.
    #[serde(rename = "type")]
    pub kind: Option<String>,
    /// Its headers.
    #[schema(required = false)]
    pub headers: BTreeMap<String, String>,
}

impl TestRequest {
    const FIELDS: [&'static str; 7] =
        ["topic", "message", "consumerGroup", "messageId", "key", "type", "headers"];

    /// Reads a request from JSON.
    ///
    /// # Errors
    /// Names the field that is missing, unknown or of the wrong type.
    pub fn parse(body: &[u8]) -> Result<Self, Problem> {
        let fields = Fields::read(body, &Self::FIELDS)?;
        Ok(Self {
            topic: fields.required("topic", "\"user-events\"")?,
            message: message(&fields)?,
            consumer_group: fields.required("consumerGroup", "\"default-consumer-group\"")?,
            message_id: fields.text("messageId")?,
            key: fields.text("key")?,
            kind: fields.text("type")?,
            headers: fields.texts("headers")?.unwrap_or_default(),
        })
    }
}

/// A consumer group says that it is done with a message.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct AcknowledgeRequest {
    /// Which message.
    #[schema(format = Uuid)]
    pub message_id: String,
    /// Which group.
    #[schema(example = "default-consumer-group")]
    pub consumer_group: String,
    /// That the group has received it: needed where the producer has secrets for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub proof: Option<String>,
}

impl AcknowledgeRequest {
    /// Reads a request from JSON.
    ///
    /// # Errors
    /// Names the field that is missing, unknown or of the wrong type.
    pub fn parse(body: &[u8]) -> Result<Self, Problem> {
        let fields = Fields::read(body, &["messageId", "consumerGroup", "proof"])?;
        Ok(Self {
            message_id: fields.required("messageId", "\"0198c5a0-…\", as `send` answered it")?,
            consumer_group: fields.required("consumerGroup", "\"default-consumer-group\"")?,
            proof: fields.text("proof")?,
        })
    }
}

/// How a Dead message is mended before it is sent again; what is left out stays.
#[derive(Clone, Debug, Default, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct EditRequest {
    /// The new payload, written as `payloadEncoding` says.
    #[schema(value_type = Option<Value>)]
    pub payload: Option<Box<RawValue>>,
    /// How `payload` is written: as JSON when it is left out.
    #[schema(required = false)]
    pub payload_encoding: Encoding,
    /// The media type of the new payload.
    pub content_type: Option<String>,
    /// The new headers, all of them.
    pub headers: Option<BTreeMap<String, String>>,
}

impl EditRequest {
    /// Reads a request from JSON.
    ///
    /// # Errors
    /// Names the field that is missing, unknown or of the wrong type.
    pub fn parse(body: &[u8]) -> Result<Self, Problem> {
        let fields = Fields::read(body, &["payload", "payloadEncoding", "contentType", "headers"])?;
        let encoding = fields.read_as("payloadEncoding", "\"json\", \"text\" or \"base64\"")?;
        Ok(Self {
            payload: fields.raw("payload").map(ToOwned::to_owned),
            payload_encoding: encoding.unwrap_or_default(),
            content_type: fields.text("contentType")?,
            headers: fields.texts("headers")?,
        })
    }
}

/// Which Dead messages to mend together.
#[derive(Clone, Debug, Default, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct BulkRequest {
    /// Those of this topic.
    pub topic: Option<String>,
    /// Those of this key.
    pub key: Option<String>,
    /// Every one: must be said when neither topic nor key is.
    #[schema(required = false)]
    pub all: bool,
    /// Only count them.
    #[schema(required = false)]
    pub dry_run: bool,
    /// Requeue even those that are older than their consumers remember: they may be done twice.
    #[schema(required = false)]
    pub anyway: bool,
}

impl BulkRequest {
    /// Reads a request from JSON.
    ///
    /// # Errors
    /// Names the field that is missing, unknown or of the wrong type.
    pub fn parse(body: &[u8]) -> Result<Self, Problem> {
        let fields = Fields::read(body, &["topic", "key", "all", "dryRun", "anyway"])?;
        Ok(Self {
            topic: fields.text("topic")?,
            key: fields.text("key")?,
            all: fields.flag("all")?.unwrap_or_default(),
            dry_run: fields.flag("dryRun")?.unwrap_or_default(),
            anyway: fields.flag("anyway")?.unwrap_or_default(),
        })
    }

    /// Which messages it means.
    ///
    /// # Errors
    /// When it names none: an empty request must not empty the dead letters.
    pub fn filter(&self) -> Result<ListFilter, Problem> {
        if self.topic.is_none() && self.key.is_none() && !self.all {
            return Err(Problem::bad_request(
                "which-messages",
                "No messages are named",
                "Name a `topic` or a `key`, or say \"all\": true to mean every Dead message.",
            ));
        }
        Ok(ListFilter::dead(self.topic.clone(), self.key.clone()))
    }
}

/// How many lanes there shall be.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub struct LanesRequest {
    /// A power of two, 1024 at most.
    #[schema(example = 16)]
    pub count: u16,
}

impl LanesRequest {
    /// Reads a request from JSON.
    ///
    /// # Errors
    /// Names the field that is missing, unknown or of the wrong type.
    pub fn parse(body: &[u8]) -> Result<Self, Problem> {
        let fields = Fields::read(body, &["count"])?;
        let count = fields.read_as("count", "a power of two, 1024 at most")?;
        Ok(Self { count: count.ok_or_else(|| missing("count", "16"))? })
    }
}

/// Which messages to show or to act on. What is empty does not restrict.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ListFilter {
    /// In one of these statuses.
    pub statuses: Vec<Status>,
    /// Of this topic.
    pub topic: Option<String>,
    /// Of this key.
    pub key: Option<String>,
    /// That this group must acknowledge.
    pub consumer_group: Option<String>,
    /// That are Sent and that this group has not acknowledged.
    pub unacknowledged_by: Option<String>,
}

impl ListFilter {
    /// Dead letters of a topic and key, or all of them.
    pub fn dead(topic: Option<String>, key: Option<String>) -> Self {
        Self { statuses: vec![Status::Dead], topic, key, ..Self::default() }
    }

    /// What is not sent yet.
    pub fn unsent() -> Self {
        Self { statuses: vec![Status::Pending, Status::InFlight, Status::Failed], ..Self::default() }
    }
}

impl From<ListFilter> for Filter {
    fn from(filter: ListFilter) -> Self {
        Self {
            statuses: filter.statuses,
            topic: filter.topic,
            key: filter.key,
            group: filter.consumer_group,
            unacknowledged_by: filter.unacknowledged_by,
        }
    }
}

/// Which part of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageRequest {
    /// Items at most: 1 to 1000.
    pub limit: usize,
    /// The `next` of the page before.
    pub after: Option<String>,
    /// From the newest to the oldest.
    pub newest_first: bool,
}

impl PageRequest {
    /// Items when the caller does not say.
    pub const DEFAULT_LIMIT: usize = 100;
    /// Items at most.
    pub const MOST: usize = 1000;

    /// The first page, newest first.
    pub fn newest() -> Self {
        Self { newest_first: true, ..Self::default() }
    }

    pub(crate) fn page(&self) -> Result<Page, Problem> {
        if !(1..=Self::MOST).contains(&self.limit) {
            return Err(Problem::bad_request(
                "bad-limit",
                "The limit is out of range",
                format!("`limit` is {}: use 1 to {}.", self.limit, Self::MOST),
            ));
        }
        let after = self.after.as_deref().map(|after| {
            after.parse().map_err(|_| {
                let shown: String = after.chars().take(40).collect();
                Problem::bad_request(
                    "bad-cursor",
                    "The cursor is not one of ours",
                    format!(
                        "`after` is `{}`: use the `next` of the page before, unchanged.",
                        shown.escape_debug()
                    ),
                )
            })
        });
        Ok(Page { after: after.transpose()?, limit: self.limit, newest_first: self.newest_first })
    }
}

impl Default for PageRequest {
    fn default() -> Self {
        Self { limit: Self::DEFAULT_LIMIT, after: None, newest_first: false }
    }
}

/// Reads an id that somebody typed.
pub(crate) fn message_id(text: &str) -> Result<MessageId, Problem> {
    text.trim().parse().map_err(|_| {
        let shown: String = text.chars().take(64).collect();
        Problem::bad_request(
            "bad-id",
            "That is not a message id",
            format!("`{}` is not a message id: it is a UUID such as {}.", shown.escape_debug(), EXAMPLE_ID),
        )
    })
}

pub(crate) const EXAMPLE_ID: &str = "019a8f6e-5c1d-7b33-9f00-2b6d0f1c4e55";

fn message(fields: &Fields<'_>) -> Result<Box<RawValue>, Problem> {
    // `null` is a JSON value, but nobody means to send it: it is a variable that was never set.
    let written =
        fields.written("message").ok_or_else(|| missing("message", "\"A user created an account\""))?;
    match written.get() {
        "null" => Err(wrong_type("message", "a string or any other JSON value but null", written)),
        _ => Ok(written.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_documented_request_is_read() {
        let body = br#"{ "topic": "user-events", "message": "A user created an account", "consumerGroup": "default-consumer-group" }"#;
        let request = SendRequest::parse(body).expect("the documented call");
        assert_eq!(request.topic, "user-events");
        assert_eq!(request.message.get(), "\"A user created an account\"");
        assert_eq!(request.consumer_group.as_deref(), Some("default-consumer-group"));
    }

    #[test]
    fn an_id_is_made_from_the_content_or_from_fields() {
        let id_from = |text: &str| {
            let body = format!(r#"{{"topic": "t", "message": 1, "idFrom": {text}}}"#);
            SendRequest::parse(body.as_bytes()).map(|request| request.id_from)
        };
        assert_eq!(id_from("\"content\""), Ok(Some(IdFrom::CONTENT)));
        assert_eq!(id_from("[\"a\", \"b.c\"]"), Ok(Some(IdFrom::Fields(vec!["a".into(), "b.c".into()]))));
        assert_eq!(id_from("null"), Ok(None));
        let refused = id_from("\"contents\"").expect_err("no such way").detail;
        assert!(refused.contains("\"content\" or a list of field names"), "{refused}");
    }

    #[test]
    fn a_page_has_bounds_and_a_cursor_of_ours() {
        let page = |limit, after: Option<&str>| {
            PageRequest { limit, after: after.map(Into::into), newest_first: false }.page()
        };
        assert!(page(1000, Some("17")).is_ok());
        assert_eq!(page(0, None).expect_err("none").code, "bad-limit");
        assert_eq!(page(1001, None).expect_err("too many").code, "bad-limit");
        assert_eq!(page(1, Some("x")).expect_err("not a cursor").code, "bad-cursor");
    }
}
