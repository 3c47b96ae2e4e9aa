//! Telling the producer that a group is done with a message.
//!
//! The producer hears it after the work is committed and before the broker may forget the message: whatever
//! crashes in between, the message comes again as a duplicate and is acknowledged again.

use std::fmt;
use std::sync::Arc;

use broker::{Outcome, Outgoing, Publisher};
use message::{CAPABILITY, Message, MessageId, prove};
use store::{Acknowledged, Amend, Arrival};
use tracing::{debug, warn};

#[cfg(feature = "http")]
use self::http::Producer;
#[cfg(feature = "http")]
use crate::BadHandler;

/// Who hears that a group is done with a message.
#[derive(Clone)]
pub enum Acknowledge {
    /// The store, in the transaction of the mark: it is the producer's too.
    InStore,
    /// The producer's store, when the group remembers elsewhere: once the mark is committed, and again until it is told.
    Store(Arc<dyn Amend>),
    /// A producer elsewhere, at `<producer>/api/messages/acknowledge`.
    #[cfg(feature = "http")]
    Http {
        /// Its base URL.
        producer: String,
    },
    /// A producer elsewhere, that listens to a topic.
    Topic {
        /// Where the topic is.
        publisher: Arc<dyn Publisher>,
        /// Its name.
        topic: String,
    },
    /// Nobody.
    Nobody,
}

impl fmt::Debug for Acknowledge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::InStore => "InStore",
            Self::Store(_) => "Store",
            // Without its URL, which may hold a secret.
            #[cfg(feature = "http")]
            Self::Http { .. } => "Http",
            Self::Topic { .. } => "Topic",
            Self::Nobody => "Nobody",
        })
    }
}

impl Acknowledge {
    /// Acknowledges to the producer at this base URL.
    ///
    /// # Errors
    /// When it is not an absolute http or https URL.
    #[cfg(feature = "http")]
    pub fn http(producer: impl Into<String>) -> Result<Self, BadHandler> {
        let producer = producer.into();
        crate::handler::http::endpoint(&producer)?;
        Ok(Self::Http { producer })
    }
}

/// A message that came in, and the proof of it for its producer, if that asks for one.
pub(crate) struct Received {
    id: MessageId,
    proof: Option<String>,
}

impl Received {
    /// `arrival`, received by `group`.
    pub(crate) fn new(arrival: &Arrival, group: &str) -> Self {
        let message = &arrival.message;
        let proof = message.headers.get(CAPABILITY).and_then(|capability| prove(capability, group));
        Self { id: message.id, proof }
    }

    /// What `group` tells the producer, however it does.
    fn told(&self, group: &str) -> serde_json::Value {
        let mut told = serde_json::json!({ "messageId": self.id, "consumerGroup": group });
        if let Some(proof) = &self.proof {
            told["proof"] = proof.as_str().into();
        }
        told
    }
}

/// What is still to be told, and why it could not be.
pub(crate) struct Untold {
    pub(crate) messages: Vec<Received>,
    pub(crate) error: String,
}

/// Where acknowledgements go that the store does not write itself.
#[derive(Clone)]
pub(crate) enum Ear {
    Nobody,
    Store(Arc<dyn Amend>),
    #[cfg(feature = "http")]
    Producer(Producer),
    Topic {
        publisher: Arc<dyn Publisher>,
        topic: String,
    },
}

impl Ear {
    pub(crate) fn of(acknowledge: &Acknowledge) -> Self {
        match acknowledge {
            Acknowledge::InStore | Acknowledge::Nobody => Self::Nobody,
            Acknowledge::Store(store) => Self::Store(Arc::clone(store)),
            #[cfg(feature = "http")]
            Acknowledge::Http { producer } => Self::Producer(Producer::new(producer)),
            Acknowledge::Topic { publisher, topic } => {
                Self::Topic { publisher: Arc::clone(publisher), topic: topic.clone() }
            }
        }
    }

    /// Whether there is anybody to tell.
    pub(crate) fn listens(&self) -> bool {
        !matches!(self, Self::Nobody)
    }

    /// Tells each of `messages` once.
    pub(crate) async fn tell(&self, group: &str, messages: Vec<Received>) -> Result<(), Untold> {
        match self {
            Self::Nobody => Ok(()),
            Self::Store(store) => tell_store(store.as_ref(), group, messages).await,
            #[cfg(feature = "http")]
            Self::Producer(producer) => producer.tell(group, messages).await,
            Self::Topic { publisher, topic } => tell_topic(&**publisher, topic, group, messages).await,
        }
    }
}

