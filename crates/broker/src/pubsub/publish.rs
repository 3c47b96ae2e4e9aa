//! Publisher: every key of a call is a lane of its own; all lanes are under way at once, and within one the client sends
//! request after request.
//!
//! The client answers a failure by pausing the key, so that nothing overtakes what failed, and stays paused until it is
//! told to go on. A word that comes while it is still pausing is lost. So every lane begins with that word, and begins
//! again when the key turns out to be paused although nothing of this call has failed.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use futures::future::join_all;
use google_cloud_pubsub::client;
use google_cloud_pubsub::error::PublishError;
use google_cloud_pubsub::model;
use google_cloud_pubsub::publisher::PublishFuture;
use tokio::sync::OnceCell;
use tokio::time::{Instant, timeout_at};

use super::error::{self, Failure};
use super::setup::Unfit;
use super::{Broker, Config, EVENT_PREFIX, Inner};
use crate::envelope::{CONTENT_TYPE, Text, Wire, wire};
use crate::partition::fnv1a;
use crate::{Format, Guarantees, Outcome, Outgoing, Publisher};

/// Messages in a request at most; the service's own limit.
const REQUEST: u32 = 1_000;

/// How long the client waits for more of a key: all of a call are given to it in one go.
const LINGER: Duration = Duration::from_millis(1);

/// The client keeps a task for every key that it ever saw: after this many it is replaced by a fresh one.
pub(super) const MANY_KEYS: usize = 10_000;

/// How often a key is told to go on within a call. Once is enough, unless calls for one key run at the same time.
const RESUMES: u32 = 5;

/// The service's limits of what travels beside the payload.
const ATTRIBUTES: usize = 100;
const NAME: usize = 256;
const VALUE: usize = 1_024;
const KEY: usize = 1_024;

/// Bytes of a message with everything at most. The service's limit of 10 MB is for the request.
const WHOLE: usize = 9_900_000;

/// The ordering key of messages whose key is the empty text: an empty ordering key means none.
const EMPTY_KEY: &str = "(empty)";

/// A topic that may be published to.
pub(super) struct Topic {
    path: String,
    current: Mutex<Current>,
}

struct Current {
    publisher: client::Publisher,
    keys: HashSet<u64>,
}

impl Topic {
    fn new(path: String, base: &client::BasePublisher) -> Self {
        let current = Current { publisher: publisher(&path, base), keys: HashSet::new() };
        Self { path, current: Mutex::new(current) }
    }

    /// The client for messages of these keys.
    fn publisher<'a>(
        &self,
        base: &client::BasePublisher,
        keys: impl Iterator<Item = &'a String>,
    ) -> client::Publisher {
        let mut current = self.current.lock().expect("nobody panics while holding it");
        current.keys.extend(keys.map(|key| fnv1a(key.as_bytes())));
        if current.keys.len() > MANY_KEYS {
            // The old one ends when the last call that uses it does.
            *current = Current { publisher: publisher(&self.path, base), keys: HashSet::new() };
        }
        current.publisher.clone()
    }
}

fn publisher(path: &str, base: &client::BasePublisher) -> client::Publisher {
    base.publisher(path).set_message_count_threshold(REQUEST).set_delay_threshold(LINGER).build()
}

#[async_trait]
impl Publisher for Broker {
    fn guarantees(&self) -> Guarantees {
        Guarantees {
            key_order: true,
            ordered_batches: true,
            groups: true,
            fenced: false,
            max_payload: Some(self.inner.config.max_payload),
            max_batch: 1_000,
            deduplication: None,
            durability: "stored in several zones of a region; by an emulator, in memory only",
            needs: &[
                "subscriptions that exist before the first message, with message ordering where keys have an order",
                "message retention longer than any group may be behind",
            ],
        }
    }

    fn once(&self) -> Option<Arc<dyn Publisher>> {
        let config = Config { once: true, ..self.inner.config.clone() };
        let endpoint = self.inner.endpoint.clone();
        let inner = Inner { config, endpoint, clients: OnceCell::new(), topics: Mutex::default() };
        Some(Arc::new(Self { inner: Arc::new(inner) }))
    }

