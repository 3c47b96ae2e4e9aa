//! Sending: a window of messages that wait for their confirmations, on a channel that no other call uses meanwhile.
//!
//! A call may end before all have come: because its time is up, the channel broke, or RabbitMQ blocks the connection
//! while it is short of memory or disk. What was sent by then is perhaps stored, what was not is not; the channel is
//! given up, for nobody could tell its late confirmations from others.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use lapin::options::BasicPublishOptions;
use lapin::types::ShortString;
use lapin::{BasicProperties, Channel, Confirmation};
use tokio::time::{Instant, timeout_at};

use super::confirm::{Answer, Tally};
use super::error::{Fault, size_limit};
use super::link::Session;
use super::{Broker, layout, properties};
use crate::partition::partition;
use crate::{Guarantees, Outcome, Outgoing, Publisher};

/// How long a block of the connection goes unnoticed.
const LOOK: Duration = Duration::from_millis(20);

/// A message ready to be sent.
struct Letter<'a> {
    /// In the batch.
    place: usize,
    topic: &'a str,
    key: ShortString,
    payload: Bytes,
    properties: BasicProperties,
}

/// What a call sends with, and the topics that cannot be sent to.
type Ready = (Arc<Session>, Channel, HashMap<String, Fault>);

#[async_trait]
impl Publisher for Broker {
    fn guarantees(&self) -> Guarantees {
        Guarantees {
            key_order: true,
            // What was given back for want of a queue may be followed in the window by what was not.
            ordered_batches: false,
            groups: true,
            fenced: true,
            max_payload: Some(self.inner.largest.load(Ordering::Relaxed)),
            max_batch: 5_000,
            deduplication: None,
            durability: "on the disks of a majority of each queue's replicas",
            needs: &[
                "quorum queues, on three servers for any of them to be lost",
                "the bindings of each queue, which `mandatory` watches: without one nothing is confirmed",
                "no length limit, TTL or delivery limit that drops what is not yet handled",
            ],
        }
    }

    async fn publish(&self, batch: Vec<Outgoing>) -> Vec<Outcome> {
        let end = Instant::now() + self.inner.config.timeout;
        let mut letters = Vec::with_capacity(batch.len());
        let mut outcomes = HashMap::new();
        for (place, outgoing) in batch.iter().enumerate() {
            match self.letter(place, outgoing) {
                Ok(letter) => letters.push(letter),
                Err(outcome) => drop(outcomes.insert(place, outcome)),
            }
        }
        if !letters.is_empty() {
            self.deliver(letters, end, &mut outcomes).await;
        }
        let missing = || Outcome::Unconfirmed { error: "nothing is known of it".to_owned() };
        (0..batch.len()).map(|place| outcomes.remove(&place).unwrap_or_else(missing)).collect()
    }
}

