//! Consume, transform, produce: a group whose work is messages, exactly once inside the broker.
//!
//! ```text
//!  receive ─► handler, for each message ─► messages ─► one transaction: the messages, and how far the group is
//! ```
//!
//! The broker's own record of how far the group is is all that is remembered: no marks, no parked messages. Until the
//! transaction is committed nobody sees any of it, and whoever comes after a crash begins where the last one ended.
//! Handlers may run again then; what they do elsewhere happens again.
//!
//! A message whose handler fails is tried again and holds its partition meanwhile; the others go on. At its limit it goes, with
//! the reason in its headers, to the topic `<group>-dead`, in the transaction that finishes it; without its payload where that
//! topic does not take it.

mod answer;
mod hand;
mod letter;
mod maker;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use broker::{Beside, FinishTogether, Outcome, ReceiveError, SubscribeTogether, Unfinished};
use fail::fail_point;
use futures::{StreamExt, stream};
use message::{Message, RetryPolicy};
use store::{Handled, Receipt};
use tokio::sync::watch;
use tracing::{debug, info, warn};

use self::hand::{Hand, Item, Place, Ready};
use self::letter::dead_letter;
pub use self::maker::Maker;
use crate::breaker::Backoff;
use crate::consumer::{BUSY, CLOSING, MISCONFIGURED, Running, supervise};
use crate::status::{Board, Monitor, Need};
use crate::suspect::Suspects;
use crate::worker::Stop;

/// Messages handled at the same time, when nothing else is said.
const CONCURRENCY: usize = 16;

/// A consumer group that sends what it makes of messages.
#[derive(Debug)]
pub struct Transform {
    name: Arc<str>,
    maker: Maker,
    retry: RetryPolicy,
    concurrency: usize,
}

impl Transform {
    /// The group `name`, whose messages are made by `maker` and tried again as `retry` says.
    pub fn new(name: impl Into<String>, maker: Maker, retry: RetryPolicy) -> Self {
        Self { name: name.into().into(), maker, retry, concurrency: CONCURRENCY }
    }

    /// How many messages are handled at the same time. Those of one topic and key go one after another.
    #[must_use]
    pub fn concurrency(mut self, concurrency: usize) -> Self {
        self.concurrency = concurrency.max(1);
        self
    }

    /// Where messages go that it gave up.
    pub fn dead_topic(group: &str) -> String {
        letter::dead_topic(group)
    }

    /// Starts it on the current tokio runtime. What it receives are the messages of `topics`.
    pub fn start(self, subscriber: Arc<dyn SubscribeTogether>, topics: Vec<String>) -> Running {
        let (stop, asked) = watch::channel(false);
        let board = Arc::new(Board::default());
        let member = Member {
            group: Arc::new(self),
            board: Arc::clone(&board),
            suspects: Arc::default(),
            subscriber,
            topics,
            stop: Stop(asked),
        };
        let (name, stop_heard) = (Arc::clone(&member.group.name), member.stop.clone());
        let task = supervise("transforming", stop_heard, name, move || member.clone().run());
        Running { stop, tasks: vec![task], monitor: Monitor(board) }
    }
}

#[derive(Clone)]
struct Member {
    group: Arc<Transform>,
    board: Arc<Board>,
    suspects: Arc<Suspects>,
    subscriber: Arc<dyn SubscribeTogether>,
    topics: Vec<String>,
    stop: Stop,
}

/// What is known of the handler.
#[derive(Debug, Default)]
struct Health {
    backoff: Backoff,
    /// It is down, and tried again then.
    down: Option<Instant>,
}

/// What became of a try.
enum Ended {
    Made(Vec<Message>),
    Failed(String, Option<Duration>),
    Dead(String),
    Down(String),
}

