//! Whether a topic is there, what it takes, and how it is made.
//!
//! A producer finds out that a topic does not exist only after it has waited for it; so it is looked up before the
//! first message, and remembered.

use std::collections::HashMap;
use std::sync::{Arc, RwLock};
use std::time::Duration;

use rdkafka::admin::{
    AdminClient, AdminOptions, ConfigResource, NewTopic, ResourceSpecifier, TopicReplication,
};
use rdkafka::error::{KafkaError, KafkaResult};
use rdkafka::types::RDKafkaErrorCode as Code;
use tokio::time::Instant;

use super::client::{Aside, Ear};
use super::config::Config;
use super::error;

/// What Kafka allows a batch to have unless somebody changed it.
const USUAL_LIMIT: usize = 1_048_588;

/// What headers, the key and the batch around it may add to a payload.
const AROUND: usize = 64 << 10;

/// How long a server may take to say what a topic takes.
const DESCRIBED_WITHIN: Duration = Duration::from_secs(3);

/// How long what is known of a topic is believed: partitions may be added.
const BELIEVED: Duration = Duration::from_secs(300);

/// Between two looks at a topic that was just made.
const PAUSE: Duration = Duration::from_millis(20);

/// What a publisher must know of a topic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Topic {
    /// How many it has.
    pub(super) partitions: i32,
    /// Bytes of a batch at most.
    pub(super) limit: usize,
    /// Only the last message of a key is kept, so each must have one.
    pub(super) compacted: bool,
}

/// Why a topic cannot be used.
#[derive(Clone, Debug)]
pub(super) struct Trouble {
    pub(super) code: Code,
    pub(super) text: String,
}

/// All topics that were asked for.
pub(super) struct Topics {
    admin: Arc<Aside<AdminClient<Ear>>>,
    /// With when they were looked up.
    known: RwLock<HashMap<String, (Topic, Instant)>>,
    /// What a topic is made like; nothing where none is made.
    made: Option<(i32, i32)>,
    /// What a topic that is made must take.
    limit: usize,
}

impl Topics {
    pub(super) fn new(config: &Config) -> KafkaResult<Self> {
        let admin = config.client().create_with_context(Ear::default())?;
        let copies = config.replication.map_or(-1, i32::from);
        Ok(Self {
            admin: Arc::new(Aside::new(admin)),
            known: RwLock::default(),
            made: config.create.then_some((i32::from(config.partitions), copies)),
            limit: config.max_payload + AROUND,
        })
    }

    /// Looks a topic up, and makes it if it is missing and may be made.
    pub(super) async fn find(&self, name: &str, until: Instant) -> Result<Topic, Trouble> {
        let known = self.recall(name);
        if let Some((topic, looked)) = known
            && looked.elapsed() < BELIEVED
        {
            return Ok(topic);
        }
        let partitions = match (self.exists(name, until).await, self.made, known) {
            (Ok(partitions), ..) => partitions,
            (Err(trouble), Some(shape), _) if missing(trouble.code) => self.make(name, shape, until).await?,
            // It was there; the message itself will tell whether somebody is.
            (Err(trouble), _, Some((topic, _))) if !missing(trouble.code) => return Ok(topic),
            (Err(trouble), ..) => return Err(trouble),
        };
        let topic = described(partitions, self.settings(name, until).await.as_ref());
        self.remember(name, topic);
        Ok(topic)
    }

    /// Looks up the topic of notes, in which only the last of each key matters; makes it if it is missing and may be made.
    pub(super) async fn find_notes(&self, name: &str, until: Instant) -> Result<i32, Trouble> {
        if let Some((topic, _)) = self.recall(name) {
            return Ok(topic.partitions);
        }
        let partitions = match (self.exists(name, until).await, self.made) {
            (Ok(partitions), _) => partitions,
            (Err(trouble), Some((_, copies))) if missing(trouble.code) => {
                let topic = NewTopic::new(name, NOTE_PARTITIONS, TopicReplication::Fixed(copies))
                    .set("cleanup.policy", "compact")
                    .set("segment.bytes", "16777216")
                    .set("min.cleanable.dirty.ratio", "0.1");
                self.create(name, &topic, until).await?
            }
            (Err(Trouble { code, text }), None) if missing(code) => {
                let text =
                    format!("{text}; it needs cleanup.policy=compact, and sixteen partitions are best");
                return Err(Trouble { code, text });
            }
            (Err(trouble), _) => return Err(trouble),
        };
        let settings = self.settings(name, until).await;
        let policy = settings.as_ref().and_then(|settings| settings.get("cleanup.policy")?.value.as_deref());
        if policy.is_some_and(|policy| policy != "compact") {
            let text =
                format!("the topic `{name}` would lose notes: set its cleanup.policy to compact alone");
            return Err(Trouble { code: Code::InvalidConfig, text });
        }
        self.remember(name, described(partitions, settings.as_ref()));
        Ok(partitions)
    }

    /// To be looked up again: it may be gone, or changed.
    pub(super) fn forget(&self, name: &str) {
        self.known.write().expect("nobody panics while holding the map").remove(name);
    }

    /// Bytes of a batch that every known topic takes.
    pub(super) fn batch(&self) -> usize {
        let known = self.known.read().expect("nobody panics while holding the map");
        known.values().map(|(topic, _)| topic.limit).min().unwrap_or(USUAL_LIMIT)
    }

