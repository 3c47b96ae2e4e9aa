//! Receiving: long polls that nobody interrupts, and acknowledgements that are settled one by one.
//!
//! A poll that is dropped may have its answer on the way, and then the messages in it are hidden from everybody. So each
//! poll runs by itself, and leaves what it got where the next `receive` finds it.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use aws_sdk_sqs::types::MessageSystemAttributeName as System;
use futures::future::select_all;
use message::{Invalid, check_group, check_topic};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::Broker;
use super::error::{Trouble, trouble};
use super::keep::{Act, Holding};
use super::queue::{self, Queue};
use crate::{Delivery, Position, ReceiveError, Subscriber, Subscription};

/// As long as SQS lets a poll wait.
const LONG: Duration = Duration::from_secs(20);

/// Messages in one answer at most.
const MOST: usize = 10;

/// Polls of one queue at a time, while it has more than one poll can bring.
const POLLS: usize = 8;

/// How often an entry that failed is finished again, and the pause before the second try; it doubles.
const TRIES: u32 = 4;
const PAUSE: Duration = Duration::from_millis(50);

#[async_trait]
impl Subscriber for Broker {
    async fn subscribe(&self, group: &str, topics: &[String]) -> Result<Box<dyn Subscription>, ReceiveError> {
        let refuse = |invalid: Invalid| ReceiveError::Misconfigured(invalid.to_string());
        check_group(group).map_err(refuse)?;
        topics.iter().try_for_each(|topic| check_topic(topic)).map_err(refuse)?;
        if topics.is_empty() {
            let text = format!("the consumer group `{group}` names no topic: name at least one");
            return Err(ReceiveError::Misconfigured(text));
        }
        let config = &self.inner.config;
        let mut topics = topics.to_vec();
        topics.sort();
        topics.dedup();
        let mut sources = Vec::with_capacity(topics.len());
        for topic in &topics {
            let found = timeout(config.timeout, self.queue(topic)).await;
            let found = found.unwrap_or_else(|_| Err(Trouble::Away("it was not found in time".to_owned())));
            let queue = found.map_err(|trouble| trouble.receiving(&queue::name(config, topic)))?;
            sources.push(Source { queue, polls: Vec::new(), full: false });
        }
        let holding = Arc::new(Holding::new(self.client().await.clone(), config));
        let keeping = tokio::spawn(Arc::clone(&holding).keep());
        Ok(Box::new(Reader { broker: self.clone(), holding, keeping, sources }))
    }
}

/// A subscription of SQS.
struct Reader {
    broker: Broker,
    holding: Arc<Holding>,
    keeping: JoinHandle<()>,
    sources: Vec<Source>,
}

/// One of the queues that it takes from.
struct Source {
    queue: Arc<Queue>,
    /// On their way.
    polls: Vec<Poll>,
    /// The last answer was full: there is more.
    full: bool,
}

struct Poll {
    waits: bool,
    /// How many it got.
    answer: JoinHandle<Result<usize, Trouble>>,
}

#[async_trait]
impl Subscription for Reader {
    async fn receive(&mut self, max: usize) -> Result<Vec<Delivery>, ReceiveError> {
        loop {
            let deliveries = self.holding.hand_out(max.max(1));
            if !deliveries.is_empty() {
                return Ok(deliveries);
            }
            self.ask(max.max(1));
            self.answered().await?;
        }
    }

    async fn acknowledge(&mut self, positions: &[Position]) -> Result<(), ReceiveError> {
        let mut left = self.holding.done(positions);
        let mut failure = None;
        for attempt in 0..TRIES {
            if left.is_empty() {
                return Ok(());
            }
            if attempt > 0 {
                tokio::time::sleep(PAUSE * (1 << attempt)).await;
            }
            let results = self.holding.act(&left, Act::Finish, self.broker.inner.config.timeout).await;
            left.clear();
            for (held, result) in results {
                match result {
                    Ok(()) => {}
                    Err(Trouble::Refused(error)) => {
                        tracing::debug!(%error, "an acknowledgement came after the message was lost");
                    }
                    Err(trouble) => {
                        failure = Some(trouble.receiving(held.queue()));
                        left.push(held);
                    }
                }
            }
            fail::fail_point!("broker::acknowledged");
        }
        self.holding.hold_on(&left);
        failure.filter(|_| !left.is_empty()).map_or(Ok(()), Err)
    }

