//! What Postrider is told to do: the settings, their defaults, and where they are found.
//!
//! [`load()`] finds the file and the environment, [`read`] turns the tree of them into [`Config`], and
//! [`check`] refuses what is well written and cannot work. All of it happens before anything is opened, and
//! tells everything that is wrong at once.

mod check;
mod load;
mod overlap;
mod place;
mod read;
mod section;
mod show;
mod tree;
mod units;

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use broker::Format;
use message::{OnDead, Order, RetryPolicy, Secrets, Semantics, TopicPattern};
use store::{Retention, Sent};

pub(crate) use load::{Loaded, Rejected, load};
pub(crate) use place::{ACCEPT_LOSS, Place};
pub(crate) use read::parse_listen;
pub(crate) use show::{on_dead, order, redacted};
pub(crate) use units::duration_text;

/// The settings that stand in for whole sections that the file leaves out.
pub(crate) const BUILT_IN: &str = include_str!("config/built_in.toml");

/// All settings.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    /// Where messages wait.
    pub(crate) store: Store,
    /// The producer's API.
    pub(crate) producer: Producer,
    /// The consumer's API.
    pub(crate) consumer: ConsumerSide,
    /// The relay.
    pub(crate) relay: Relay,
    /// What is logged, and how.
    pub(crate) log: Log,
    /// Brokers by name.
    pub(crate) brokers: BTreeMap<String, Broker>,
    /// Routes by name.
    pub(crate) routes: BTreeMap<String, Route>,
    /// Consumer groups by name.
    pub(crate) consumers: BTreeMap<String, Consumer>,
}

/// `[store]`
#[derive(Clone, Debug)]
pub(crate) struct Store {
    /// As written.
    pub(crate) url: String,
    /// What it names.
    pub(crate) place: Place,
    /// What becomes of records that were sent.
    pub(crate) sent: Sent,
    /// Writers wake a sleeping relay by a trigger.
    pub(crate) doorbell: bool,
    /// Connections at most.
    pub(crate) connections: usize,
    /// What the keys in Redis begin with.
    pub(crate) prefix: String,
    /// Replicas that must have a write before it is answered.
    pub(crate) replicas: u32,
    /// Somebody has said in words that Redis may lose messages.
    pub(crate) accept_loss: bool,
    /// How long records are kept.
    pub(crate) retention: Retention,
}

/// `[producer]`
#[derive(Clone, Debug)]
pub(crate) struct Producer {
    /// Where it listens.
    pub(crate) listen: SocketAddr,
    /// Bytes of a request at most.
    pub(crate) body_limit: usize,
    /// What capabilities to acknowledge are made of.
    pub(crate) acknowledge_secrets: Option<Secrets>,
    /// Where it hears acknowledgements, beside HTTP.
    pub(crate) acknowledgements: Option<Acknowledgements>,
}

/// `[producer] acknowledgements`
#[derive(Clone, Debug)]
pub(crate) struct Acknowledgements {
    /// The topic.
    pub(crate) topic: String,
    /// The broker that has it.
    pub(crate) broker: String,
    /// The group of all instances of this producer.
    pub(crate) group: String,
}

/// `[consumer]`
#[derive(Clone, Debug)]
pub(crate) struct ConsumerSide {
    /// Where it listens.
    pub(crate) listen: SocketAddr,
    /// The producer to acknowledge to; in the store when absent.
    pub(crate) acknowledge_to: Option<AcknowledgeTo>,
    /// The Redis that remembers ids for groups with `dedup = "redis"` or `"hybrid"`.
    pub(crate) redis: Option<String>,
}

/// `[consumer] acknowledge_to`
#[derive(Clone, Debug)]
pub(crate) enum AcknowledgeTo {
    /// The address of a producer.
    Http(String),
    /// A topic that a producer listens to, and the broker that has it.
    Topic { topic: String, broker: String },
}

/// `[relay]`
#[derive(Clone, Debug)]
pub(crate) struct Relay {
    /// How long a crashed relay's work stays locked.
    pub(crate) lease: Duration,
    /// Messages in a claim at most.
    pub(crate) batch: usize,
    /// Bytes in a claim at most.
    pub(crate) bytes: usize,
    /// The longest wait between two looks at the store.
    pub(crate) poll: Duration,
    /// A lock and a counter in Redis for every message that is sent.
    pub(crate) claims: Option<Claims>,
}

/// `[relay] claims`
#[derive(Clone, Debug)]
pub(crate) struct Claims {
    /// The server.
    pub(crate) url: String,
    /// How long the lock of a crashed worker stays.
    pub(crate) ttl: Duration,
    /// How long the counter does.
    pub(crate) keep: Duration,
    /// What keys begin with; `{id}` stands for the message's id.
    pub(crate) prefix: String,
}

/// `[log]`
#[derive(Clone, Debug)]
pub(crate) struct Log {
    /// For people or for programs.
    pub(crate) format: LogFormat,
    /// A level, or a filter as `RUST_LOG` takes it.
    pub(crate) level: String,
}

