//! What is answered: the same JSON for the API, the page and `--json` on the command line.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use message::{MessageId, Status};
use serde::Serialize;
use serde_json::value::RawValue;
use store::{
    Attempt, AuditEntry, Counts, Hold, InboxCounts, LaneView, Latency, Parked, Processed, Record, Remembered,
    Seq,
};
use utoipa::ToSchema;
use utoipa::openapi::schema::{ObjectBuilder, Type};

use crate::{Encoding, Payload, Topology};

fn status_schema() -> ObjectBuilder {
    ObjectBuilder::new()
        .schema_type(Type::String)
        .enum_values(Some(Status::ALL.map(Status::as_str)))
        .description(Some("Where a message is in its life"))
}

/// A message was taken.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct SendAnswer {
    /// Its id: ask for its status with it.
    #[schema(value_type = String, format = Uuid)]
    pub message_id: MessageId,
    /// Where it is: the request that stored it and every repetition of it get the same answer.
    #[schema(schema_with = status_schema)]
    pub status: Status,
    /// An earlier request had stored it; this one changed nothing.
    #[serde(skip)]
    pub repeated: bool,
    /// `false` where its route keeps nothing: it is on its way, and nobody can ask for its status.
    #[serde(skip_serializing_if = "std::clone::Clone::clone")]
    pub stored: bool,
}

/// All that is known of a message.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct MessageView {
    /// The same through every retry, broker and inbox.
    #[schema(value_type = String, format = Uuid)]
    pub message_id: MessageId,
    /// What happened, in the words of the business.
    #[serde(rename = "type")]
    pub kind: Option<String>,
    /// Where it goes.
    pub topic: String,
    /// The groups that must acknowledge it.
    pub consumer_groups: Vec<String>,
    /// Messages of one topic and key arrive in order.
    pub key: Option<String>,
    /// What it carries, written as `payloadEncoding` says.
    #[schema(value_type = Value)]
    pub payload: Box<RawValue>,
    /// How to read `payload`.
    pub payload_encoding: Encoding,
    /// The media type of the payload.
    pub content_type: String,
    /// The writer's headers.
    pub headers: BTreeMap<String, String>,
    /// When it happened, by the writer's clock.
    pub occurred_at: DateTime<Utc>,
    /// Where it is in its life.
    #[schema(schema_with = status_schema)]
    pub status: Status,
    /// Failures so far.
    pub attempts: u32,
    /// When it is tried again.
    pub next_attempt_at: Option<DateTime<Utc>>,
    /// While it is InFlight: until when its relay may work on it.
    pub locked_until: Option<DateTime<Utc>>,
    /// The last failure.
    pub last_error: Option<String>,
    /// When the broker confirmed it.
    pub sent_at: Option<DateTime<Utc>>,
    /// Why it is Dead.
    pub dead_reason: Option<String>,
    /// Its place in the order of writing.
    pub seq: Seq,
    /// When it was written, by the store's clock.
    pub written_at: DateTime<Utc>,
    /// How often it was deliberately sent anew.
    pub delivery_epoch: u32,
    /// It waits behind an earlier message of its key.
    pub held: bool,
    /// Which groups have acknowledged it, and which have not yet.
    pub acknowledgements: Vec<AcknowledgementView>,
}

/// Whether a group has acknowledged a message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct AcknowledgementView {
    /// The group.
    pub consumer_group: String,
    /// When it did; `null` when it has not yet.
    pub acknowledged_at: Option<DateTime<Utc>>,
}

impl MessageView {
    /// What `record` says, with the groups that `topology` names where its writer named none.
    pub fn new(record: Record, topology: &Topology) -> Self {
        let message = record.message;
        let payload = Payload::show(&message.payload, &message.content_type);
        let consumer_groups = record.ack_groups.unwrap_or_else(|| topology.groups_of(&message.topic));
        let given = |group: &str| record.acknowledgements.iter().find(|given| given.group == group);
        let mut acknowledgements: Vec<_> = consumer_groups
            .iter()
            .map(|group| AcknowledgementView {
                consumer_group: group.clone(),
                acknowledged_at: given(group).map(|given| given.at),
            })
            .collect();
        let others = record.acknowledgements.iter().filter(|given| !consumer_groups.contains(&given.group));
        acknowledgements.extend(others.map(|given| AcknowledgementView {
            consumer_group: given.group.clone(),
            acknowledged_at: Some(given.at),
        }));
        Self {
            message_id: message.id,
            kind: message.kind,
            topic: message.topic,
            consumer_groups,
            key: message.key,
            payload: payload.value,
            payload_encoding: payload.encoding,
            content_type: message.content_type,
            headers: message.headers,
            occurred_at: message.occurred_at,
            status: record.state.status,
            attempts: record.state.attempts,
            next_attempt_at: record.next_attempt_at,
            locked_until: record.locked_until,
            last_error: record.last_error,
            sent_at: record.sent_at,
            dead_reason: record.dead_reason,
            seq: record.seq,
            written_at: record.written_at,
            delivery_epoch: record.state.delivery,
            held: record.held,
            acknowledgements,
        }
    }
}

