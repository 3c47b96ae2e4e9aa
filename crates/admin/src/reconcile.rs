//! Comparing what was written with what lies in the brokers and with what the groups have done, by ids.
//!
//! Three sides that forget at different times: the store deletes sent records, a broker its oldest messages, a group its
//! marks. Only what all sides of a comparison still keep is compared, topic by topic, so that what was forgotten is not
//! called missing. Where that is nothing, nobody can tell whether they agree, and the answer says so.
//!
//! - A message is in a broker no earlier than it was written, and is Sent no earlier than it is in the broker: so what was
//!   written within a time, and is Sent, is looked for from the beginning of that time on.
//! - The sides are read in the order in which messages travel. What is done meanwhile is seen later, never missed.
//! - [`ledger`] holds some sixty bytes for each message and no payload.

pub(crate) mod judge;
pub(crate) mod ledger;
mod view;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use broker::Browse;
use chrono::{DateTime, TimeDelta, Utc};

pub use view::{
    BrokerComparison, Difference, DifferenceView, GroupComparison, OutboxCounts, ReconcileView,
    TopicComparison,
};

/// How far the clocks of a store, a broker and this machine may be apart.
pub(crate) const SKEW: TimeDelta = TimeDelta::minutes(1);

/// What is compared.
#[derive(Clone, Debug)]
pub struct ReconcileRequest {
    /// What was written from this moment on.
    pub since: DateTime<Utc>,
    /// Up to this one, and without it.
    pub until: DateTime<Utc>,
    /// Of this topic; of all when absent.
    pub topic: Option<String>,
    /// How long a group may take before a message counts as straggling.
    pub patience: Duration,
    /// How many messages of each kind are named.
    pub show: usize,
}

/// What the store is compared with.
#[derive(Clone, Default)]
pub struct Sides {
    /// How long sent records are kept; absent where they are deleted at once.
    pub keep_sent: Option<Duration>,
    /// The brokers, by name.
    pub brokers: BTreeMap<String, BrokerSide>,
    /// The groups that do the messages of a key one after another.
    pub ordered: BTreeSet<String>,
}

/// A broker, as far as it can be compared.
#[derive(Clone)]
pub struct BrokerSide {
    /// For people, without its password.
    pub url: String,
    /// Reads it, where that disturbs nobody.
    pub reader: Option<Arc<dyn Browse>>,
    /// Messages of a key are received in the order in which they were stored.
    pub key_order: bool,
}
