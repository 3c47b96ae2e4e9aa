//! From memory to the broker, past the store: for routes that promise nothing, or one try.
//!
//! Whoever sends never waits. A queue of fixed length stands between the sender and the broker; what finds it full is
//! not taken, and what the broker does not confirm is lost. Both are counted.

use std::collections::HashMap;
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
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
            queues.insert(route.name.clone(), Queue { format: route.format.clone(), sender });
            let worker =
                Worker { route: Arc::new(route), losses: Arc::clone(&losses), ending: ending.subscribe() };
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
        queue.sender.try_send(outgoing).map_err(|error| {
            let reason = match error {
                mpsc::error::TrySendError::Full(_) => NotTaken::Full,
                mpsc::error::TrySendError::Closed(_) => NotTaken::Ending,
            };
            self.losses.count(route, &reason.to_string());
            reason
        })
    }

    /// What was lost.
    pub fn losses(&self) -> Vec<Loss> {
        self.losses.views()
    }

    /// Takes no more, and sends what waits, for at most so long.
    ///
    /// # Cancel safety
    /// What waits goes on being sent.
    pub async fn drain(&self, limit: Duration) {
        self.ending.send_replace(true);
        let mut workers = self.workers.lock().await;
        let finish = async { while workers.join_next().await.is_some() {} };
        if tokio::time::timeout(limit, finish).await.is_err() {
            tracing::warn!("messages that are in no store were not sent in time and are lost");
        }
    }
}

/// The time takes the place of the order that a store would give.
fn now() -> i64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_micros()).unwrap_or(i64::MAX)
}

struct Worker {
    route: Arc<Route>,
    losses: Arc<Losses>,
    ending: watch::Receiver<bool>,
}

impl Worker {
    async fn run(mut self, attempt: Try, mut queue: mpsc::Receiver<Outgoing>) {
        let most = self.route.publisher.guarantees().max_batch.clamp(1, AT_STAKE);
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
            calls.spawn(send(Arc::clone(&self.route), batch, Arc::clone(&self.losses)));
        }
        while calls.join_next().await.is_some() {}
    }
}

/// Sends a batch once. What the publisher did not even try is given to it again.
async fn send(route: Arc<Route>, mut batch: Vec<Outgoing>, losses: Arc<Losses>) {
    while !batch.is_empty() {
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
                    losses.count(&route.name, error);
                    let (id, topic) = (outgoing.message.id, &outgoing.message.topic);
                    tracing::warn!(message_id = %id, topic, route = route.name, error, "lost: it is tried once");
                }
            }
        }
        batch = again;
    }
}