/// A part of a list.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct PageView<T: ToSchema> {
    /// The items.
    pub items: Vec<T>,
    /// Ask for the next part with this as `after`; `null` at the end. A part may be short, even empty, and
    /// still have a next one.
    pub next: Option<String>,
}

/// A try in vain.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct AttemptView {
    /// When.
    pub at: DateTime<Utc>,
    /// What became of it: `failed`, `dead` or `released`.
    pub outcome: String,
    /// Why.
    pub error: String,
}

impl From<Attempt> for AttemptView {
    fn from(attempt: Attempt) -> Self {
        Self { at: attempt.at, outcome: attempt.outcome, error: attempt.error }
    }
}

/// A Dead message and how it came to that.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct DeadView {
    /// The message.
    pub message: MessageView,
    /// Its tries, oldest first.
    pub history: Vec<AttemptView>,
}

/// What an operator's action made of a message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ActionAnswer {
    /// Which message.
    #[schema(value_type = String, format = Uuid)]
    pub message_id: MessageId,
    /// What was done: `requeued`, `edited`, `discarded` or `deleted`.
    #[schema(value_type = String, example = "requeued")]
    pub action: &'static str,
    /// Where it is now; `null` when the record is gone.
    #[schema(value_type = Option<String>)]
    pub status: Option<Status>,
}

/// A message that a bulk action left alone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Refusal {
    /// Which.
    #[schema(value_type = String, format = Uuid)]
    pub message_id: MessageId,
    /// Why.
    pub detail: String,
}

/// An acknowledgement is recorded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct AcknowledgeAnswer {
    /// Which message.
    #[schema(value_type = String, format = Uuid)]
    pub message_id: MessageId,
    /// Which group.
    pub consumer_group: String,
    /// `acknowledged`, the first time and every time after.
    #[schema(value_type = String, example = "acknowledged")]
    pub result: &'static str,
    /// The group had acknowledged before.
    #[serde(skip)]
    pub repeated: bool,
}

/// The lanes and who works on them.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct LanesView {
    /// How many there are.
    pub count: usize,
    /// Each of them.
    pub lanes: Vec<LaneRow>,
}

/// A lane.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct LaneRow {
    /// Which.
    pub lane: u16,
    /// Rises with every change of hands.
    pub epoch: i64,
    /// The relay that holds it.
    pub owner: Option<String>,
    /// Until when.
    pub locked_until: Option<DateTime<Utc>>,
    /// Messages in flight on it.
    pub in_flight: u64,
}

impl From<LaneView> for LaneRow {
    fn from(lane: LaneView) -> Self {
        Self {
            lane: lane.lane,
            epoch: lane.epoch,
            owner: lane.owner,
            locked_until: lane.locked_until,
            in_flight: lane.in_flight,
        }
    }
}

/// Another number of lanes was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct LanesAnswer {
    /// The number asked for.
    pub count: u16,
    /// Whether it is in force; else running relays drain first.
    pub in_force: bool,
}

/// A key whose later messages wait.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct HoldView {
    /// Its topic.
    pub topic: String,
    /// The key.
    pub key: String,
    /// The message that they wait for.
    #[schema(value_type = Option<String>, format = Uuid)]
    pub message_id: Option<MessageId>,
    /// Where that one is.
    #[schema(value_type = Option<String>)]
    pub status: Option<Status>,
}

impl From<Hold> for HoldView {
    fn from(hold: Hold) -> Self {
        Self { topic: hold.topic, key: hold.key, message_id: hold.id, status: hold.status }
    }
}

/// Something an operator did.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct AuditView {
    /// When.
    pub at: DateTime<Utc>,
    /// Who.
    pub actor: String,
    /// What: `requeue`, `edit`, `discard`, `delete` …
    pub action: String,
    /// To which message.
    #[schema(value_type = Option<String>, format = Uuid)]
    pub message_id: Option<MessageId>,
    /// What it was before and what after.
    #[schema(value_type = Value)]
    pub detail: Box<RawValue>,
}

impl From<AuditEntry> for AuditView {
    fn from(entry: AuditEntry) -> Self {
        let detail = Payload::show(&entry.detail.into(), "application/json").value;
        Self { at: entry.at, actor: entry.actor, action: entry.action, message_id: entry.message, detail }
    }
}

/// A message that a group has done.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ProcessedView {
    /// Which.
    #[schema(value_type = String, format = Uuid)]
    pub message_id: MessageId,
    /// On which topic it came.
    pub topic: String,
    /// Of which key.
    pub key: Option<String>,
    /// Its place in the producer's order.
    pub seq: Option<Seq>,
    /// When.
    pub processed_at: DateTime<Utc>,
}