    async fn give_back(&mut self, positions: &[Position]) -> Result<(), ReceiveError> {
        let returned = self.holding.take_back(positions);
        self.holding.give_up(returned).await;
        Ok(())
    }

    async fn close(self: Box<Self>) {
        self.keeping.abort();
        let held = self.holding.leave();
        self.holding.give_up(held).await;
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.keeping.abort();
        // Polls that are still on their way find nobody, and give back what they get.
        self.holding.leave();
    }
}

impl Reader {
    /// Starts a poll of every queue that has none; more of those that have more than one brings.
    fn ask(&mut self, max: usize) {
        for source in &mut self.sources {
            let wanted = if source.full { max.div_ceil(MOST).min(POLLS) } else { 1 };
            while source.polls.len() < wanted {
                // One waits for what comes; the others take what is there.
                let waits = !source.polls.iter().any(|poll| poll.waits);
                let wait = if waits { LONG } else { Duration::ZERO };
                let poll = poll(Arc::clone(&self.holding), Arc::clone(&source.queue), max.min(MOST), wait);
                let limit = wait + self.broker.inner.config.timeout;
                let late = || Trouble::Unknown("it did not answer in time".to_owned());
                let answer = async move { timeout(limit, poll).await.unwrap_or_else(|_| Err(late())) };
                source.polls.push(Poll { waits, answer: tokio::spawn(answer) });
            }
        }
    }

    /// Waits for the first poll that is answered.
    async fn answered(&mut self) -> Result<(), ReceiveError> {
        let polls = self.sources.iter_mut().enumerate().flat_map(|(source, Source { polls, .. })| {
            polls
                .iter_mut()
                .enumerate()
                .map(move |(poll, Poll { answer, .. })| Box::pin(async move { (source, poll, answer.await) }))
        });
        let ((source, poll, answer), ..) = select_all(polls).await;
        let source = &mut self.sources[source];
        source.polls.swap_remove(poll);
        let lost = |error: tokio::task::JoinError| Err(Trouble::Unknown(error.to_string()));
        match answer.unwrap_or_else(lost) {
            Ok(count) => {
                source.full = count == MOST;
                Ok(())
            }
            Err(Trouble::Missing(text)) => {
                self.broker.forget(&source.queue);
                let trouble = match self.broker.inner.config.create {
                    // Whoever subscribes again makes it.
                    true => Trouble::Away(text),
                    false => Trouble::Missing(text),
                };
                Err(trouble.receiving(&source.queue.name))
            }
            Err(trouble) => Err(trouble.receiving(&source.queue.name)),
        }
    }
}

/// Asks a queue once and keeps what it gives. How many that are.
async fn poll(
    holding: Arc<Holding>,
    queue: Arc<Queue>,
    max: usize,
    wait: Duration,
) -> Result<usize, Trouble> {
    let seconds = |time: Duration| i32::try_from(time.as_secs()).unwrap_or(i32::MAX);
    let asked = holding
        .client()
        .receive_message()
        .queue_url(&queue.url)
        .max_number_of_messages(i32::try_from(max).unwrap_or(i32::MAX))
        .visibility_timeout(seconds(holding.visibility()))
        .wait_time_seconds(seconds(wait))
        .message_attribute_names("All")
        .message_system_attribute_names(System::All)
        .send()
        .await;
    let messages = asked.map_err(|error| trouble(&error))?.messages.unwrap_or_default();
    let count = messages.len();
    holding.take(&queue, messages).await;
    Ok(count)
}
