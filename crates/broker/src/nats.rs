//! NATS JetStream: messages in one stream, read by groups through durable consumers.
//!
//! # What goes where
//! - All topics of a prefix are in one stream (`prefix=postrider`, `stream=postrider`), which is made when it is missing.
//! - A message of the topic `orders` goes to the subject `postrider.orders.7`: the last word is its partition, by its key.
//!   All who publish and all who read must agree on the number of partitions; a stream that we made remembers it.
//! - A group has a durable pull consumer for each partition of its topics. One member holds a partition at a time: the
//!   members write that down in an entry of the key-value bucket `postrider_groups` (see `roster.rs`).
//!
//! # What is promised
//! - Confirmed is what the stream has acknowledged. The server itself writes to the disk every minute or two: only with
//!   three replicas does a confirmed message survive a loss of power.
//! - A key keeps its order: its messages are sent one after another, are in one partition, and are handed out by one member.
//!   The server delivers a message again after newer ones when its delivery was lost; see `shelf.rs` for why that does not show.
//! - A message that is sent twice within the stream's duplicate window is stored once; each deliberate delivery has an id
//!   of its own, so that sending a message again on purpose is not taken for a duplicate.
//! - A message is kept for `retain`, read or not; a new group begins at the oldest that is kept, or at `start`.
//! - A member that was taken for dead may still finish what it had: the server takes any acknowledgement (not fenced).
//!
//! # Traps
//! - A publish that nobody listens to is answered "no responders": that may be a missing stream, a stream without the
//!   subject, or a cluster without a leader, and each means something else to the relay.
//! - Where somebody listens to everything (`nats sub '>'`) there is no such answer: the subjects are compared beforehand.

mod acknowledge;
mod browse;
mod config;
mod error;
mod examine;
mod fetch;
mod headers;
mod link;
mod member;
mod publish;
mod receive;
mod roster;
mod shelf;
mod stream;

use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

pub use config::{Config, Login, Start};

use crate::Unopened;
use crate::partition::fnv1a;
use link::Link;

/// A NATS server or cluster. Cheap to clone: clones share one connection.
#[derive(Clone)]
pub struct Broker {
    inner: Arc<Inner>,
}

struct Inner {
    config: Config,
    link: Link,
    /// What was last heard of the stream.
    known: RwLock<Heard>,
    /// Held by whoever looks at the stream: a thousand messages that miss it must not all look.
    looking: tokio::sync::Mutex<()>,
}

/// What is known of the stream.
#[derive(Clone, Debug)]
struct Known {
    /// Which look it was.
    look: u64,
    /// When it was.
    at: Instant,
    /// Bytes of a message with its headers, at most.
    limit: usize,
    /// How long it recognises a message that is sent twice.
    window: Duration,
    subjects: Arc<[String]>,
}

#[derive(Debug)]
struct Heard {
    now: Option<Known>,
    looks: u64,
    limit: usize,
    window: Duration,
}

impl Broker {
    /// Makes a broker of its settings. Nothing is connected yet: that happens when it is first used, and again whenever
    /// the server was away.
    ///
    /// # Errors
    /// Never, as it is now.
    pub fn open(config: Config) -> Result<Self, Unopened> {
        let heard = Heard { now: None, looks: 0, limit: stream::USUAL_LIMIT, window: config.window() };
        let inner = Inner {
            config,
            link: Link::new(),
            known: RwLock::new(heard),
            looking: tokio::sync::Mutex::default(),
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
        f.debug_struct("nats::Broker").field("config", &self.inner.config).finish_non_exhaustive()
    }
}

impl Inner {
    fn recall(&self) -> Option<Known> {
        self.known.read().unwrap_or_else(PoisonError::into_inner).now.clone()
    }

    fn remember(&self, limit: usize, window: Duration, subjects: Vec<String>) -> Known {
        let mut heard = self.known.write().unwrap_or_else(PoisonError::into_inner);
        heard.looks += 1;
        let known = Known { look: heard.looks, at: Instant::now(), limit, window, subjects: subjects.into() };
        (heard.limit, heard.window, heard.now) = (limit, window, Some(known.clone()));
        known
    }

    /// The stream may have changed: the next who needs it looks again.
    fn forget(&self) {
        self.known.write().unwrap_or_else(PoisonError::into_inner).now = None;
    }

    /// The same, unless somebody has looked since.
    fn forget_this(&self, known: &Known) {
        let mut heard = self.known.write().unwrap_or_else(PoisonError::into_inner);
        if heard.now.as_ref().is_some_and(|now| now.look == known.look) {
            heard.now = None;
        }
    }

    /// Bytes of a message, and the duplicate window, as last heard.
    fn limits(&self) -> (usize, Duration) {
        let heard = self.known.read().unwrap_or_else(PoisonError::into_inner);
        (heard.limit, heard.window)
    }

    fn bucket_name(&self) -> String {
        format!("{}_groups", self.config.stream)
    }
}

/// A name for something in NATS, which knows no dots in names and none longer than a file's: as readable as can be, and
/// different for different `parts`.
fn slug(parts: &[&str]) -> String {
    let mut slug = String::new();
    let mut whole = Vec::new();
    for part in parts {
        slug.extend(part.chars().map(|c| if c == '.' { '_' } else { c }).take(80));
        slug.push('-');
        whole.extend_from_slice(part.as_bytes());
        whole.push(0);
    }
    format!("{slug}{:016x}", fnv1a(&whole))
}

#[cfg(test)]
mod tests {
    use super::slug;

    #[test]
    fn names_in_nats_are_short_allowed_and_different() {
        let long = "x".repeat(249);
        let names = [
            slug(&["a.b", "c"]),
            slug(&["a", "b.c"]),
            slug(&["a_b", "c"]),
            slug(&["a-b", "c"]),
            slug(&["a", "b-c"]),
            slug(&[&long, &long]),
            slug(&[&long, &long[1..]]),
        ];
        for (at, name) in names.iter().enumerate() {
            assert!(name.len() < 200 && !name.contains(['.', '*', '>', ' ', '/']), "{name}");
            assert!(!names[..at].contains(name), "{name}");
        }
        assert_eq!(slug(&["billing", "orders"]), "billing-orders-bf1612abac7019bc");
    }
}
