//! RabbitMQ: confirmed into quorum queues, in order for each key, by AMQP 0-9-1.
//!
//! - Everything goes to one durable topic exchange (`exchange=` names it). The routing key is the topic and the partition
//!   of the message's key: `orders.@3`. Who wants all of a topic binds `orders.*`.
//! - A group has [`Config::partitions`] quorum queues for each topic, `postrider:billing:orders:3`, each with a single
//!   active consumer. Members wait in line at all of them and divide them evenly: see `share`. They sign on at one more,
//!   `postrider:billing:orders:members`, which stays empty.
//! - A message is confirmed when a majority of the replicas of every queue that it was routed to has it on disk. One that
//!   was routed nowhere comes back and is `Misconfigured`, although RabbitMQ acknowledges it: see `confirm`.
//!
//! What to know:
//! - RabbitMQ keeps nothing for those who are not there. A group gets what is published once its queues exist: they are
//!   made by its first member, or with the first message of a topic for those that [`Config::groups`] names. A message
//!   that goes to no group at all is not lost, because it is not confirmed; one that goes to some groups and misses
//!   another is, for that one.
//! - Likewise a queue that nobody reads any more fills up: [`Broker::forget`] removes a group.
//! - All who publish and receive must agree on `partitions`, and the members of a group on `prefetch`.
//! - A connection that RabbitMQ blocks, because it is short of memory or disk, is `Unreachable` until it is unblocked.

mod config;
mod confirm;
mod error;
mod examine;
mod layout;
mod link;
mod properties;
mod publish;
mod receive;
mod share;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

pub use config::{Ahead, Config};

use crate::{ReceiveError, Unopened};
use link::Link;

/// A RabbitMQ. Cheap to clone: clones share the connection that publishes.
#[derive(Clone)]
pub struct Broker {
    inner: Arc<Inner>,
}

struct Inner {
    config: Arc<Config>,
    link: Link,
    /// Bytes of the largest payload: our setting, or less where the server turned out to have its own.
    largest: AtomicUsize,
}

impl Broker {
    /// A broker with these settings. Nothing is connected yet: the server may be down.
    ///
    /// # Errors
    /// When a setting makes no sense.
    pub fn open(config: Config) -> Result<Self, Unopened> {
        config.check()?;
        let largest = AtomicUsize::new(config.max_payload);
        let config = Arc::new(config);
        let link = Link::new(Arc::clone(&config));
        Ok(Self { inner: Arc::new(Inner { config, link, largest }) })
    }

    /// The settings it was opened with.
    pub fn config(&self) -> &Config {
        &self.inner.config
    }

    /// Removes a group's queues for these topics, with all that is in them: nobody else does, and they would grow for ever.
    ///
    /// # Errors
    /// When RabbitMQ cannot be reached, or does not allow it.
    pub async fn forget(&self, group: &str, topics: &[String]) -> Result<(), ReceiveError> {
        let config = &self.inner.config;
        let connection = link::connect(config).await?;
        let channel = connection.create_channel().await.map_err(error::Fault::from)?;
        for topic in topics {
            for partition in 0..config.partitions {
                layout::remove(&channel, layout::queue(config, group, topic, partition)?).await?;
            }
            layout::remove(&channel, layout::roll(config, group, topic)?).await?;
        }
        drop(connection.close(200, "".into()).await);
        Ok(())
    }
}

impl fmt::Debug for Broker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("rabbitmq::Broker").field("config", &self.inner.config).finish_non_exhaustive()
    }
}
