//! The loop of a consumer group: receive, handle, acknowledge to the producer, acknowledge to the broker.
//!
//! A consumer never ends by itself. When the broker, the store, the handler or the producer is away it says so in
//! its status, waits, and goes on where it was.

use std::collections::BTreeMap;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use broker::{Delivery, Position, ReceiveError, Subscriber, Subscription};
use fail::fail_point;
use futures::FutureExt;
use store::{Arrival, Receipt};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tracing::{debug, error, info, warn};

use crate::breaker::{Backoff, Breaker};
use crate::group::Group;
use crate::housekeeping;
use crate::status::{Board, Monitor, Need, Status};
use crate::worker::{Stop, Take, Worker};

/// The wait after a broker refused: somebody has to act first.
pub(crate) const MISCONFIGURED: Duration = Duration::from_secs(30);

/// The longest wait for another worker that has the next message.
pub(crate) const BUSY: Duration = Duration::from_secs(1);

/// A batch that is done within this may be larger the next time, up to so many times the least.
const QUICK: Duration = Duration::from_millis(200);
const LARGEST: usize = 16;

/// One that takes longer than this is smaller the next time. It is twice as long, or batches would grow and shrink by turns.
const SLOW: Duration = Duration::from_millis(400);

/// How long a broker that may be gone has for a farewell.
pub(crate) const CLOSING: Duration = Duration::from_secs(5);

/// The wait before a task that panicked is started again.
const PANICKED: Duration = Duration::from_secs(1);

/// Feeds a group from a broker.
pub struct Consumer {
    group: Arc<Group>,
    subscriber: Arc<dyn Subscriber>,
    topics: Vec<String>,
}

impl Consumer {
    /// A consumer that gives `group` the messages of `topics`.
    pub fn new(group: Arc<Group>, subscriber: Arc<dyn Subscriber>, topics: Vec<String>) -> Self {
        Self { group, subscriber, topics }
    }

    /// Starts it on the current tokio runtime.
    pub fn start(self) -> Running {
        let (stop, asked) = watch::channel(false);
        let stop_heard = Stop(asked);
        let board = Arc::new(Board::default());
        let worker =
            Arc::new(Worker { group: self.group, board: Arc::clone(&board), breaker: Breaker::default() });
        let receiving = Receiving {
            worker: Arc::clone(&worker),
            subscriber: self.subscriber,
            topics: self.topics,
            stop: stop_heard.clone(),
        };
        let parked = (Arc::clone(&worker), stop_heard.clone());
        let ids = (Arc::clone(&worker), stop_heard.clone());
        let group = worker.group.shared_name();
        let tasks = vec![
            supervise("receiving", stop_heard.clone(), group.clone(), move || receiving.clone().run()),
            supervise("parked", stop_heard.clone(), group.clone(), move || {
                housekeeping::retry_parked(Arc::clone(&parked.0), parked.1.clone())
            }),
            supervise("ids", stop_heard, group, move || {
                housekeeping::forget_ids(Arc::clone(&ids.0), ids.1.clone())
            }),
        ];
        Running { stop, tasks, monitor: Monitor(board) }
    }
}

/// A consumer at work. Dropping it stops it too, without waiting.
#[derive(Debug)]
pub struct Running {
    pub(crate) stop: watch::Sender<bool>,
    pub(crate) tasks: Vec<JoinHandle<()>>,
    pub(crate) monitor: Monitor,
}

impl Running {
    /// Finishes what is in hand, leaves the group and ends.
    ///
    /// # Cancel safety
    /// Safe: the consumer goes on ending by itself.
    pub async fn drain(self) {
        self.stop.send_replace(true);
        for task in self.tasks {
            // Only a runtime that is shutting down can end a task otherwise.
            let _ = task.await;
        }
    }

    /// How it is doing.
    pub fn status(&self) -> Status {
        self.monitor.status()
    }

    /// Its status for those who must not hold it.
    pub fn monitor(&self) -> Monitor {
        self.monitor.clone()
    }
}

