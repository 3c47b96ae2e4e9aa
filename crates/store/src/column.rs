//! How fields stand in columns, the same in every store: one writer's row means one thing everywhere.

use std::collections::BTreeMap;
use std::time::Duration;

use chrono::{DateTime, Utc};
use message::{Message, Status};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::Arrival;

/// Slots, and so the most lanes that can be.
pub(crate) const SLOTS: u16 = 1024;

/// Tries in vain that are kept for each message: an outage of days must not fill the disk.
pub(crate) const HISTORY: i64 = 100;

/// Errors are kept for people; nobody reads more than this.
const ERROR_LENGTH: usize = 2_000;

/// Why an id that returns with other content is not worked on.
pub(crate) const OTHER_CONTENT: &str = "its id was used before for a message with other content";

/// Why a follower waits in the inbox.
pub(crate) const BEHIND: &str = "waits behind an earlier message of its key";

/// Why a row whose headers nobody can read is given up.
pub(crate) const NO_HEADERS: &str = "Unreadable: its headers are no JSON object that can be read";

/// Stands for headers that cannot be read. No header of a writer has this name: a space is not allowed in one.
pub(crate) const UNREADABLE: &str = "unreadable headers";

pub(crate) fn time(millis: i64) -> DateTime<Utc> {
    DateTime::from_timestamp_millis(millis).unwrap_or_default()
}

/// From `earlier` to `later`; none if the clock was set back in between.
pub(crate) fn between(earlier: i64, later: i64) -> Duration {
    Duration::from_millis(u64::try_from(later.saturating_sub(earlier)).unwrap_or(0))
}

pub(crate) fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX / 4)
}

/// A plain-SQL writer may have given headers that are not all strings: those are shown as JSON. What the database
/// takes for JSON and we cannot read (a lone surrogate, say) is shown as it stands, and is never sent.
pub(crate) fn headers(json: &str) -> BTreeMap<String, String> {
    if json == "{}" {
        return BTreeMap::new();
    }
    match serde_json::from_str::<BTreeMap<String, Value>>(json) {
        Ok(values) => values.into_iter().map(|(name, value)| (name, plain(value))).collect(),
        Err(_) => BTreeMap::from([(UNREADABLE.to_owned(), json.to_owned())]),
    }
}

/// Groups that cannot be read are nobody: the message itself must go on.
pub(crate) fn groups(json: &str) -> Vec<String> {
    let values: Vec<Value> = serde_json::from_str(json).unwrap_or_default();
    values.into_iter().map(plain).collect()
}

fn plain(value: Value) -> String {
    match value {
        Value::String(text) => text,
        other => other.to_string(),
    }
}

/// Marks that are made together: a row of what was done has room for so many on PostgreSQL, and a statement for a few more on
/// MySQL.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(crate) const MOST_MARKS: usize = 1 << 13;

/// In the order of ids, in which all mark who mark several: two with the same ones must not wait for each other.
#[cfg(all(feature = "sqlx", any(feature = "postgres", feature = "mysql")))]
pub(crate) fn by_id<'a>(arrivals: &[&'a Arrival]) -> Vec<&'a Arrival> {
    let mut sorted = arrivals.to_vec();
    sorted.sort_unstable_by_key(|arrival| arrival.message.id);
    sorted
}

pub(crate) fn headers_json(message: &Message) -> String {
    if message.headers.is_empty() {
        return "{}".to_owned();
    }
    serde_json::to_string(&message.headers).expect("a map of strings is JSON")
}

pub(crate) fn groups_json(groups: &[String]) -> String {
    serde_json::to_string(groups).expect("a list of strings is JSON")
}

/// The word for a status in the table. In flight has none: it is a fact about batches.
pub(crate) fn word(status: Status) -> &'static str {
    match status {
        Status::Pending | Status::InFlight => "pending",
        Status::Sent => "sent",
        Status::Failed => "failed",
        Status::Dead => "dead",
    }
}

/// The start of a text, cut between characters.
pub(crate) fn clip(text: &str) -> &str {
    match text.char_indices().nth(ERROR_LENGTH) {
        Some((end, _)) => &text[..end],
        None => text,
    }
}

/// Why a message that relays died of is Dead.
pub(crate) fn crashes_relays(crashes: u32) -> String {
    format!("crashes the relay: {crashes} relays died while they held it")
}

/// What a message says, in few bytes: an id that returns with other content is no duplicate.
pub(crate) fn digest(arrival: &Arrival) -> Vec<u8> {
    digest_of(&arrival.message.topic, &arrival.message.payload)
}

pub(crate) fn digest_of(topic: &str, payload: &[u8]) -> Vec<u8> {
    let mut hash = Sha256::new();
    hash.update(topic.as_bytes());
    hash.update([0]);
    hash.update(payload);
    hash.finalize()[..16].to_vec()
}
