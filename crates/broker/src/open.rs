//! From a URL to a broker: the one place that knows which schemes there are.

use std::path::PathBuf;
use std::sync::Arc;

use crate::address::{BadUrl, beginning, nearest};
use crate::{Browse, Examine, Guarantees, Publisher, Subscriber};

/// A broker that a URL names, ready to be used. It may be down for now.
#[derive(Clone)]
pub struct Connected {
    /// Sends to it.
    pub publisher: Arc<dyn Publisher>,
    /// Receives from it, where it is something that can be received from.
    pub subscriber: Option<Arc<dyn Subscriber>>,
    /// Looks at its configuration.
    pub doctor: Arc<dyn Examine>,
    /// Reads what lies in it, where that can be done without taking anything from its consumers.
    pub reader: Option<Arc<dyn Browse>>,
}

impl Connected {
    /// A log, which can be read beside its consumers.
    #[cfg(any(feature = "embedded", feature = "kafka", feature = "nats", feature = "redis-streams"))]
    fn log<B: Publisher + Subscriber + Examine + Browse + 'static>(broker: B) -> Self {
        let broker = Arc::new(broker);
        Self {
            publisher: broker.clone(),
            subscriber: Some(broker.clone()),
            doctor: broker.clone(),
            reader: Some(broker),
        }
    }

    /// Queues: what is read is taken.
    #[cfg(any(feature = "pubsub", feature = "rabbitmq", feature = "sqs"))]
    fn queues<B: Publisher + Subscriber + Examine + 'static>(broker: B) -> Self {
        let broker = Arc::new(broker);
        Self { publisher: broker.clone(), subscriber: Some(broker.clone()), doctor: broker, reader: None }
    }
}

/// What routes and groups can have of a broker.
#[derive(Clone, Debug)]
pub struct Abilities {
    /// What it promises.
    pub guarantees: Guarantees,
    /// Messages and a note of them can be one transaction.
    pub transacts: bool,
    /// It can be received from.
    pub receives: bool,
    /// What is received and what is made of it can be one transaction.
    pub transforms: bool,
}

impl Connected {
    /// What can be had of it.
    pub fn abilities(&self) -> Abilities {
        Abilities {
            guarantees: self.publisher.guarantees(),
            transacts: self.publisher.transactions().is_some(),
            receives: self.subscriber.is_some(),
            transforms: self.subscriber.as_ref().is_some_and(|subscriber| subscriber.together().is_some()),
        }
    }
}

/// What a broker may have to know of the program that it is used in.
#[derive(Clone, Debug)]
pub struct Surroundings {
    /// The file of an embedded broker whose URL names none.
    pub file: PathBuf,
    /// Bytes of the largest payload that the program accepts, for brokers whose limit is ours to choose.
    pub max_payload: usize,
}

/// Why a broker could not be opened.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Unopened {
    /// The URL is wrong.
    #[error(transparent)]
    Url(#[from] BadUrl),
    /// The broker itself.
    #[error("{0}")]
    Broken(String),
}

/// Every scheme, and the feature that it needs.
const SCHEMES: [(&str, &str); 13] = [
    ("embedded", "embedded"),
    ("kafka", "kafka"),
    ("kafkas", "kafka"),
    ("amqp", "rabbitmq"),
    ("amqps", "rabbitmq"),
    ("nats", "nats"),
    ("natss", "nats"),
    ("sqs", "sqs"),
    ("pubsub", "pubsub"),
    ("redis", "redis-streams"),
    ("rediss", "redis-streams"),
    ("http", "http"),
    ("https", "http"),
];

/// Whether `url` names a broker that this program can use. Opens nothing.
///
/// # Errors
/// Says what is wrong with it and what would be accepted.
pub fn check(url: &str) -> Result<(), BadUrl> {
    match scheme(url) {
        #[cfg(feature = "embedded")]
        "embedded" => crate::embedded::Config::from_url(url, "broker.db").map(drop),
        #[cfg(feature = "redis-streams")]
        "redis" | "rediss" => crate::redis_streams::Config::from_url(url).map(drop),
        #[cfg(feature = "sqs")]
        "sqs" => crate::sqs::Config::from_url(url).map(drop),
        #[cfg(feature = "pubsub")]
        "pubsub" => crate::pubsub::Config::from_url(url).map(drop),
        #[cfg(feature = "rabbitmq")]
        "amqp" | "amqps" => crate::rabbitmq::Config::from_url(url).map(drop),
        #[cfg(feature = "kafka")]
        "kafka" | "kafkas" => crate::kafka::Config::from_url(url).map(drop),
        #[cfg(feature = "nats")]
        "nats" | "natss" => crate::nats::Config::from_url(url).map(drop),
        #[cfg(feature = "http")]
        "http" | "https" => crate::http::Config::from_url(url).map(drop),
        _ => Err(unknown(url)),
    }
}