/// Each is a message of its own, with the key of the one that it is about.
async fn tell_topic(
    publisher: &dyn Publisher,
    topic: &str,
    group: &str,
    mut messages: Vec<Received>,
) -> Result<(), Untold> {
    let most = publisher.guarantees().max_batch.max(1);
    let mut untold = Untold { messages: Vec::new(), error: String::new() };
    while !messages.is_empty() {
        let later = messages.split_off(messages.len().min(most));
        let said = |message: &Received| {
            let told = message.told(group).to_string();
            Outgoing::new(Message::new(topic, told).key(message.id.to_string()), 0)
        };
        let outcomes = publisher.publish(messages.iter().map(said).collect()).await;
        for (message, outcome) in messages.into_iter().zip(outcomes) {
            match outcome {
                Outcome::Confirmed => {
                    debug!(message_id = %message.id, group, topic, "acknowledged to the producer");
                }
                outcome => {
                    let why = outcome.error().unwrap_or_default();
                    untold.error = format!("the topic `{topic}` cannot be told: {why}");
                    untold.messages.push(message);
                }
            }
        }
        messages = later;
    }
    if untold.messages.is_empty() { Ok(()) } else { Err(untold) }
}

async fn tell_store(store: &dyn Amend, group: &str, messages: Vec<Received>) -> Result<(), Untold> {
    let done = messages.iter().map(|message| (message.id, group.to_owned())).collect();
    let answers = match store.acknowledge(done).await {
        Ok(answers) => answers,
        Err(error) => return Err(Untold { messages, error: error.to_string() }),
    };
    for (Received { id, .. }, answer) in messages.iter().zip(answers) {
        match answer {
            Acknowledged::New | Acknowledged::Repeated | Acknowledged::NotAsked => {
                debug!(message_id = %id, group, ?answer, "acknowledged to the producer's store");
            }
            // Asking again would not change that; what is sent again is acknowledged again.
            Acknowledged::Unknown | Acknowledged::Refused(_) => {
                warn!(message_id = %id, group, ?answer, "the store does not take this acknowledgement; going on");
            }
        }
    }
    Ok(())
}

#[cfg(feature = "http")]
mod http {
    //! Acknowledgements to a producer elsewhere.

    use std::time::Duration;

    use futures::{StreamExt, stream};
    use reqwest::{Client, StatusCode, Url, redirect};
    use tracing::{debug, warn};

    use super::{Received, Untold};
    use crate::BadHandler;
    use crate::handler::http::{cause, endpoint, shown};

    /// Requests at a time.
    const CONCURRENCY: usize = 16;

    const TIMEOUT: Duration = Duration::from_secs(10);

    #[derive(Clone)]
    pub(crate) struct Producer {
        /// A URL that cannot be used is kept as its error: it shows in the status like a producer that is down.
        target: Result<(Client, Url), BadHandler>,
    }

    impl Producer {
        pub(crate) fn new(base: &str) -> Self {
            let target = endpoint(&format!("{}/api/messages/acknowledge", base.trim_end_matches('/')));
            let client = Client::builder().redirect(redirect::Policy::none()).timeout(TIMEOUT).no_proxy();
            let client = client.build().map_err(|error| BadHandler(format!("no HTTP client: {error}")));
            Self { target: target.and_then(|url| Ok((client?, url))) }
        }

        pub(crate) async fn tell(&self, group: &str, messages: Vec<Received>) -> Result<(), Untold> {
            let (client, url) = match &self.target {
                Ok(target) => target,
                Err(error) => return Err(Untold { messages, error: error.to_string() }),
            };
            let answers: Vec<_> = stream::iter(messages)
                .map(|message| async move {
                    let answer = say(client, url, group, &message).await;
                    (message, answer)
                })
                .buffer_unordered(CONCURRENCY)
                .collect()
                .await;
            let mut untold = Untold { messages: Vec::new(), error: String::new() };
            for (message, answer) in answers {
                if let Err(error) = answer {
                    untold.messages.push(message);
                    untold.error = error;
                }
            }
            if untold.messages.is_empty() { Ok(()) } else { Err(untold) }
        }
    }

    async fn say(client: &Client, url: &Url, group: &str, message: &Received) -> Result<(), String> {
        let id = message.id;
        let shown = shown(url);
        let sent = client.post(url.clone()).json(&message.told(group)).send().await;
        let answer = sent.map_err(|error| format!("{shown} cannot be told: {}", cause(&error)))?;
        let status = answer.status();
        match status {
            _ if status.is_success() => {
                debug!(message_id = %id, group, "acknowledged to the producer");
                Ok(())
            }
            // The producer does not keep this message (any more): asking again would not change that.
            StatusCode::NOT_FOUND | StatusCode::CONFLICT | StatusCode::GONE => {
                warn!(message_id = %id, group, %status, "the producer does not take this acknowledgement; going on");
                Ok(())
            }
            // It was sent before the producer asked for proofs, or under a secret that is gone. What is sent again has a new one.
            StatusCode::FORBIDDEN if answer.text().await.is_ok_and(|text| text.contains("-proof")) => {
                warn!(message_id = %id, group, "the producer does not take the proof of this acknowledgement; going on");
                Ok(())
            }
            _ => Err(format!("{shown} answered {status}")),
        }
    }
}
