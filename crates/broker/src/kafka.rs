//! Apache Kafka, and whatever speaks its protocol, through librdkafka.
//!
//! - A topic is a Kafka topic, with [`Config::prefix`] before its name; the key of a message is the key of its record and
//!   chooses the partition as the Java client would (murmur2). A topic that is missing is made with
//!   [`Config::partitions`] and [`Config::replication`], or, with `create=false`, it is `Misconfigured`.
//! - What travels beside the payload is in record headers. The record's own time is that of sending: topics may refuse
//!   records whose time is long past.
//! - The producer is idempotent and waits for all replicas in sync. Within one producer nothing is stored twice and
//!   nothing overtakes; what it cannot settle in time is thrown away with it, so that nothing of a call is sent after
//!   the call has ended. The next call has another producer, and what was on its way may then be stored twice: that is
//!   what `Unconfirmed` says.
//! - A group is a Kafka consumer group, with the prefix before its name. Its members divide the partitions among them
//!   (cooperative-sticky), read only what is committed, and commit offsets after the work. Offsets and messages are
//!   kept by Kafka whether or not a group is there: a new one starts at the oldest message.
//! - What a member makes of its messages can be one transaction with its offsets. Kafka takes offsets only from a member of
//!   the present generation of the group, and shows nobody the offset of a partition while a transaction that moves it is
//!   open.
//! - A member that is to give up a partition keeps it until what it received from it is finished, while the others go
//!   on with theirs. One that was taken for dead cannot commit any more; its subscription says so and another is opened.
//!
//! Traps that are taken care of: a topic's `max.message.bytes` is a limit of batches, so one message too many would have
//! its neighbours refused (batches are kept within it); a compacted topic refuses a batch for one message without a
//! key (such a message is rejected before it is sent); librdkafka goes on with the next message after it gave one up
//! (it is told not to, and then is of no use any more: it is replaced); a server takes any sequence from a producer that
//! it does not know, so that a request can overtake, and librdkafka take for stored, one that was refused (a partition gets one
//! message of a new producer, and the next when that is stored).

mod browse;
mod client;
mod config;
mod error;
mod examine;
mod finish;
mod member;
mod notes;
mod partition;
mod producer;
mod publish;
mod receive;
mod topics;
mod transact;

use std::fmt;
use std::sync::{Arc, Mutex};

use rdkafka::util::get_rdkafka_version;

pub use config::{Config, Sasl, Security};

use crate::Unopened;
use producer::Line;
use topics::Topics;
use transact::Fenced;

/// Older versions lose messages or reorder them in ways that no setting prevents.
const OLDEST: (i32, &str) = (0x0205_0000, "2.5");

/// What the attributes of CloudEvents begin with, as their binding to Kafka says.
const EVENT: &str = "ce_";

/// Kafka as a broker. Cheap to clone: clones share one producer.
#[derive(Clone)]
pub struct Broker {
    inner: Arc<Inner>,
}

struct Inner {
    config: Config,
    topics: Arc<Topics>,
    /// The producer that is in use; empty after it had to be thrown away.
    line: Mutex<Option<Arc<Line>>>,
    /// Senders of transactions that this one stopped.
    fenced: tokio::sync::Mutex<Fenced>,
}

impl Broker {
    /// Prepares the clients. Servers that are away are connected to when they come.
    ///
    /// # Errors
    /// When librdkafka cannot be used, or not with these settings.
    pub fn open(config: Config) -> Result<Self, Unopened> {
        let (number, name) = get_rdkafka_version();
        if number < OLDEST.0 {
            let oldest = OLDEST.1;
            return Err(Unopened::Broken(format!(
                "librdkafka {name} is too old: build with {oldest} or later"
            )));
        }
        let topics = Topics::new(&config).map_err(|error| Unopened::Broken(error::text(&error)))?;
        let inner =
            Inner { config, topics: Arc::new(topics), line: Mutex::default(), fenced: Default::default() };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// The settings it was opened with.
    pub fn config(&self) -> &Config {
        &self.inner.config
    }
}

impl fmt::Debug for Broker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("kafka::Broker").field("config", &self.inner.config).finish_non_exhaustive()
    }
}