impl Member {
    async fn run(mut self) {
        let group = Arc::clone(&self.group);
        let mut backoff = Backoff::default();
        while !self.stop.is_asked() {
            let opened = tokio::select! {
                biased;
                () = self.stop.asked() => return,
                opened = self.subscriber.subscribe(&group.name, &self.topics) => opened,
            };
            let error = match opened {
                Ok(subscription) => {
                    if self.board.well(Need::Broker) {
                        info!(group = %group.name, "the broker is back");
                    }
                    debug!(group = %group.name, topics = ?self.topics, "subscribed");
                    match self.serve(subscription, &mut backoff).await {
                        Ok(()) => return,
                        Err(error) => error,
                    }
                }
                Err(error) => error,
            };
            let wait = match error {
                ReceiveError::Unreachable(_) => {
                    self.board.paused(Need::Broker, error.to_string());
                    backoff.next()
                }
                ReceiveError::Misconfigured(_) => {
                    self.board.broken(Need::Broker, error.to_string());
                    MISCONFIGURED
                }
            };
            warn!(group = %group.name, %error, ?wait, "nothing can be received or finished; subscribing again");
            if !self.stop.wait(wait).await {
                return;
            }
        }
    }

    /// Works until it is asked to stop. What is in hand then is done by whoever comes next.
    async fn serve(
        &self,
        mut subscription: Box<dyn FinishTogether>,
        reconnects: &mut Backoff,
    ) -> Result<(), ReceiveError> {
        let served = self.feed(subscription.as_mut(), reconnects).await;
        if tokio::time::timeout(CLOSING, subscription.close()).await.is_err() {
            let group = &self.group.name;
            warn!(group = %group, "the subscription could not be closed in time; its leases will run out");
        }
        served
    }

    async fn feed(
        &self,
        subscription: &mut dyn FinishTogether,
        reconnects: &mut Backoff,
    ) -> Result<(), ReceiveError> {
        let mut stop = self.stop.clone();
        let (mut hand, mut health) = (Hand::default(), Health::default());
        loop {
            self.tell_what_holds(&hand);
            let (held, due) = (hand.held(), health.down.or_else(|| hand.due()));
            let heard = tokio::select! {
                biased;
                () = stop.asked() => return Ok(()),
                () = until(due) => None,
                heard = subscription.receive_beside(&held, self.group.concurrency * 8) => Some(heard?),
            };
            match heard {
                Some(Beside::Messages(deliveries)) => {
                    self.board.received(deliveries.len());
                    hand.take(deliveries);
                    fail_point!("inbox::transform_received");
                }
                // Another member tries them then, and counts anew.
                Some(Beside::Wanted(partitions)) => {
                    subscription.give_back(&hand.let_go(&partitions)).await?;
                    continue;
                }
                None => {}
            }
            self.make(&mut hand, &mut health).await;
            fail_point!("inbox::transform_made");
            if !self.finish(subscription, &mut hand, &mut stop).await? {
                return Ok(());
            }
            reconnects.reset();
        }
    }

    /// Runs the handler for what may be tried now.
    async fn make(&self, hand: &mut Hand, health: &mut Health) {
        if let Some(down) = health.down
            && (down > Instant::now() || !self.probe(hand, health).await)
        {
            return;
        }
        // More than one round: behind one that was given up others of its key may be tried.
        while health.down.is_none() {
            let queues = hand.queues(Instant::now());
            if queues.is_empty() {
                return;
            }
            let is_down = AtomicBool::new(false);
            let queues: Vec<_> = queues.into_iter().map(|queue| self.run_queue(queue, &is_down)).collect();
            let ended: Vec<_> = stream::iter(queues).buffer_unordered(self.group.concurrency).collect().await;
            for (place, end) in ended.into_iter().flatten() {
                self.note(hand, place, end, health);
            }
        }
    }

    /// Tries messages one after another, up to the first of which nothing could be made.
    fn run_queue(
        &self,
        queue: Vec<(Place, &Item)>,
        is_down: &AtomicBool,
    ) -> impl Future<Output = Vec<(Place, Ended)>> {
        let turns: Vec<_> = queue.into_iter().map(|(place, item)| (place, item.arrival.clone())).collect();
        async move {
            let mut ended = Vec::new();
            for (place, arrival) in turns {
                if is_down.load(Ordering::Relaxed) {
                    break;
                }
                let end = self.attempt(&arrival).await;
                is_down.fetch_or(matches!(end, Ended::Down(_)), Ordering::Relaxed);
                let made = matches!(end, Ended::Made(_));
                ended.push((place, end));
                if !made {
                    break;
                }
            }
            ended
        }
    }