    async fn publish(&self, batch: Vec<Outgoing>) -> Vec<Outcome> {
        let deadline = Instant::now() + self.inner.config.timeout;
        // By topic, by ordering key, in the order given. The lane without a key has an empty one.
        let mut topics: HashMap<&str, HashMap<String, Vec<usize>>> = HashMap::new();
        for (index, Outgoing { message, .. }) in batch.iter().enumerate() {
            let lanes = topics.entry(&message.topic).or_default();
            lanes.entry(ordering_key(message.key.as_deref())).or_default().push(index);
        }
        let calls = topics.into_iter().map(|(topic, lanes)| self.inner.send(&batch, topic, lanes, deadline));
        let mut outcomes = vec![Outcome::Held; batch.len()];
        for (index, outcome) in join_all(calls).await.into_iter().flatten() {
            outcomes[index] = outcome;
        }
        outcomes
    }
}

fn ordering_key(key: Option<&str>) -> String {
    match key {
        Some("") => EMPTY_KEY.to_owned(),
        Some(key) => key.to_owned(),
        None => String::new(),
    }
}

impl Inner {
    /// Sends what goes to one topic, and says what became of it.
    async fn send(
        &self,
        batch: &[Outgoing],
        topic: &str,
        lanes: HashMap<String, Vec<usize>>,
        deadline: Instant,
    ) -> Vec<(usize, Outcome)> {
        let ready = timeout_at(deadline, self.publisher(topic, lanes.keys())).await;
        let publisher = match ready.unwrap_or(Err(Unfit::Late)) {
            Ok(publisher) => publisher,
            Err(unfit) => {
                let refused = |(key, lane): (String, Vec<usize>)| match key.is_empty() {
                    true => lane.into_iter().map(|index| (index, unfit.outcome(topic))).collect(),
                    false => stopped(&lane, 0, unfit.outcome(topic)),
                };
                return lanes.into_iter().flat_map(refused).collect();
            }
        };
        let call = Call { batch, topic, publisher, max_payload: self.config.max_payload, deadline };
        let call = &call;
        let sent = lanes.into_iter().map(|(key, lane)| async move {
            match key.is_empty() {
                true => call.in_any_order(&lane).await,
                false => call.in_order(&key, &lane).await,
            }
        });
        let outcomes: Vec<_> = join_all(sent).await.into_iter().flatten().collect();
        if outcomes.iter().any(|(_, outcome)| matches!(outcome, Outcome::Misconfigured { .. })) {
            // Somebody may have deleted it: look again before the next call.
            self.topics.lock().expect("nobody panics while holding it").remove(topic);
        }
        outcomes
    }

    /// The client for `topic`, which exists by then if it may be made.
    async fn publisher(
        &self,
        topic: &str,
        keys: impl Iterator<Item = &String>,
    ) -> Result<client::Publisher, Unfit> {
        let clients = self.clients().await.map_err(Unfit::Client)?;
        let known = || self.topics.lock().expect("nobody panics while holding it").get(topic).cloned();
        let topic = match known() {
            Some(known) => known,
            None => {
                self.prepare_topic(topic).await?;
                let mut topics = self.topics.lock().expect("nobody panics while holding it");
                let fresh = || Arc::new(Topic::new(self.topic_path(topic), &clients.publisher));
                Arc::clone(topics.entry(topic.to_owned()).or_insert_with(fresh))
            }
        };
        Ok(topic.publisher(&clients.publisher, keys))
    }
}

/// Messages for one topic.
struct Call<'a> {
    batch: &'a [Outgoing],
    topic: &'a str,
    publisher: client::Publisher,
    max_payload: usize,
    deadline: Instant,
}