impl Broker {
    /// Writes a message down, or says why it can never be sent.
    fn letter<'a>(&self, place: usize, outgoing: &'a Outgoing) -> Result<Letter<'a>, Outcome> {
        let rejected = |error| Outcome::Rejected { error };
        let message = &outgoing.message;
        let (payload, properties) = properties::write(outgoing).map_err(rejected)?;
        let limit = self.inner.largest.load(Ordering::Relaxed);
        // The payload of an event in structured mode is larger than that of its message.
        let size = payload.len().max(message.payload.len());
        if size > limit {
            let error =
                format!("the payload has {size} bytes and RabbitMQ takes {limit}: send a reference to it");
            return Err(rejected(error));
        }
        let number = partition(message, u32::from(self.inner.config.partitions)) as u16;
        let key =
            layout::routing_key(&message.topic, number).map_err(|fault| rejected(fault.text().to_owned()))?;
        Ok(Letter { place, topic: &message.topic, key, payload, properties })
    }

    async fn deliver(
        &self,
        mut letters: Vec<Letter<'_>>,
        end: Instant,
        outcomes: &mut HashMap<usize, Outcome>,
    ) {
        let late = |_| Err(Fault::Away(format!("no answer within {:?}", self.inner.config.timeout)));
        let ready = timeout_at(end, self.ready(&letters)).await.unwrap_or_else(late);
        let (session, channel, refused) = match ready {
            Ok(ready) => ready,
            Err(fault) => {
                outcomes.extend(letters.iter().map(|letter| (letter.place, fault.outcome())));
                return;
            }
        };
        letters.retain(|letter| match refused.get(letter.topic) {
            Some(fault) => {
                outcomes.insert(letter.place, fault.outcome());
                false
            }
            None => true,
        });
        let tally = self.send(&session, &channel, &letters, end).await;
        if tally.complete() {
            session.keep(channel);
        }
        for (letter, outcome) in letters.iter().zip(self.judged(&session, &letters, &tally)) {
            outcomes.insert(letter.place, outcome);
        }
    }

    /// Connects if need be, and makes what the topics need. A connection that is found to be broken is replaced once: nothing
    /// was sent on it.
    async fn ready(&self, letters: &[Letter<'_>]) -> Result<Ready, Fault> {
        let session = self.inner.link.session().await?;
        let ready = self.ready_on(Arc::clone(&session), letters).await;
        if session.connection.status().connected() {
            return ready;
        }
        self.ready_on(self.inner.link.session().await?, letters).await
    }

    async fn ready_on(&self, session: Arc<Session>, letters: &[Letter<'_>]) -> Result<Ready, Fault> {
        if session.connection.status().blocked() {
            return Err(Fault::Away(
                "RabbitMQ is short of memory or disk and takes nothing for now".to_owned(),
            ));
        }
        let topics: BTreeSet<&str> = letters.iter().map(|letter| letter.topic).collect();
        let mut refused = HashMap::new();
        for topic in topics {
            let named = |fault| match fault {
                Fault::Refused(text) => Fault::Refused(format!("topic `{topic}`: {text}")),
                Fault::Away(text) => Fault::Away(text),
            };
            if let Err(fault) = session.prepare(&self.inner.config, topic).await {
                refused.insert(topic.to_owned(), named(fault));
            }
        }
        let channel = session.channel().await?;
        Ok((session, channel, refused))
    }

    async fn send(
        &self,
        session: &Session,
        channel: &Channel,
        letters: &[Letter<'_>],
        end: Instant,
    ) -> Tally {
        let exchange = ShortString::try_new(self.inner.config.exchange()).unwrap_or_default();
        let mut tally = Tally::new(letters.len());
        let mut waiting = FuturesUnordered::new();
        let mut unsent = 0..letters.len();
        loop {
            let blocked = session.connection.status().blocked();
            let open = !blocked && channel.status().connected();
            while open && waiting.len() < self.inner.config.window {
                let Some(index) = unsent.next() else { break };
                waiting.push(one(channel, exchange.clone(), index, &letters[index]));
            }
            if waiting.is_empty() {
                break;
            }
            match timeout_at(end.min(Instant::now() + LOOK), waiting.next()).await {
                Ok(Some((index, said))) => {
                    let answer = self.answer(said, &mut tally);
                    tally.answers[index] = answer;
                }
                Ok(None) => break,
                Err(_) if blocked || Instant::now() >= end => break,
                Err(_) => {}
            }
        }
        for index in unsent {
            tally.answers[index] = Answer::Unsent;
        }
        tally
    }

    /// One confirmation, and the return that came with it.
    fn answer(&self, said: lapin::Result<Confirmation>, tally: &mut Tally) -> Answer {
        let (returned, answer): (_, fn(bool) -> Answer) = match said {
            Ok(Confirmation::Ack(returned)) => (returned, |alone| Answer::Acked { alone }),
            Ok(Confirmation::Nack(returned)) => (returned, |_| Answer::Nacked),
            // Confirms were asked for when the channel was opened: without them nothing is known.
            Ok(Confirmation::NotRequested) => return Answer::Lost("it was not confirmed".to_owned()),
            Err(error) => {
                if let Some(limit) = size_limit(&error) {
                    self.inner.largest.fetch_min(limit, Ordering::Relaxed);
                }
                return Answer::Lost(Fault::from(error).text().to_owned());
            }
        };
        let alone = returned.is_none();
        let id = returned.and_then(|returned| returned.delivery.properties.message_id().clone());
        tally.returned.extend(id.map(String::from));
        answer(alone)
    }

    /// What became of each.
    fn judged(&self, session: &Session, letters: &[Letter<'_>], tally: &Tally) -> Vec<Outcome> {
        let limit = self.inner.largest.load(Ordering::Relaxed);
        let config = &self.inner.config;
        let judge = |(index, letter): (usize, &Letter<'_>)| {
            let id = letter.properties.message_id().as_ref().map(ShortString::as_str).unwrap_or_default();
            match tally.judge(index, id) {
                Outcome::Misconfigured { error } => {
                    session.forget(letter.topic);
                    let Letter { topic, .. } = letter;
                    let exchange = config.exchange();
                    let fix = format!("name its groups with `groups=`, or bind a queue with `{topic}.*`");
                    Outcome::Misconfigured {
                        error: format!("topic `{topic}`: {error} at the exchange `{exchange}`: {fix}"),
                    }
                }
                // The channel broke because of one that was larger than the server's own limit.
                Outcome::Unconfirmed { .. } if letter.payload.len() > limit => Outcome::Rejected {
                    error: format!(
                        "the payload has {} bytes and RabbitMQ takes {limit}",
                        letter.payload.len()
                    ),
                },
                Outcome::Unconfirmed { error } => {
                    session.forget_all();
                    Outcome::Unconfirmed { error }
                }
                outcome => outcome,
            }
        };
        letters.iter().enumerate().map(judge).collect()
    }
}

/// Sends one and waits for the answer to it.
async fn one(
    channel: &Channel,
    exchange: ShortString,
    index: usize,
    letter: &Letter<'_>,
) -> (usize, lapin::Result<Confirmation>) {
    let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
    let sent = channel.basic_publish(
        exchange,
        letter.key.clone(),
        options,
        &letter.payload,
        letter.properties.clone(),
    );
    let said = match sent.await {
        Ok(confirmation) => confirmation.await,
        Err(error) => Err(error),
    };
    (index, said)
}