    /// Tries one message, rather one that others were not passed by. Answers whether the handler is back.
    async fn probe(&self, hand: &mut Hand, health: &mut Health) -> bool {
        let queues = hand.queues(Instant::now());
        let firsts: Vec<_> = queues.iter().filter_map(|queue| queue.first()).collect();
        let innocent = |turn: &&&(Place, &Item)| !self.suspects.is_suspect(&turn.1.arrival);
        let Some((place, item)) = firsts.iter().find(innocent).or(firsts.first()).copied() else {
            // There is nothing to try it with: the next message will do.
            health.down = None;
            return true;
        };
        let (place, arrival) = (*place, item.arrival.clone());
        let end = self.attempt(&arrival).await;
        let back = !matches!(end, Ended::Down(_));
        self.note(hand, place, end, health);
        back
    }

    async fn attempt(&self, arrival: &store::Arrival) -> Ended {
        let Transform { name, maker, retry, .. } = self.group.as_ref();
        let id = arrival.message.id;
        debug!(message_id = %id, group = %name, "handing over");
        let run = maker.run(name, arrival).await;
        match self.suspects.weigh(id, run.ran, retry.give_up_after) {
            Handled::Done => Ended::Made(run.made),
            Handled::Retry { error, after } => Ended::Failed(error, after),
            Handled::Dead { error } => Ended::Dead(error),
            Handled::Unavailable { error } => Ended::Down(error),
        }
    }

    /// Writes down what became of a try.
    fn note(&self, hand: &mut Hand, place: Place, end: Ended, health: &mut Health) {
        let Some(item) = hand.item(place) else { return };
        if let Ended::Down(error) = end {
            let wait = health.backoff.next();
            warn!(group = %self.group.name, error, ?wait, "the handler is down; one message will try whether it is back");
            self.board.paused(Need::Handler, error);
            health.down = Some(Instant::now() + wait);
            return;
        }
        if matches!(end, Ended::Made(_) | Ended::Dead(_)) && self.board.well(Need::Handler) {
            info!(group = %self.group.name, "the handler works again");
        }
        health.down = None;
        health.backoff.reset();
        match end {
            Ended::Made(made) => item.made = Some(made),
            Ended::Failed(error, after) => self.failed(item, error, after),
            Ended::Dead(error) => self.give_up(item, error),
            Ended::Down(_) => {}
        }
    }

    /// It is tried again later, or given up.
    fn failed(&self, item: &mut Item, error: String, after: Option<Duration>) {
        item.made = None;
        item.attempts += 1;
        if item.attempts >= self.group.retry.max_attempts {
            return self.give_up(item, error);
        }
        let wait = self.group.retry.delay(item.attempts, &mut rand::rng()).max(after.unwrap_or_default());
        item.due = Some(Instant::now() + wait);
        let (id, attempts) = (item.arrival.message.id, item.attempts);
        warn!(message_id = %id, group = %self.group.name, error, attempts, ?wait,
            "failed: it is tried again and holds its partition");
        item.error = error;
    }

    /// A partition that stands still is told of, though all others go on.
    fn tell_what_holds(&self, hand: &Hand) {
        match hand.holding() {
            Some(Item { arrival, attempts, error, .. }) => {
                let id = arrival.message.id;
                let why = format!("message {id} failed {attempts} times and holds its partition: {error}");
                self.board.paused(Need::Message, why);
            }
            None => drop(self.board.well(Need::Message)),
        }
    }

    /// What is made of it is its dead letter.
    fn give_up(&self, item: &mut Item, error: String) {
        item.made = Some(vec![dead_letter(&self.group.name, item, &error)]);
        item.dead = Some(error);
        item.due = None;
    }