    pub(super) fn admin(&self) -> Arc<Aside<AdminClient<Ear>>> {
        Arc::clone(&self.admin)
    }

    fn recall(&self, name: &str) -> Option<(Topic, Instant)> {
        self.known.read().expect("nobody panics while holding the map").get(name).copied()
    }

    fn remember(&self, name: &str, topic: Topic) {
        let mut known = self.known.write().expect("nobody panics while holding the map");
        known.insert(name.to_owned(), (topic, Instant::now()));
    }

    /// How many partitions it has, if it is there.
    async fn exists(&self, name: &str, until: Instant) -> Result<i32, Trouble> {
        let (admin, topic) = (self.admin(), name.to_owned());
        let patience = rest(until);
        // It waits for the network.
        let looked = tokio::task::spawn_blocking(move || {
            let metadata = admin.inner().fetch_metadata(Some(&topic), patience)?;
            let failed = match metadata.topics().first() {
                None => Code::UnknownTopicOrPartition,
                Some(topic) => match (topic.error(), topic.partitions().len()) {
                    (Some(error), _) => Code::from(error),
                    (None, 0) => Code::LeaderNotAvailable,
                    (None, partitions) => return Ok(i32::try_from(partitions).unwrap_or(i32::MAX)),
                },
            };
            Err(KafkaError::MetadataFetch(failed))
        });
        let looked = looked.await.unwrap_or(Err(KafkaError::Canceled));
        looked.map_err(|failed| self.trouble(name, &failed))
    }

    async fn make(
        &self,
        name: &str,
        (partitions, copies): (i32, i32),
        until: Instant,
    ) -> Result<i32, Trouble> {
        let limit = self.limit.to_string();
        let mut topic = NewTopic::new(name, partitions, TopicReplication::Fixed(copies));
        if self.limit > USUAL_LIMIT {
            topic = topic.set("max.message.bytes", &limit);
        }
        self.create(name, &topic, until).await
    }

    async fn create(&self, name: &str, topic: &NewTopic<'_>, until: Instant) -> Result<i32, Trouble> {
        let options = AdminOptions::new().request_timeout(Some(rest(until)));
        let made = self.admin.create_topics([topic], &options).await;
        let failed = match made.map(|made| made.into_iter().next()) {
            Ok(None | Some(Ok(_))) => {
                let partitions = topic.num_partitions;
                tracing::info!(topic = name, partitions, "made a topic that was missing");
                None
            }
            // Somebody was quicker.
            Ok(Some(Err((_, Code::TopicAlreadyExists)))) => None,
            Ok(Some(Err((_, code)))) => Some(KafkaError::AdminOp(code)),
            Err(failed) => Some(failed),
        };
        if let Some(failed) = failed {
            return Err(self.trouble(name, &failed));
        }
        // It is there when every server has heard of it.
        loop {
            match self.exists(name, until).await {
                Err(trouble) if missing(trouble.code) && Instant::now() < until => {
                    tokio::time::sleep(PAUSE).await;
                }
                found => return found,
            }
        }
    }

    /// Its settings, for those who may ask.
    async fn settings(&self, name: &str, until: Instant) -> Option<ConfigResource> {
        // Something must be left of the call for those who are not answered. A wrong guess mends itself: what is refused
        // has its topic looked up again.
        let patience = (rest(until) / 2).min(DESCRIBED_WITHIN);
        let options = AdminOptions::new().request_timeout(Some(patience));
        let described = self.admin.describe_configs([&ResourceSpecifier::Topic(name)], &options).await;
        described.ok().and_then(|mut all| all.pop()?.ok())
    }

    fn trouble(&self, name: &str, failed: &KafkaError) -> Trouble {
        let code = error::code(failed);
        let text = match code {
            code if missing(code) => {
                let way = if self.made.is_some() {
                    "it was made, and is not there yet"
                } else {
                    "make it, or say create=true"
                };
                format!("Kafka has no topic `{name}`: {way}")
            }
            Code::TopicAuthorizationFailed => format!("this user may not use the topic `{name}`"),
            _ => format!("topic `{name}`: {}{}", error::text(failed), self.admin.inner().context().said()),
        };
        // An answer that did not come says nothing of the topic, and nothing was sent.
        let code = match code {
            Code::BrokerTransportFailure | Code::OperationTimedOut | Code::RequestTimedOut | Code::Fail => {
                Code::AllBrokersDown
            }
            code => code,
        };
        Trouble { code, text }
    }
}

/// What a topic takes by its settings. Who may not ask is taken to have a topic as Kafka makes them.
fn described(partitions: i32, settings: Option<&ConfigResource>) -> Topic {
    let value = |setting: &str| settings?.get(setting)?.value.as_deref();
    Topic {
        partitions,
        limit: value("max.message.bytes").and_then(|size| size.parse().ok()).unwrap_or(USUAL_LIMIT),
        compacted: value("cleanup.policy").is_some_and(|policy| policy.contains("compact")),
    }
}

/// Partitions of the topic of notes: who reads the notes of one sender waits for the transactions of others beside it.
const NOTE_PARTITIONS: i32 = 16;

/// Whether it is not there, or not yet.
fn missing(code: Code) -> bool {
    matches!(code, Code::UnknownTopicOrPartition | Code::UnknownTopic | Code::LeaderNotAvailable)
}

/// What is left of a time limit; librdkafka takes nothing at all for "do not wait".
pub(super) fn rest(until: Instant) -> Duration {
    until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1))
}
