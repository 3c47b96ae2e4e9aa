//! Redis Streams: a topic is a few streams, a group is a consumer group on each of them.
//!
//! - A topic has `partitions` streams, `{postrider}:stream:orders:0` and so on. A message goes into the one that its key
//!   says, so that messages of a key keep their order. How many there are is written down in `{postrider}:topics` when
//!   the topic is made, and everybody goes by that.
//! - One script appends all messages of a call, in order. It knows what was appended within the last `deduplication`
//!   (sets `{postrider}:seen:…`), so that a message whose confirmation was lost is not stored twice.
//! - The members of a group divide the partitions among them. Who owns which is in `{postrider}:group:billing`, by leases in
//!   the server's clock. Every change of hands raises an epoch, and each script that reads or acknowledges looks at it:
//!   a member that was taken for dead gets nothing and finishes nothing. A member is a consumer of its own name; what it
//!   leaves pending, the next owner claims first, in order.
//! - Members wait for messages, and for changes in their group, with one `XREAD BLOCK`.
//! - A message is kept until every group that ever read its topic has acknowledged it, and for `retain` at least. So a
//!   group that will not come back must be forgotten ([`Broker::forget`]); messages that no group has asked for stay.
//!   Nothing is ever trimmed by length.
//!
//! What Redis confirms is in its memory and, by its append-only file, on its disk as soon as `appendfsync` says. Replication
//! is asynchronous: a failover loses what the replica had not received. With `replicas=1` a message is confirmed when a
//! replica has it, and `Unconfirmed` otherwise; that makes a loss rare, not impossible.
//!
//! All keys lie in one slot, because scripts reach no further: a broker is the work of one node of a cluster.

mod browse;
mod config;
mod entry;
mod error;
mod examine;
mod keeper;
mod member;
mod publish;
mod receive;
mod retain;
mod script;
mod server;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, RwLock};
use std::time::Duration;

pub use config::Config;

use crate::Unopened;
use keeper::Keeper;
use script::Link;

/// Redis Streams as a broker. Cheap to clone: clones share connections.
#[derive(Clone)]
pub struct Broker {
    inner: Arc<Inner>,
}

struct Inner {
    config: Config,
    /// What all keys begin with.
    tag: String,
    client: redis::Client,
    publisher: Link,
    /// For members that look for messages.
    reader: Arc<Link>,
    /// For leases and retention, on the keeper's own thread.
    heart: Arc<Link>,
    /// Partitions of the topics that were met so far.
    topics: RwLock<HashMap<String, u32>>,
    keeper: Keeper,
}

impl Broker {
    /// Starts the thread that renews leases and removes what is no longer kept. Connects when it is first used.
    ///
    /// # Errors
    /// When a setting makes no sense or the thread cannot be started. A server that is away is no error.
    pub fn open(config: Config) -> Result<Self, Unopened> {
        let client = config.client()?;
        let keeper = Keeper::start().map_err(|error| {
            Unopened::Broken(format!("cannot start the thread that renews leases: {error}"))
        })?;
        // A lease must be renewed well before it ends, or it is of no use to wait any longer.
        let patience = config.timeout.min(config.lease.max(Duration::from_secs(1)));
        let heart = Arc::new(Link::new(client.clone(), patience, false));
        keeper.spawn(retain::keep(Arc::clone(&heart), config.tag(), config.retain));
        let inner = Inner {
            tag: config.tag(),
            publisher: Link::new(client.clone(), config.timeout, !config.accept_loss),
            reader: Arc::new(Link::new(client.clone(), config.timeout, false)),
            heart,
            topics: RwLock::default(),
            keeper,
            client,
            config,
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// The settings it was opened with.
    pub fn config(&self) -> &Config {
        &self.inner.config
    }
}

impl fmt::Debug for Broker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("redis_streams::Broker").field("config", &self.inner.config).finish_non_exhaustive()
    }
}