    /// A dead letter is not taken as it is. `false`: there is nothing more to leave out of it.
    fn cut(&self, item: &mut Item, error: &str) -> bool {
        let (Some(cut), Some(dead)) = (item.cut.more(), item.dead.clone()) else { return false };
        let (id, group) = (item.arrival.message.id, &self.group.name);
        warn!(message_id = %id, group = %group, error, "its dead letter is not taken whole; it goes without its payload");
        item.cut = cut;
        self.give_up(item, dead);
        true
    }

    /// Finishes what is ready, for as long as that takes. `false`: asked to stop meanwhile.
    async fn finish(
        &self,
        subscription: &mut dyn FinishTogether,
        hand: &mut Hand,
        stop: &mut Stop,
    ) -> Result<bool, ReceiveError> {
        let mut backoff = Backoff::default();
        loop {
            let ready = hand.ready();
            if ready.positions.is_empty() {
                return Ok(true);
            }
            let wait = match subscription.finish(&ready.positions, ready.outgoing.clone()).await {
                Ok(()) => {
                    fail_point!("inbox::transform_finished");
                    self.count(hand.finished(&ready));
                    if self.board.well(Need::Broker) {
                        info!(group = %self.group.name, "the broker takes messages again");
                    }
                    continue;
                }
                Err(Unfinished::Over(error)) => return Err(error),
                Err(Unfinished::Undone(error)) => {
                    warn!(group = %self.group.name, error, "nothing was committed; it is tried again");
                    self.board.paused(Need::Broker, error);
                    backoff.next().min(BUSY)
                }
                Err(Unfinished::Refused(outcomes)) => match self.blame(hand, &ready, &outcomes) {
                    None => continue,
                    Some(error) => return Err(ReceiveError::Misconfigured(error)),
                },
            };
            if !stop.wait(wait).await {
                return Ok(false);
            }
        }
    }

    /// Those whose messages cannot be sent have failed. Answers why a dead letter cannot be.
    fn blame(&self, hand: &mut Hand, ready: &Ready, outcomes: &[Outcome]) -> Option<String> {
        let mut blamed: HashMap<Place, &Outcome> = HashMap::new();
        for (place, outcome) in ready.of.iter().zip(outcomes) {
            let is_blamed = matches!(
                outcome,
                Outcome::Rejected { .. } | Outcome::Misconfigured { .. } | Outcome::Deferred { .. }
            );
            if is_blamed {
                blamed.entry(*place).or_insert(outcome);
            }
        }
        let mut stuck = None;
        for (place, outcome) in blamed {
            let Some(item) = hand.item(place) else { continue };
            let error = outcome.error().unwrap_or_default();
            if item.dead.is_some() {
                if matches!(outcome, Outcome::Rejected { .. }) && self.cut(item, error) {
                    continue;
                }
                let topic = Transform::dead_topic(&self.group.name);
                stuck = Some(format!("a dead letter cannot be sent to `{topic}`: {error}"));
                continue;
            }
            let error = format!("what the handler made of it cannot be sent: {error}");
            match outcome {
                Outcome::Rejected { .. } => {
                    item.attempts += 1;
                    self.give_up(item, error);
                }
                _ => self.failed(item, error, None),
            }
        }
        stuck
    }

    fn count(&self, finished: Vec<Item>) {
        let group = &self.group.name;
        let receipts: Vec<_> = finished
            .into_iter()
            .map(|item| {
                let (id, topic) = (item.arrival.message.id, &item.arrival.message.topic);
                match item.dead {
                    Some(error) => {
                        let to = Transform::dead_topic(group);
                        warn!(message_id = %id, topic, group = %group, error, to, "given up: it is in the topic of dead letters");
                        Receipt::Dead { error }
                    }
                    None => {
                        debug!(message_id = %id, topic, group = %group, "done");
                        Receipt::Done
                    }
                }
            })
            .collect();
        self.board.count(&receipts);
    }
}

/// Waits for a moment, or for ever.
async fn until(due: Option<Instant>) {
    match due {
        Some(due) => tokio::time::sleep_until(due.into()).await,
        None => std::future::pending().await,
    }
}
