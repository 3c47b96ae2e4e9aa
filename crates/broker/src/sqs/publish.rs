//! Sending: requests of ten, several at a time, and one answer for each message.

use std::collections::BTreeMap;
use std::time::Duration;

use async_trait::async_trait;
use aws_sdk_sqs::types::SendMessageBatchRequestEntry;
use futures::StreamExt;
use futures::stream;
use message::{Invalid, check_topic};
use tokio::time::{Instant, timeout_at};

use super::Broker;
use super::error::{self, Trouble, trouble};
use super::letter::{self, Letter};
use super::queue::{self, Queue};
use crate::{Guarantees, Outcome, Outgoing, Publisher};

/// Messages in one request at most.
const ENTRIES: usize = 10;

/// Requests on their way at a time.
const WINDOW: usize = 16;

/// Messages in one call at most: a few windows.
const MAX_BATCH: usize = 500;

/// For how long a FIFO queue recognises what it was sent before.
pub(super) const RECOGNISED: Duration = Duration::from_secs(5 * 60);

/// A message that can be sent, and its place in the call.
#[derive(Clone)]
struct Ready {
    place: usize,
    size: usize,
    entry: SendMessageBatchRequestEntry,
}

#[async_trait]
impl Publisher for Broker {
    fn guarantees(&self) -> Guarantees {
        let config = &self.inner.config;
        Guarantees {
            key_order: config.fifo,
            // One entry of a request may fail while a later one of its key is stored.
            ordered_batches: false,
            groups: false,
            // SQS says of an old receipt that it may still finish its message.
            fenced: false,
            max_payload: Some(config.max_message),
            max_batch: MAX_BATCH,
            deduplication: config.fifo.then_some(RECOGNISED),
            durability: "stored by AWS on several servers of the region; unread messages are gone after the queue's \
                         retention, 14 days at most",
            needs: &[
                "message retention longer than any group may be behind",
                "a visibility timeout longer than a batch takes to begin with; it is extended while the work goes on",
                "fifo=true and a FIFO queue where keys have an order",
            ],
        }
    }

    async fn publish(&self, batch: Vec<Outgoing>) -> Vec<Outcome> {
        let deadline = Instant::now() + self.inner.config.timeout;
        let mut outcomes = vec![None; batch.len()];
        let mut topics: BTreeMap<&str, Vec<Ready>> = BTreeMap::new();
        for (place, outgoing) in batch.iter().enumerate() {
            match self.prepare(place, outgoing) {
                Ok(ready) => topics.entry(&outgoing.message.topic).or_default().push(ready),
                Err(error) => outcomes[place] = Some(Outcome::Rejected { error }),
            }
        }
        let window = &tokio::sync::Semaphore::new(WINDOW);
        let topics = topics.into_iter().map(|(topic, ready)| self.send_all(topic, ready, window, deadline));
        for (place, outcome) in futures::future::join_all(topics).await.into_iter().flatten() {
            outcomes[place] = Some(outcome);
        }
        let unanswered = || Outcome::Unconfirmed { error: "SQS said nothing of it".to_owned() };
        outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(unanswered)).collect()
    }
}

type Outcomes = Vec<(usize, Outcome)>;

impl Broker {
    /// The message as SQS wants it, or why it never can be.
    fn prepare(&self, place: usize, outgoing: &Outgoing) -> Result<Ready, String> {
        let (message, limit) = (&outgoing.message, self.inner.config.max_message);
        check_topic(&message.topic).map_err(|invalid| invalid.to_string())?;
        if message.payload.len() > limit {
            return Err(Invalid::PayloadTooLarge { size: message.payload.len(), limit }.to_string());
        }
        let letter = Letter::new(outgoing);
        let size = letter.size();
        if size > limit {
            return Err(format!(
                "the message has {size} bytes with its attributes, as SQS counts them, and the limit is {limit}: send a \
                 reference to it"
            ));
        }
        let (body, attributes) = letter.into_parts();
        let mut entry = SendMessageBatchRequestEntry::builder()
            .id(place.to_string())
            .message_body(body)
            .set_message_attributes(Some(attributes));
        if self.inner.config.fifo {
            entry = entry
                .message_group_id(letter::group(message))
                .message_deduplication_id(letter::deduplication(outgoing));
        }
        let entry = entry.build().map_err(|error| error.to_string())?;
        Ok(Ready { place, size, entry })
    }

    /// Everything of one topic.
    async fn send_all(
        &self,
        topic: &str,
        ready: Vec<Ready>,
        window: &tokio::sync::Semaphore,
        deadline: Instant,
    ) -> Outcomes {
        let found = timeout_at(deadline, self.queue(topic)).await;
        let found = found.unwrap_or_else(|_| Err(Trouble::Away("it was not found in time".to_owned())));
        let queue = match found {
            Ok(queue) => queue,
            Err(trouble) => return all(&ready, &trouble.outcome(&queue::name(&self.inner.config, topic))),
        };
        let requests = split(ready, self.inner.config.max_message.max(SMALLEST_REQUEST));
        let requests = requests.into_iter().map(|request| self.send(&queue, request, window, deadline));
        stream::iter(requests).buffer_unordered(WINDOW).concat().await
    }