impl From<Processed> for ProcessedView {
    fn from(done: Processed) -> Self {
        Self {
            message_id: done.id,
            topic: done.topic,
            key: done.key,
            seq: done.seq,
            processed_at: done.processed_at,
        }
    }
}

/// A message kept in the inbox of a group.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ParkedView {
    /// Which.
    #[schema(value_type = String, format = Uuid)]
    pub message_id: MessageId,
    /// On which topic it came.
    pub topic: String,
    /// Of which key.
    pub key: Option<String>,
    /// What happened.
    #[serde(rename = "type")]
    pub kind: Option<String>,
    /// What it carries, written as `payloadEncoding` says.
    #[schema(value_type = Value)]
    pub payload: Box<RawValue>,
    /// How to read `payload`.
    pub payload_encoding: Encoding,
    /// Its place in the producer's order.
    pub seq: Option<Seq>,
    /// Failures so far.
    pub attempts: u32,
    /// When it is tried again; `null` when it waits behind another of its key, or for a person.
    pub next_attempt_at: Option<DateTime<Utc>>,
    /// It waits for a person.
    pub dead: bool,
    /// The last failure.
    pub last_error: String,
}

impl From<Parked> for ParkedView {
    fn from(parked: Parked) -> Self {
        let message = parked.arrival.message;
        let payload = Payload::show(&message.payload, &message.content_type);
        Self {
            message_id: message.id,
            topic: message.topic,
            key: message.key,
            kind: message.kind,
            payload: payload.value,
            payload_encoding: payload.encoding,
            seq: parked.arrival.seq,
            attempts: parked.attempts,
            next_attempt_at: parked.next_attempt_at,
            dead: parked.dead,
            last_error: parked.error,
        }
    }
}

/// How a consumer group is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct InboxCountsView {
    /// Messages done.
    pub processed: u64,
    /// Arrivals recognised as done before.
    pub duplicates: u64,
    /// Messages kept for a later try.
    pub parked: u64,
    /// Messages kept for a person.
    pub dead: u64,
    /// Ids kept to recognise duplicates.
    pub ids: u64,
    /// The bytes that they take, about; none when the server does not say.
    pub id_bytes: Option<u64>,
}

impl InboxCountsView {
    pub(crate) fn of(counts: InboxCounts, remembered: Remembered) -> Self {
        Self {
            processed: counts.processed,
            duplicates: counts.duplicates,
            parked: counts.parked,
            dead: counts.dead,
            ids: remembered.ids,
            id_bytes: remembered.bytes,
        }
    }
}

/// How many messages are where, and what has happened so far.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct CountsView {
    /// Written and not taken.
    pub pending: u64,
    /// In a relay's hands.
    pub in_flight: u64,
    /// Waiting for another attempt.
    pub failed: u64,
    /// Confirmed, and still kept.
    pub sent: u64,
    /// Quarantined now.
    pub dead: u64,
    /// Seconds since the oldest message that is not sent was written.
    pub oldest_age: Option<f64>,
    /// Confirmations ever.
    pub publish_success_total: u64,
    /// Tries in vain ever.
    pub publish_failure_total: u64,
    /// Messages that ever became Dead.
    pub dead_total: u64,
    /// Acknowledgements ever.
    pub acknowledged_total: u64,
    /// From writing to confirmation.
    pub write_to_sent: LatencyView,
    /// From confirmation to acknowledgement.
    pub sent_to_acknowledged: LatencyView,
}

impl From<Counts> for CountsView {
    fn from(counts: Counts) -> Self {
        Self {
            pending: counts.pending,
            in_flight: counts.in_flight,
            failed: counts.failed,
            sent: counts.sent,
            dead: counts.dead,
            oldest_age: counts.oldest_age.map(|age| age.as_secs_f64()),
            publish_success_total: counts.publish_success_total,
            publish_failure_total: counts.publish_failure_total,
            dead_total: counts.dead_total,
            acknowledged_total: counts.acknowledged_total,
            write_to_sent: counts.write_to_sent.into(),
            sent_to_acknowledged: counts.sent_to_acknowledged.into(),
        }
    }
}

/// A histogram of waits.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct LatencyView {
    /// The upper bounds in seconds.
    pub bounds: Vec<f64>,
    /// How many waits fell under each bound and above the one before, and, last, above all.
    pub counts: Vec<u64>,
    /// All waits together, in seconds.
    pub sum: f64,
}

impl From<Latency> for LatencyView {
    fn from(mut latency: Latency) -> Self {
        // A store that has seen nothing yet may keep no buckets; programs want the same shape always.
        latency.counts.resize(Latency::BOUNDS.len() + 1, 0);
        Self {
            bounds: Latency::BOUNDS.iter().map(|millis| *millis as f64 / 1000.0).collect(),
            counts: latency.counts,
            sum: latency.sum.as_secs_f64(),
        }
    }
}
