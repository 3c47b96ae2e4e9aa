//! Sending: many keys at once, each key one after another, and the server's word on every message.
//!
//! A message of a key is sent when the one before it is confirmed. To send it earlier would be faster and wrong: if the
//! first is refused, or its confirmation is lost, the second is already stored. Messages without a key wait for nobody.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use async_nats::jetstream::context::Context;
use async_nats::jetstream::message::PublishMessage;
use async_trait::async_trait;
use futures::StreamExt;
use message::{Invalid, Message, check_topic};
use tokio::time::Instant;

use super::error::unpublished;
use super::headers::{self, Written};
use super::link::connections;
use super::stream::{HEADROOM, covers, subject};
use super::{Broker, Inner, Known};
use crate::partition::partition;
use crate::{Guarantees, Outcome, Outgoing, Publisher};

/// Messages in one call at most: what is not confirmed in time is sent again as a whole.
const MAX_BATCH: usize = 10_000;

/// What is known of a message while its call runs.
#[derive(Clone, Debug)]
enum Progress {
    Waiting,
    Sent,
    Done(Outcome),
}

/// Messages that must be stored one after another, by their place in the batch.
type Lane = Vec<(usize, Outgoing)>;

#[async_trait]
impl Publisher for Broker {
    fn guarantees(&self) -> Guarantees {
        let config = &self.inner.config;
        let (limit, window) = self.inner.limits();
        Guarantees {
            key_order: true,
            ordered_batches: true,
            groups: true,
            fenced: false,
            max_payload: Some(payload_limit(limit)),
            max_batch: MAX_BATCH,
            deduplication: Some(window),
            durability: match config.replicas {
                0..=2 => {
                    "survives a crash of the server; one copy, written to disk every minute or two: a loss of power may \
                     take what was confirmed since"
                }
                _ => "survives the loss of a minority of the servers that keep copies",
            },
            needs: &[
                "a stream on file with three replicas, and sync_interval always where power may fail",
                "max_age, max_bytes and max_msgs that no group falls behind",
                "a duplicate window longer than a message may be sent again",
            ],
        }
    }

    async fn recognises(&self, horizon: Duration) -> Result<(), Outcome> {
        self.inner.recognises(horizon).await.map_err(|trouble| trouble.outcome())
    }

    async fn publish(&self, batch: Vec<Outgoing>) -> Vec<Outcome> {
        let until = Instant::now() + self.inner.config.timeout;
        let progress = Mutex::new(vec![Progress::Waiting; batch.len()]);
        let lanes = lanes(batch);
        let places: Vec<Vec<usize>> =
            lanes.iter().map(|lane| lane.iter().map(|(at, _)| *at).collect()).collect();
        let why = match tokio::time::timeout_at(until, self.inner.send_all(lanes, &progress)).await {
            Ok(Ok(())) => None,
            Ok(Err(outcome)) => Some(outcome),
            Err(_) => {
                let error = format!("NATS did not answer within {:?}", self.inner.config.timeout);
                Some(Outcome::Unreachable { error })
            }
        };
        if why.is_some() {
            // Whatever was wrong, the stream may be another when it is over.
            self.inner.forget();
        }
        let progress = progress.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        settle(&places, progress, why)
    }
}

/// Messages of a topic and key share a lane, in their order.
fn lanes(batch: Vec<Outgoing>) -> Vec<Lane> {
    let mut lanes: Vec<Lane> = Vec::with_capacity(batch.len());
    let mut keys: HashMap<(String, String), usize> = HashMap::new();
    for (at, outgoing) in batch.into_iter().enumerate() {
        let Message { topic, key, .. } = &*outgoing.message;
        match key {
            None => lanes.push(vec![(at, outgoing)]),
            Some(key) => {
                let lane = *keys.entry((topic.clone(), key.clone())).or_insert(lanes.len());
                match lanes.get_mut(lane) {
                    Some(lane) => lane.push((at, outgoing)),
                    None => lanes.push(vec![(at, outgoing)]),
                }
            }
        }
    }
    lanes
}

/// One outcome for each message; `why` is what stopped those that are not done.
fn settle(places: &[Vec<usize>], progress: Vec<Progress>, why: Option<Outcome>) -> Vec<Outcome> {
    let why = why.unwrap_or_else(|| Outcome::Unreachable { error: "NATS: it was not sent".to_owned() });
    let unconfirmed = match &why {
        Outcome::Unreachable { error } => Outcome::Unconfirmed { error: error.clone() },
        other => other.clone(),
    };
    let mut outcomes = vec![Outcome::Held; progress.len()];
    for lane in places {
        for at in lane {
            outcomes[*at] = match &progress[*at] {
                Progress::Done(outcome) => outcome.clone(),
                Progress::Sent => unconfirmed.clone(),
                Progress::Waiting => why.clone(),
            };
            if outcomes[*at] != Outcome::Confirmed {
                // Those after it were not sent.
                break;
            }
        }
    }
    outcomes
}

impl Inner {
    /// Sends every lane, as many at a time as the window allows. `Err`: why those that are not done are not.
    async fn send_all(&self, lanes: Vec<Lane>, progress: &Mutex<Vec<Progress>>) -> Result<(), Outcome> {
        if lanes.is_empty() {
            return Ok(());
        }
        let known = self.ready().await.map_err(|trouble| trouble.outcome())?;
        let context = self.link.connected(&self.config).await.map_err(|trouble| trouble.outcome())?;
        let client = context.client();
        let number = connections(&client);
        let known = &known;
        let sending = futures::stream::iter(lanes)
            .for_each_concurrent(self.config.window, |lane| self.send_lane(context, known, lane, progress));
        tokio::select! {
            () = sending => Ok(()),
            () = self.link.gone(&client, number) => {
                Err(Outcome::Unreachable { error: "NATS: the connection was lost".to_owned() })
            }
        }
    }