    /// One request. Where SQS refuses it as a whole, each message is tried alone: only one of them may be to blame.
    async fn send(
        &self,
        queue: &Queue,
        request: Vec<Ready>,
        window: &tokio::sync::Semaphore,
        deadline: Instant,
    ) -> Outcomes {
        let permit = timeout_at(deadline, window.acquire()).await;
        if permit.is_err() {
            return all(
                &request,
                &Trouble::Away("there was no time left to send it".to_owned()).outcome(&queue.name),
            );
        }
        match self.ask(queue, &request, deadline).await {
            Ok(outcomes) => outcomes,
            Err(Trouble::Refused(_)) if request.len() > 1 => {
                let mut outcomes = Vec::with_capacity(request.len());
                for alone in request.chunks(1) {
                    let refused = |trouble: Trouble| all(alone, &trouble.outcome(&queue.name));
                    outcomes.extend(self.ask(queue, alone, deadline).await.unwrap_or_else(refused));
                }
                outcomes
            }
            Err(Trouble::Missing(text)) => {
                self.forget(queue);
                let trouble = match self.inner.config.create {
                    true => Trouble::Away(format!("{text}: it is made again")),
                    false => Trouble::Missing(text),
                };
                all(&request, &trouble.outcome(&queue.name))
            }
            Err(trouble) => all(&request, &trouble.outcome(&queue.name)),
        }
    }

    async fn ask(&self, queue: &Queue, request: &[Ready], deadline: Instant) -> Result<Outcomes, Trouble> {
        let entries = request.iter().map(|ready| ready.entry.clone()).collect();
        let send = self.client().await.send_message_batch().queue_url(&queue.url).set_entries(Some(entries));
        fail::fail_point!("broker::publishing");
        let answer = timeout_at(deadline, send.send()).await;
        let answer = answer.map_err(|_| Trouble::Unknown("it did not answer in time".to_owned()))?;
        let answer = answer.map_err(|error| trouble(&error))?;
        fail::fail_point!("broker::published");
        Ok(settle(queue, request, &answer))
    }
}

/// What the answer says of each message: what it does not name is perhaps stored.
fn settle(
    queue: &Queue,
    request: &[Ready],
    answer: &aws_sdk_sqs::operation::send_message_batch::SendMessageBatchOutput,
) -> Outcomes {
    let outcome = |ready: &Ready| {
        let stored = answer.successful().iter().any(|entry| entry.id() == ready.entry.id());
        let failed = answer.failed().iter().find(|entry| entry.id() == ready.entry.id());
        match (stored, failed) {
            (true, None) => Outcome::Confirmed,
            (false, Some(failed)) => error::entry(failed).outcome_alone(&queue.name),
            (true, Some(_)) => Trouble::Unknown("it says both yes and no".to_owned()).outcome(&queue.name),
            (false, None) => {
                Trouble::Unknown("its answer does not name the message".to_owned()).outcome(&queue.name)
            }
        }
    };
    request.iter().map(|ready| (ready.place, outcome(ready))).collect()
}

/// The same for all.
fn all(request: &[Ready], outcome: &Outcome) -> Outcomes {
    request.iter().map(|ready| (ready.place, outcome.clone())).collect()
}

/// What SQS has always taken in one request, whatever the limit of a message.
const SMALLEST_REQUEST: usize = 256 << 10;

/// Requests that SQS accepts: of ten messages, and of so many bytes, at most.
fn split(ready: Vec<Ready>, bytes: usize) -> Vec<Vec<Ready>> {
    let mut requests: Vec<Vec<Ready>> = Vec::with_capacity(ready.len().div_ceil(ENTRIES));
    let mut size = 0;
    for ready in ready {
        size += ready.size;
        match requests.last_mut().filter(|request| request.len() < ENTRIES && size <= bytes) {
            Some(request) => request.push(ready),
            None => {
                size = ready.size;
                requests.push(vec![ready]);
            }
        }
    }
    requests
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ready(place: usize, size: usize) -> Ready {
        let entry = SendMessageBatchRequestEntry::builder().id(place.to_string()).message_body("x");
        Ready { place, size, entry: entry.build().expect("it is whole") }
    }

    #[test]
    fn a_request_has_ten_messages_and_so_many_bytes_at_most() {
        let sizes = |sizes: &[usize], bytes| -> Vec<usize> {
            let ready = sizes.iter().enumerate().map(|(place, size)| ready(place, *size)).collect();
            split(ready, bytes).iter().map(Vec::len).collect()
        };
        assert_eq!(sizes(&[1; 25], 100), [10, 10, 5]);
        assert_eq!(sizes(&[60, 40, 1, 99, 100, 1], 100), [2, 2, 1, 1]);
        assert_eq!(sizes(&[], 100), [0; 0]);
    }
}