/// Runs a task until it ends by itself; a panic is said aloud and the task starts again.
pub(crate) fn supervise<F, T>(name: &'static str, mut stop: Stop, group: Arc<str>, start: F) -> JoinHandle<()>
where
    F: Fn() -> T + Send + Sync + 'static,
    T: Future<Output = ()> + Send + 'static,
{
    tokio::spawn(async move {
        while AssertUnwindSafe(start()).catch_unwind().await.is_err() {
            error!(group = %group, task = name, "a task of the consumer panicked; it starts again");
            if !stop.wait(PANICKED).await {
                break;
            }
        }
    })
}

#[derive(Clone)]
struct Receiving {
    worker: Arc<Worker>,
    subscriber: Arc<dyn Subscriber>,
    topics: Vec<String>,
    stop: Stop,
}

impl Receiving {
    async fn run(mut self) {
        let mut backoff = Backoff::default();
        while !self.stop.is_asked() {
            let group = self.worker.group.name();
            let error = tokio::select! {
                biased;
                () = self.stop.asked() => return,
                opened = self.subscriber.subscribe(group, &self.topics) => match opened {
                    Ok(subscription) => {
                        if self.worker.board.well(Need::Broker) {
                            info!(group, "the broker is back");
                        }
                        debug!(group, topics = ?self.topics, "subscribed");
                        match self.serve(subscription, &mut backoff).await {
                            Ok(()) => return,
                            Err(error) => error,
                        }
                    }
                    Err(error) => error,
                },
            };
            let wait = self.note(&error, &mut backoff);
            if !self.stop.wait(wait).await {
                return;
            }
        }
    }

    fn note(&self, error: &ReceiveError, backoff: &mut Backoff) -> Duration {
        let Worker { group, board, .. } = self.worker.as_ref();
        let wait = match error {
            ReceiveError::Unreachable(_) => {
                board.paused(Need::Broker, error.to_string());
                backoff.next()
            }
            ReceiveError::Misconfigured(_) => {
                board.broken(Need::Broker, error.to_string());
                MISCONFIGURED
            }
        };
        warn!(group = group.name(), %error, ?wait, "nothing can be received; subscribing again");
        wait
    }

    /// Works until it is asked to stop.
    async fn serve(
        &self,
        mut subscription: Box<dyn Subscription>,
        reconnects: &mut Backoff,
    ) -> Result<(), ReceiveError> {
        let served = self.feed(subscription.as_mut(), reconnects).await;
        // After a failure too: the member that it leaves behind would keep its partitions from the next one.
        if tokio::time::timeout(CLOSING, subscription.close()).await.is_err() {
            let group = self.worker.group.name();
            warn!(group, "the subscription could not be closed in time; its leases will run out");
        }
        served
    }

    async fn feed(
        &self,
        subscription: &mut dyn Subscription,
        reconnects: &mut Backoff,
    ) -> Result<(), ReceiveError> {
        let mut stop = self.stop.clone();
        let mut busy = Backoff::default();
        // What the broker forgets before its work begins is lost with the process: no more of it than need be.
        let times = if self.worker.group.is_at_most_once() { 1 } else { LARGEST };
        let mut appetite = Appetite::new(self.worker.group.batch(), times);
        while let Some(take) = self.worker.ready(appetite.now, &mut stop).await {
            let deliveries = tokio::select! {
                biased;
                () = stop.asked() => break,
                received = subscription.receive(take.max) => received?,
            };
            reconnects.reset();
            if deliveries.is_empty() {
                tokio::task::yield_now().await;
                continue;
            }
            let (full, began) = (deliveries.len() >= appetite.now, Instant::now());
            let moved = self.turn(subscription, deliveries, take, &mut stop).await?;
            appetite.learn(full && moved, began.elapsed());
            if moved {
                busy.reset();
            } else if !stop.wait(busy.next().min(BUSY)).await {
                break;
            }
        }
        Ok(())
    }

    /// Handles one batch. Answers whether the broker may forget any of it.
    async fn turn(
        &self,
        subscription: &mut dyn Subscription,
        deliveries: Vec<Delivery>,
        take: Take,
        stop: &mut Stop,
    ) -> Result<bool, ReceiveError> {
        let Worker { group, board, .. } = self.worker.as_ref();
        board.received(deliveries.len());
        fail_point!("inbox::received");
        let mut positions = Vec::with_capacity(deliveries.len());
        let mut arrivals = Vec::with_capacity(deliveries.len());
        for Delivery { message, seq, delivery, position } in deliveries {
            debug!(message_id = %message.id, topic = message.topic, group = group.name(), "received");
            positions.push(position);
            arrivals.push(Arrival { message, seq, delivery });
        }
        if group.is_at_most_once() {
            subscription.acknowledge(&Split::all(&positions)).await?;
            fail_point!("inbox::forgotten");
            self.work_once(arrivals, take, stop).await;
            return Ok(true);
        }
        let Some(receipts) = self.worker.work(arrivals, take, stop).await else {
            let split = Split::nothing(&positions);
            subscription.give_back(&split.again).await?;
            return Ok(false);
        };
        fail_point!("inbox::acknowledged");
        let split = Split::of(&positions, &receipts);
        if !split.finished.is_empty() {
            subscription.acknowledge(&split.finished).await?;
        }
        if !split.again.is_empty() {
            subscription.give_back(&split.again).await?;
        }
        fail_point!("inbox::finished");
        Ok(!split.finished.is_empty())
    }

    /// Handles what the broker has forgotten already.
    async fn work_once(&self, arrivals: Vec<Arrival>, take: Take, stop: &mut Stop) {
        let Worker { group, board, .. } = self.worker.as_ref();
        let ids: Vec<_> = arrivals.iter().map(|arrival| arrival.message.id).collect();
        let receipts = self.worker.work(arrivals, take, stop).await;
        for (place, id) in ids.into_iter().enumerate() {
            let why = match receipts.as_ref().map(|receipts| &receipts[place]) {
                Some(Receipt::Unavailable { error }) => error,
                Some(Receipt::Busy) => "an earlier one of its key is in the hands of another worker",
                Some(_) => continue,
                None => "the store did not say whether it was done",
            };
            board.lost();
            error!(message_id = %id, group = group.name(), why, "lost: it is handled at most once");
        }
    }
}

/// How many messages are received together. What happens once for a batch weighs less in a large one; in a small one, less
/// waits behind what is slow.
struct Appetite {
    now: usize,
    least: usize,
    most: usize,
}

impl Appetite {
    fn new(least: usize, times: usize) -> Self {
        Self { now: least, least, most: least.saturating_mul(times) }
    }

    /// A batch took so long; `full` if there was as much as was asked for.
    fn learn(&mut self, full: bool, took: Duration) {
        if took > SLOW {
            self.now = (self.now / 2).max(self.least);
        } else if full && took <= QUICK {
            self.now = (self.now * 2).min(self.most);
        }
    }
}

/// What the broker may forget of a batch, and what it must deliver again: one position for each partition, since
/// a position speaks for all before or after it.
#[derive(Debug, Default, PartialEq, Eq)]
struct Split {
    finished: Vec<Position>,
    again: Vec<Position>,
}

impl Split {
    fn of(positions: &[Position], receipts: &[Receipt]) -> Self {
        let mut finished = BTreeMap::new();
        let mut again = BTreeMap::new();
        for (position, receipt) in positions.iter().zip(receipts) {
            let partition = position.partition;
            match receipt {
                Receipt::Unavailable { .. } | Receipt::Busy => {
                    again.entry(partition).or_insert(*position);
                }
                // Past one that must come again, all comes again; what is done is then a duplicate.
                _ if again.contains_key(&partition) => {}
                _ => {
                    finished.insert(partition, *position);
                }
            }
        }
        Self { finished: finished.into_values().collect(), again: again.into_values().collect() }
    }

    /// The last of each partition.
    fn all(positions: &[Position]) -> Vec<Position> {
        Self::of(positions, &vec![Receipt::Done; positions.len()]).finished
    }

    fn nothing(positions: &[Position]) -> Self {
        Self::of(positions, &vec![Receipt::Busy; positions.len()])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_grows_while_it_is_quick_and_full_and_shrinks_when_it_is_slow() {
        let mut appetite = Appetite::new(128, 8);
        let mut after = |full: bool, millis: u64| {
            appetite.learn(full, Duration::from_millis(millis));
            appetite.now
        };
        assert_eq!(
            [after(true, 10), after(false, 10), after(true, 199), after(true, 199)],
            [256, 256, 512, 1_024]
        );
        assert_eq!([after(true, 10), after(true, 300), after(false, 300)], [1_024, 1_024, 1_024]);
        assert_eq!([after(true, 500), after(true, 300), after(false, 500)], [512, 512, 256]);
        assert_eq!([after(true, 5_000), after(true, 5_000)], [128, 128]);
        let mut careful = Appetite::new(128, 1);
        careful.learn(true, Duration::ZERO);
        assert_eq!(careful.now, 128);
    }

    #[test]
    fn a_partition_is_finished_up_to_the_first_that_must_come_again() {
        let at = |partition, offset| Position { partition, offset };
        let positions = [at(0, 1), at(1, 1), at(0, 2), at(1, 2), at(0, 3), at(2, 9)];
        let down = || Receipt::Unavailable { error: "down".to_owned() };
        let parked = Receipt::Parked { error: "later".to_owned() };
        let receipts = [Receipt::Done, parked, Receipt::Busy, Receipt::Duplicate, Receipt::Done, down()];
        let split = Split::of(&positions, &receipts);
        assert_eq!(split.finished, [at(0, 1), at(1, 2)]);
        assert_eq!(split.again, [at(0, 2), at(2, 9)]);
        assert_eq!(Split::nothing(&positions).again, [at(0, 1), at(1, 1), at(2, 9)]);
    }
}