impl Call<'_> {
    /// Sends the messages of a key: after one that was not confirmed, no more.
    async fn in_order(&self, key: &str, lane: &[usize]) -> Vec<(usize, Outcome)> {
        let (mut done, mut together, mut resumes) = (0, true, 0);
        while done < lane.len() {
            self.publisher.resume_publish(key);
            let next = if together { &lane[done..] } else { &lane[done..=done] };
            let mut impossible = None;
            let mut sent = Vec::with_capacity(next.len());
            for index in next {
                match self.draft(*index) {
                    Ok(message) => sent.push(self.publisher.publish(message)),
                    Err(outcome) => {
                        impossible = Some(outcome);
                        break;
                    }
                }
            }
            let several = sent.len() > 1;
            let mut failed = None;
            let mut answers = sent.into_iter();
            for answer in answers.by_ref() {
                match self.answer(answer).await {
                    Answer::Confirmed => done += 1,
                    Answer::Failed(error) => {
                        failed = Some(error);
                        break;
                    }
                }
            }
            match failed {
                None => match impossible {
                    Some(outcome) => return stopped(lane, done, outcome),
                    None => continue,
                },
                Some(PublishError::OrderingKeyPaused) if resumes < RESUMES => resumes += 1,
                // A request is refused as a whole: one by one, only the guilty message is.
                Some(error) if several && is_invalid(&error) => together = false,
                Some(error) => {
                    let mut outcomes = stopped(lane, done, self.outcome(&error));
                    // Those of the same request went with it; only those that were paused behind it were not tried.
                    for (place, answer) in (done + 1..).zip(answers) {
                        match self.answer(answer).await {
                            Answer::Failed(PublishError::OrderingKeyPaused) => {}
                            Answer::Failed(error) => outcomes[place].1 = self.outcome(&error),
                            Answer::Confirmed => outcomes[place].1 = Outcome::Confirmed,
                        }
                    }
                    return outcomes;
                }
            }
        }
        lane.iter().map(|index| (*index, Outcome::Confirmed)).collect()
    }

    /// Sends messages that have no key: none waits for another.
    async fn in_any_order(&self, lane: &[usize]) -> Vec<(usize, Outcome)> {
        let several = lane.len() > 1;
        let sent: Vec<_> = lane
            .iter()
            .map(|index| (*index, self.draft(*index).map(|message| self.publisher.publish(message))))
            .collect();
        let mut outcomes = Vec::with_capacity(lane.len());
        for (index, sent) in sent {
            let outcome = match sent {
                Err(outcome) => outcome,
                Ok(answer) => match self.answer(answer).await {
                    Answer::Confirmed => Outcome::Confirmed,
                    Answer::Failed(error) if several && is_invalid(&error) => self.alone(index).await,
                    Answer::Failed(error) => self.outcome(&error),
                },
            };
            outcomes.push((index, outcome));
        }
        outcomes
    }

    /// Sends one message in a request of its own, because the one that it shared with others was refused.
    async fn alone(&self, index: usize) -> Outcome {
        match self.draft(index) {
            Err(outcome) => outcome,
            Ok(message) => match self.answer(self.publisher.publish(message)).await {
                Answer::Confirmed => Outcome::Confirmed,
                Answer::Failed(error) => self.outcome(&error),
            },
        }
    }

    async fn answer(&self, sent: PublishFuture) -> Answer {
        match timeout_at(self.deadline, sent).await {
            Ok(Ok(_id)) => Answer::Confirmed,
            Ok(Err(error)) => Answer::Failed(error),
            Err(_) => Answer::Failed(late()),
        }
    }

    fn outcome(&self, error: &PublishError) -> Outcome {
        match error {
            // Somebody else publishes this key through the same broker, and fails again and again.
            PublishError::OrderingKeyPaused => {
                Outcome::Unreachable { error: "the key is paused by a failure of another call".to_owned() }
            }
            error => error::published(error, self.topic),
        }
    }

    /// The message as Pub/Sub has it, or why that is impossible.
    fn draft(&self, index: usize) -> Result<model::Message, Outcome> {
        let outgoing = &self.batch[index];
        let rejected = |error: String| Outcome::Rejected { error };
        let size = outgoing.message.payload.len();
        if size > self.max_payload {
            return Err(rejected(format!("its payload has {size} bytes, the limit is {}", self.max_payload)));
        }
        let Wire { payload, content_type, mut fields } = wire(outgoing, EVENT_PREFIX);
        let name = match outgoing.format {
            Format::Native => CONTENT_TYPE,
            // So says the binding of CloudEvents.
            Format::CloudEvents { .. } | Format::CloudEventsStructured { .. } => "Content-Type",
        };
        fields.push((name.into(), content_type.into()));
        let key = ordering_key(outgoing.message.key.as_deref());
        if let Some(reason) = impossible(&payload, &key, &fields) {
            return Err(rejected(reason));
        }
        Ok(model::Message::new().set_data(payload).set_ordering_key(key).set_attributes(fields))
    }
}