/// How a line of the log looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// `[brokers.*]`
#[derive(Clone, Debug)]
pub(crate) struct Broker {
    /// As written.
    pub(crate) url: String,
}

/// `[routes.*]`
#[derive(Clone, Debug)]
pub(crate) struct Route {
    /// The topics it takes.
    pub(crate) topics: Vec<TopicPattern>,
    /// Where they go.
    pub(crate) broker: String,
    /// What is promised.
    pub(crate) semantics: Semantics,
    /// Why that was chosen.
    pub(crate) why: Option<String>,
    /// Its consumers' handlers may run twice without harm, so a handler outside the transaction is no surprise.
    pub(crate) idempotent: bool,
    /// What is kept in order.
    pub(crate) order: Order,
    /// What a Dead message does to its key.
    pub(crate) on_dead: OnDead,
    /// When to try again.
    pub(crate) retry: RetryPolicy,
    /// How its messages are written down for the broker.
    pub(crate) format: Format,
    /// When its flow is told to have dropped; never when absent.
    pub(crate) watch: Option<Watch>,
    /// The topic of the copies that are written before its messages are sent.
    pub(crate) copy_to: Option<String>,
}

/// `[routes.x] watch`
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Watch {
    /// What is compared with what came before it.
    pub(crate) window: Duration,
    /// The share by which it must be less.
    pub(crate) drop: f64,
}

/// `[consumers.*]`
#[derive(Clone, Debug)]
pub(crate) struct Consumer {
    /// What it wants to hear of.
    pub(crate) topics: Vec<String>,
    /// From where.
    pub(crate) broker: String,
    /// What is promised.
    pub(crate) semantics: Semantics,
    /// How duplicates are recognised.
    pub(crate) dedup: Dedup,
    /// For how long.
    pub(crate) keep_ids: Duration,
    /// How old a message may be that people send again without being asked whether they mean it.
    pub(crate) replay: Duration,
    /// When what it has not acknowledged is sent again; never when absent.
    pub(crate) acknowledge: Option<Acknowledge>,
    /// What is kept in order.
    pub(crate) order: Order,
    /// What a Dead message does to its key.
    pub(crate) on_dead: OnDead,
    /// When to try again.
    pub(crate) retry: RetryPolicy,
    /// What is done with a message.
    pub(crate) handler: Handler,
}

/// `[consumers.x] acknowledge`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Acknowledge {
    /// How long a message may be with the group.
    pub(crate) timeout: Duration,
    /// How often the relay looks.
    pub(crate) check_every: Duration,
    /// How often a message is sent again.
    pub(crate) max_redeliveries: u32,
}

impl Acknowledge {
    /// How long after it was sent first a message may be sent again.
    pub(crate) fn horizon(self) -> Duration {
        (self.timeout + self.check_every).saturating_mul(self.max_redeliveries.saturating_add(1))
    }
}

/// How duplicates are recognised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dedup {
    /// By a mark in the store, in the handler's transaction.
    Sql,
    /// By a mark in Redis, which forgets when it must.
    Redis,
    /// Redis answers for what it has seen; the store decides.
    Hybrid,
}

impl Dedup {
    /// The word in the configuration.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Sql => "sql",
            Self::Redis => "redis",
            Self::Hybrid => "hybrid",
        }
    }
}

/// What a consumer group does with a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Handler {
    /// A line in the log.
    Log,
    /// A request to this URL.
    Http {
        /// Where.
        url: String,
        /// The longest wait for an answer.
        timeout: Duration,
    },
    /// A statement in the transaction of the mark.
    Sql(String),
    /// A piece of Lua in the script of the mark, on a store that is Redis.
    Script(String),
    /// A program, and its arguments.
    Command {
        /// The program first.
        line: Vec<String>,
        /// When it is stopped.
        timeout: Duration,
    },
}

impl Handler {
    /// The word in the configuration.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Log => "log",
            Self::Http { .. } => "http",
            Self::Sql(_) => "sql",
            Self::Script(_) => "script",
            Self::Command { .. } => "command",
        }
    }

    /// Whether its work is in the transaction of the mark.
    pub(crate) fn is_transactional(&self) -> bool {
        matches!(self, Self::Log | Self::Sql(_) | Self::Script(_))
    }
}

/// One thing that is wrong, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Complaint {
    /// The setting: `routes.default.retry`.
    pub(crate) setting: String,
    /// The line or variable.
    pub(crate) origin: tree::Origin,
    /// What is wrong and what to do.
    pub(crate) text: String,
}

impl fmt::Display for Complaint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.origin, self.setting.as_str()) {
            (tree::Origin::BuiltIn, "") => f.write_str(&self.text),
            (tree::Origin::BuiltIn, setting) => write!(f, "{setting}: {}", self.text),
            (origin, "") => write!(f, "{origin}: {}", self.text),
            (origin, setting) => write!(f, "{setting} ({origin}): {}", self.text),
        }
    }
}