/// What can be had of the broker that `url` names. Nothing is connected to, and no file is made.
///
/// # Errors
/// As [`open`].
pub fn abilities(url: &str, surroundings: &Surroundings) -> Result<Abilities, Unopened> {
    match scheme(url) {
        #[cfg(feature = "embedded")]
        "embedded" => {
            let guarantees = crate::embedded::Config::from_url(url, &surroundings.file)?.guarantees();
            Ok(Abilities { guarantees, transacts: true, receives: true, transforms: false })
        }
        _ => Ok(open(url, surroundings)?.abilities()),
    }
}

/// Opens the broker that `url` names.
///
/// # Errors
/// When the URL is wrong, or what it names cannot be used at all. A server that is away is no error: it may come back.
pub fn open(url: &str, surroundings: &Surroundings) -> Result<Connected, Unopened> {
    let Surroundings { file, max_payload } = surroundings;
    match scheme(url) {
        #[cfg(feature = "embedded")]
        "embedded" => {
            let mut config = crate::embedded::Config::from_url(url, file)?;
            if !url.contains("max_payload=") {
                // What the program accepts, the broker must take, or it would die on the way.
                config.max_payload = config.max_payload.max(*max_payload);
            }
            let opened = crate::embedded::Broker::open(config);
            Ok(Connected::log(opened.map_err(|error| Unopened::Broken(error.to_string()))?))
        }
        #[cfg(feature = "redis-streams")]
        "redis" | "rediss" => {
            let mut config = crate::redis_streams::Config::from_url(url)?;
            if !url.contains("max_payload=") {
                config.max_payload = config.max_payload.max(*max_payload);
            }
            Ok(Connected::log(crate::redis_streams::Broker::open(config)?))
        }
        #[cfg(feature = "sqs")]
        "sqs" => Ok(Connected::queues(crate::sqs::Broker::open(crate::sqs::Config::from_url(url)?)?)),
        #[cfg(feature = "pubsub")]
        "pubsub" => {
            Ok(Connected::queues(crate::pubsub::Broker::open(crate::pubsub::Config::from_url(url)?)?))
        }
        #[cfg(feature = "rabbitmq")]
        "amqp" | "amqps" => {
            Ok(Connected::queues(crate::rabbitmq::Broker::open(crate::rabbitmq::Config::from_url(url)?)?))
        }
        #[cfg(feature = "kafka")]
        "kafka" | "kafkas" => {
            let mut config = crate::kafka::Config::from_url(url)?;
            if !url.contains("max_payload=") {
                config.max_payload = config.max_payload.max(*max_payload);
            }
            Ok(Connected::log(crate::kafka::Broker::open(config)?))
        }
        #[cfg(feature = "nats")]
        "nats" | "natss" => {
            Ok(Connected::log(crate::nats::Broker::open(crate::nats::Config::from_url(url)?)?))
        }
        #[cfg(feature = "http")]
        "http" | "https" => {
            let broker = Arc::new(crate::http::Broker::open(crate::http::Config::from_url(url)?)?);
            Ok(Connected { publisher: broker.clone(), subscriber: None, doctor: broker, reader: None })
        }
        _ => {
            let _ = (file, max_payload);
            Err(unknown(url).into())
        }
    }
}

fn scheme(url: &str) -> &str {
    url.split_once("://").map_or("", |(scheme, _)| scheme)
}

/// A scheme that is not built in, or that nobody knows.
fn unknown(url: &str) -> BadUrl {
    let found = scheme(url);
    if let Some((_, feature)) = SCHEMES.iter().find(|(scheme, _)| *scheme == found) {
        return BadUrl::NotBuilt { found: beginning(url), feature };
    }
    let known = SCHEMES.map(|(scheme, _)| scheme);
    BadUrl::Unknown { found: beginning(url), nearest: nearest(found, &known) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_that_names_no_broker_is_refused_with_the_nearest_and_without_its_password() {
        let error = check("kafak://ann:hush@host").expect_err("nobody knows it").to_string();
        assert!(error.contains("kafka://") && !error.contains("hush"), "{error}");
        let error = check("hush").expect_err("it is no URL").to_string();
        assert!(error.contains("://"), "{error}");
    }

    #[test]
    #[cfg(feature = "embedded")]
    fn what_an_embedded_broker_can_do_is_known_before_there_is_one() {
        let folder = tempfile::tempdir().expect("a folder");
        let surroundings = Surroundings { file: folder.path().join("broker.db"), max_payload: 1 << 20 };
        let before = abilities("embedded://", &surroundings).expect("it is known");
        assert!(!surroundings.file.exists(), "nothing was made");
        let opened = open("embedded://", &surroundings).expect("it opens").abilities();
        assert_eq!(format!("{before:?}"), format!("{opened:?}"));
    }

    #[test]
    #[cfg(not(feature = "kafka"))]
    fn a_broker_that_is_not_built_in_is_named_with_its_feature() {
        let error = check("kafka://ann:hush@host").expect_err("it is not built in").to_string();
        assert!(error.contains("--features kafka") && !error.contains("hush"), "{error}");
    }
}