    /// Sends one message after another, until one is not confirmed.
    async fn send_lane(&self, context: &Context, known: &Known, lane: Lane, progress: &Mutex<Vec<Progress>>) {
        let note = |at: usize, now: Progress| {
            progress.lock().unwrap_or_else(std::sync::PoisonError::into_inner)[at] = now;
        };
        for (at, outgoing) in lane {
            let outcome = match self.check(known, &outgoing) {
                Ok((subject, written)) => {
                    note(at, Progress::Sent);
                    self.send(context, known, &outgoing.message.topic, subject, written).await
                }
                Err(outcome) => outcome,
            };
            let confirmed = outcome == Outcome::Confirmed;
            note(at, Progress::Done(outcome));
            if !confirmed {
                return;
            }
        }
    }

    /// The message as it is sent and where to, or why it cannot be.
    fn check(&self, known: &Known, outgoing: &Outgoing) -> Result<(String, Written), Outcome> {
        let rejected = |error: String| Outcome::Rejected { error };
        let message = &outgoing.message;
        check_topic(&message.topic).map_err(|invalid| rejected(invalid.to_string()))?;
        let (size, limit) = (message.payload.len(), payload_limit(known.limit));
        if size > limit {
            return Err(rejected(Invalid::PayloadTooLarge { size, limit }.to_string()));
        }
        let written = headers::write(outgoing, &self.config.stream).map_err(rejected)?;
        if written.size > known.limit {
            let (size, limit) = (written.size, known.limit);
            return Err(rejected(format!("{size} bytes with its headers, and NATS takes {limit} at most")));
        }
        let subject =
            subject(&self.config.prefix, &message.topic, partition(message, self.config.partitions));
        if !known.subjects.iter().any(|pattern| covers(pattern, &subject)) {
            // The stream may have been given the topic meanwhile; the next call looks.
            self.forget();
            return Err(self.homeless(&message.topic));
        }
        Ok((subject, written))
    }

    /// Sends a message and waits for the server's word. The caller limits the time.
    async fn send(
        &self,
        context: &Context,
        known: &Known,
        topic: &str,
        subject: String,
        written: Written,
    ) -> Outcome {
        let Written { headers, payload, .. } = written;
        let message = PublishMessage::build().headers(headers).payload(payload);
        let first = confirm(context, subject.clone(), message.clone()).await;
        if let Some(outcome) = first {
            return outcome;
        }
        // Nobody listens to the subject, so it was stored nowhere: why is found out, and perhaps mended.
        self.forget_this(known);
        match self.ready().await {
            Err(trouble) => return trouble.outcome(),
            Ok(known) if !known.subjects.iter().any(|pattern| covers(pattern, &subject)) => {
                return self.homeless(topic);
            }
            Ok(_) => {}
        }
        let second = confirm(context, subject, message).await;
        second.unwrap_or_else(|| Outcome::Unreachable {
            error: format!("NATS: the stream `{}` is there and does not listen", self.config.stream),
        })
    }

    fn homeless(&self, topic: &str) -> Outcome {
        let (stream, prefix) = (&self.config.stream, &self.config.prefix);
        Outcome::Misconfigured {
            error: format!(
                "NATS: the stream `{stream}` does not keep the topic `{topic}`: add `{prefix}.{topic}.*` to its subjects"
            ),
        }
    }
}

/// The server's word on one message. `None`: there is nobody to give it.
async fn confirm(context: &Context, subject: String, message: PublishMessage) -> Option<Outcome> {
    let sent = match context.send_publish(subject, message).await {
        Ok(confirmation) => confirmation.await,
        Err(error) => Err(error),
    };
    match sent {
        // One that the server recognises as a duplicate is stored as well. That it is our stream which answers is made
        // sure by a header of the message.
        Ok(_) => Some(Outcome::Confirmed),
        Err(error) => unpublished(&error),
    }
}

/// What is left for payloads when headers have theirs.
fn payload_limit(limit: usize) -> usize {
    limit.saturating_sub(HEADROOM).max(limit / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outgoing(key: Option<&str>) -> Outgoing {
        let message = Message::new("orders", "");
        Outgoing::new(Message { key: key.map(str::to_owned), ..message }, 1)
    }

    #[test]
    fn a_key_is_one_lane_and_a_message_without_a_key_is_alone() {
        let batch = vec![
            outgoing(Some("a")),
            outgoing(None),
            outgoing(Some("b")),
            outgoing(Some("a")),
            outgoing(None),
        ];
        let lanes = lanes(batch);
        let places: Vec<Vec<usize>> =
            lanes.iter().map(|lane| lane.iter().map(|(at, _)| *at).collect()).collect();
        assert_eq!(places, [vec![0, 3], vec![1], vec![2], vec![4]]);
    }

    #[test]
    fn what_was_sent_may_be_stored_and_what_follows_it_was_held() {
        let why = Outcome::Unreachable { error: "gone".to_owned() };
        let progress = vec![
            Progress::Done(Outcome::Confirmed),
            Progress::Sent,
            Progress::Waiting,
            Progress::Waiting,
            Progress::Waiting,
        ];
        let outcomes = settle(&[vec![0, 1, 2], vec![3, 4]], progress, Some(why.clone()));
        let unconfirmed = Outcome::Unconfirmed { error: "gone".to_owned() };
        assert_eq!(outcomes, [Outcome::Confirmed, unconfirmed, Outcome::Held, why, Outcome::Held]);
    }

    #[test]
    fn headers_have_room_beside_the_largest_payload() {
        assert_eq!(payload_limit(1 << 20), (1 << 20) - (4 << 10));
        assert_eq!(payload_limit(4 << 10), 2 << 10);
    }
}