enum Answer {
    Confirmed,
    Failed(PublishError),
}

/// No word came in time.
fn late() -> PublishError {
    PublishError::Rpc(Arc::new(google_cloud_pubsub::Error::timeout("no answer within the time limit")))
}

fn is_invalid(error: &PublishError) -> bool {
    matches!(error, PublishError::Rpc(error) if error::failure(error) == Failure::Invalid)
}

/// What the service would refuse, and with it the whole request.
fn impossible(payload: &[u8], key: &str, fields: &[(Text<'_>, Text<'_>)]) -> Option<String> {
    if fields.len() > ATTRIBUTES {
        return Some(format!("it has {} attributes, Pub/Sub takes {ATTRIBUTES}", fields.len()));
    }
    if key.len() > KEY {
        return Some(format!("its key has {} bytes, Pub/Sub takes {KEY}", key.len()));
    }
    for (name, value) in fields {
        if name.is_empty() || name.len() > NAME || name.starts_with("goog") {
            let rule = format!("a name has 1 to {NAME} bytes and does not begin with `goog`");
            return Some(format!("Pub/Sub takes no attribute `{name}`: {rule}"));
        }
        if value.len() > VALUE {
            return Some(format!("its attribute `{name}` has {} bytes, Pub/Sub takes {VALUE}", value.len()));
        }
    }
    let beside: usize = fields.iter().map(|(name, value)| name.len() + value.len()).sum();
    let whole = payload.len() + key.len() + beside;
    (whole > WHOLE).then(|| format!("it has {whole} bytes with everything, Pub/Sub takes {WHOLE}"))
}

/// The outcomes of a lane that came to `done`, where this happened.
fn stopped(lane: &[usize], done: usize, outcome: Outcome) -> Vec<(usize, Outcome)> {
    let confirmed = lane[..done].iter().map(|index| (*index, Outcome::Confirmed));
    let held = lane[done + 1..].iter().map(|index| (*index, Outcome::Held));
    confirmed.chain([(lane[done], outcome)]).chain(held).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_service_would_refuse_is_known_beforehand() {
        let field = |name: usize, value: usize| vec![("n".repeat(name).into(), "v".repeat(value).into())];
        let many = |count: usize| (0..count).map(|n| (format!("n{n}").into(), "".into())).collect::<Vec<_>>();
        assert_eq!(impossible(b"1", "key", &field(256, 1_024)), None);
        assert_eq!(impossible(b"1", "", &many(100)), None);
        let refused = [
            (impossible(b"1", "", &many(101)), "101 attributes"),
            (impossible(b"1", "", &field(257, 1)), "no attribute"),
            (impossible(b"1", "", &field(0, 1)), "no attribute"),
            (impossible(b"1", "", &[("googclient".into(), "".into())]), "`goog`"),
            (impossible(b"1", "", &field(1, 1_025)), "1025 bytes"),
            (impossible(b"1", &"k".repeat(1_025), &[]), "its key"),
            (impossible(&vec![0; WHOLE + 1], "", &[]), "with everything"),
        ];
        for (said, expected) in refused {
            let said = said.expect(expected);
            assert!(said.contains(expected), "{said}");
        }
    }

    #[test]
    fn behind_the_first_that_failed_a_lane_is_held() {
        let lost = Outcome::Unconfirmed { error: "lost".to_owned() };
        let expected = [(3, Outcome::Confirmed), (5, lost.clone()), (8, Outcome::Held), (9, Outcome::Held)];
        assert_eq!(stopped(&[3, 5, 8, 9], 1, lost), expected);
    }

    #[test]
    fn an_empty_key_is_a_key() {
        assert_eq!(ordering_key(None), "");
        assert_ne!(ordering_key(Some("")), "");
        assert_eq!(ordering_key(Some("42")), "42");
    }
}
