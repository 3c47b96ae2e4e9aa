//! From memory to the broker, past the store: for routes that promise nothing, or one try.
//!
//! Whoever sends never waits. A queue of fixed length stands between the sender and the broker; what finds it full is
//! not taken, what the broker does not confirm is lost, and so is what still waits when the process must end. All are counted.

use std::collections::HashMap;
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use broker::{Format, Outcome, Outgoing};
use futures::FutureExt;
use message::Message;
use tokio::sync::{Mutex, mpsc, watch};
use tokio::task::JoinSet;

use crate::once::{Loss, Losses};
use crate::{Route, publish};

/// Messages that wait for a broker at most.
const WAITING: usize = 10_000;

/// Messages of one call at most: all of them are lost together.
const AT_STAKE: usize = 1_000;

/// Why messages are lost that wait for too long at the end.
const LEFT: &str = "this process ended before the broker had confirmed it";

/// Calls under way at once where nobody waits for the broker's word.
const UNDER_WAY: usize = 4;

/// How a message is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Try {
    /// The next waits for the broker's word on this one.
    Confirmed,
    /// Nobody waits.
    Unconfirmed,
}

/// Sends messages that are in no store.
pub struct Direct {
    queues: HashMap<String, Queue>,
    losses: Arc<Losses>,
    ending: watch::Sender<bool>,
    workers: Mutex<JoinSet<()>>,
}

struct Queue {
    format: Format,
    sender: mpsc::Sender<Outgoing>,
    /// Messages that were taken and of which it is not known what became.
    open: Arc<AtomicU64>,
}

impl fmt::Debug for Direct {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Direct").field("routes", &self.queues.keys()).finish_non_exhaustive()
    }
}

/// Why a message was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotTaken {
    /// The broker is too slow, or away.
    #[error("{WAITING} messages wait for the broker already")]
    Full,
    /// The process ends.
    #[error("this process is ending")]
    Ending,
}

impl Direct {
    /// Starts a queue for each of `routes`, on the current tokio runtime.
    pub fn start(routes: Vec<(Route, Try)>) -> Self {
        let losses = Arc::new(Losses::default());
        let ending = watch::Sender::new(false);
        let (mut queues, mut workers) = (HashMap::new(), JoinSet::new());
        for (route, attempt) in routes {
            let (sender, receiver) = mpsc::channel(WAITING);
            let open = Arc::new(AtomicU64::new(0));
            let queue = Queue { format: route.format.clone(), sender, open: Arc::clone(&open) };
            queues.insert(route.name.clone(), queue);
            let way = Way { route, losses: Arc::clone(&losses), open };
            let worker = Worker { way: Arc::new(way), ending: ending.subscribe() };
            workers.spawn(worker.run(attempt, receiver));
        }
        Self { queues, losses, ending, workers: Mutex::new(workers) }
    }

    /// Takes a message for `route` and returns at once.
    ///
    /// # Errors
    /// When it was not taken; it is counted as lost.
    ///
    /// # Panics
    /// When no such route was started.
    pub fn send(&self, route: &str, message: Message) -> Result<(), NotTaken> {
        let queue = &self.queues[route];
        let outgoing = Outgoing { format: queue.format.clone(), ..Outgoing::new(message, now()) };
        // Counted first: it may be sent before this goes on.
        queue.open.fetch_add(1, Ordering::Relaxed);
        queue.sender.try_send(outgoing).map_err(|error| {
            let reason = match error {
                mpsc::error::TrySendError::Full(_) => NotTaken::Full,
                mpsc::error::TrySendError::Closed(_) => NotTaken::Ending,
            };
            queue.open.fetch_sub(1, Ordering::Relaxed);
            self.losses.count(route, 1, &reason.to_string());
            reason
        })
    }

    /// What was lost.
    pub fn losses(&self) -> Vec<Loss> {
        self.losses.views()
    }

    /// Takes no more, and sends what waits, for at most so long. What is left then is lost, and counted.
    ///
    /// # Cancel safety
    /// What waits goes on being sent.
    pub async fn drain(&self, limit: Duration) {
        self.ending.send_replace(true);
        let mut workers = self.workers.lock().await;
        let finish = async { while workers.join_next().await.is_some() {} };
        if tokio::time::timeout(limit, finish).await.is_ok() {
            return;
        }
        workers.shutdown().await;
        for (route, queue) in &self.queues {
            let messages = queue.open.swap(0, Ordering::Relaxed);
            if messages > 0 {
                self.losses.count(route, messages, LEFT);
                tracing::warn!(route, messages, "lost: {LEFT}");
            }
        }
    }
}

/// The time takes the place of the order that a store would give.
fn now() -> i64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_micros()).unwrap_or(i64::MAX)
}

/// Where the messages of a queue go.
struct Way {
    route: Route,
    losses: Arc<Losses>,
    open: Arc<AtomicU64>,
}

struct Worker {
    way: Arc<Way>,
    ending: watch::Receiver<bool>,
}

impl Worker {
    async fn run(mut self, attempt: Try, mut queue: mpsc::Receiver<Outgoing>) {
        let most = self.way.route.publisher.guarantees().max_batch.clamp(1, AT_STAKE);
        let under_way = match attempt {
            Try::Confirmed => 1,
            Try::Unconfirmed => UNDER_WAY,
        };
        let (mut calls, mut batch, mut ending) = (JoinSet::new(), Vec::new(), false);
        loop {
            let taken = tokio::select! {
                taken = queue.recv_many(&mut batch, most) => taken,
                // An error means that nobody can send any more.
                _ = self.ending.wait_for(|ending| *ending), if !ending => {
                    ending = true;
                    queue.close();
                    continue;
                }
            };
            if taken == 0 {
                break;
            }
            while calls.len() >= under_way {
                let _ = calls.join_next().await;
            }
            let batch = std::mem::take(&mut batch);
            calls.spawn(send(Arc::clone(&self.way), batch));
        }
        while calls.join_next().await.is_some() {}
    }
}

/// Sends a batch once. What the publisher did not even try is given to it again.
async fn send(way: Arc<Way>, mut batch: Vec<Outgoing>) {
    let Way { route, losses, open } = &*way;
    while !batch.is_empty() {
        let tried = batch.len() as u64;
        let told = AssertUnwindSafe(route.publisher.publish(batch.clone())).catch_unwind().await;
        let panicked = || Outcome::Unconfirmed { error: "the publisher panicked".to_owned() };
        let mut outcomes = told.unwrap_or_else(|_| vec![panicked(); batch.len()]);
        outcomes.resize(batch.len(), Outcome::Unconfirmed { error: "the broker did not answer".to_owned() });
        let silent = outcomes.iter().all(publish::is_silence);
        let mut again = Vec::new();
        for (outgoing, outcome) in batch.into_iter().zip(outcomes) {
            match outcome.error() {
                None => tracing::debug!(message_id = %outgoing.message.id, route = route.name, "sent"),
                Some(_) if outcome == Outcome::Held && !silent => again.push(outgoing),
                Some(error) => {
                    losses.count(&route.name, 1, error);
                    let (id, topic) = (outgoing.message.id, &outgoing.message.topic);
                    tracing::warn!(message_id = %id, topic, route = route.name, error, "lost: it is tried once");
                }
            }
        }
        open.fetch_sub(tried - again.len() as u64, Ordering::Relaxed);
        batch = again;
    }
}
