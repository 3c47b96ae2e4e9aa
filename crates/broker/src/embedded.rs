//! The embedded broker: a durable, ordered, partitioned log in one SQLite file.
//!
//! It is for one machine. What it confirms is flushed to that machine's disk, and nowhere else; several
//! processes of the machine may publish into the same file and consume from it at the same time.
//!
//! - A topic is created by its first message. Messages of one key share a partition and keep their order.
//! - The members of a group divide the partitions of its topics among them. A partition has one owner at a time,
//!   by a lease in the file's clock; every change of hands raises its epoch, and what a former owner still
//!   wants to acknowledge is refused by it.
//! - A message is kept until every group that has ever subscribed to its topic has acknowledged it, and for
//!   [`Config::retain`] at least. Unread messages are never removed, so a group that will not come back must be
//!   forgotten ([`Broker::forget`]). A topic that no group has asked for keeps its messages for `retain`. The
//!   room of removed messages is used again; the file does not shrink.

mod block;
mod browse;
mod config;
mod error;
mod inspect;
mod keeper;
mod member;
mod publish;
mod receive;
mod retain;
mod share;
mod transact;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, RwLock};

use sqlite::Presence;
use tokio::sync::watch;

pub use config::Config;
pub use error::Error;
pub use inspect::{GroupView, TopicView};

use keeper::Keeper;
use publish::Topic;

const MIGRATIONS: [sqlite::Migration; 2] = [
    sqlite::Migration { version: 1, name: "log and offsets", sql: include_str!("embedded/schema.sql") },
    sqlite::Migration { version: 2, name: "transactions", sql: include_str!("embedded/transactions.sql") },
];

/// Bits of a position that hold the offset: enough for a trillion messages in each of eight million partitions.
const OFFSET_BITS: u32 = 40;

/// Where a message is: partitions one after another, each in the order of its offsets.
fn position(partition: u32, offset: i64) -> i64 {
    (i64::from(partition) << OFFSET_BITS) | offset
}

/// A broker in a file. Cheap to clone: clones share the file, its writer and its wake-ups.
#[derive(Clone)]
pub struct Broker {
    inner: Arc<Inner>,
}

struct Inner {
    config: Config,
    file: Arc<sqlite::File>,
    topics: RwLock<HashMap<String, Topic>>,
    bell: watch::Sender<()>,
    keeper: Keeper,
    presence: Arc<Presence>,
}

impl Broker {
    /// Opens the file, making it if need be, and starts the thread that renews leases and removes what is no
    /// longer kept.
    ///
    /// # Errors
    /// When a setting makes no sense or the file cannot be used.
    pub fn open(config: Config) -> Result<Self, Error> {
        config.check()?;
        let file = Arc::new(sqlite::File::open(&config.path, |connection| {
            sqlite::migrate(connection, "broker_migrations", &MIGRATIONS).map(drop)
        })?);
        let presence =
            Arc::new(Presence::announce(&config.path).map_err(|error| Error::Presence(error.to_string()))?);
        let keeper = Keeper::start()?;
        keeper.spawn(retain::keep(Arc::clone(&file), config.retain));
        let inner =
            Inner { config, file, topics: RwLock::default(), bell: watch::Sender::new(()), keeper, presence };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// The settings it was opened with.
    pub fn config(&self) -> &Config {
        &self.inner.config
    }
}

impl fmt::Debug for Broker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("embedded::Broker").field("config", &self.inner.config).finish_non_exhaustive()
    }
}

impl Inner {
    fn recall(&self, topic: &str) -> Option<Topic> {
        self.topics.read().expect("nobody panics while holding the map").get(topic).copied()
    }

    /// Only what is committed may be remembered: a topic of a transaction that failed does not exist.
    fn remember(&self, learned: Vec<(String, Topic)>) {
        if !learned.is_empty() {
            self.topics.write().expect("nobody panics while holding the map").extend(learned);
        }
    }

    /// Wakes the subscriptions of this process; those of others find out by polling.
    fn ring(&self) {
        self.bell.send_replace(());
    }
}
