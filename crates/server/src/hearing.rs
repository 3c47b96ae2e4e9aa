//! The topic on which groups elsewhere acknowledge: what they would say by HTTP, heard when this producer is there to hear it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use admin::{AcknowledgeRequest, Desk, Problem};
use broker::{Delivery, Position, ReceiveError, Subscriber, Subscription};
use tokio::sync::watch;

use crate::health::Component;

/// Acknowledgements that are written at once.
const BATCH: usize = 500;

/// The wait after the broker or the store failed; doubled each time, up to the second.
const FIRST_WAIT: Duration = Duration::from_millis(100);
const LAST_WAIT: Duration = Duration::from_secs(10);

/// A broker that has said nothing bad for so long is listened to: one that is busy with itself may let a group join and
/// fail right after.
const STEADY: Duration = Duration::from_secs(1);

/// What is listened to, and how that goes, for whoever asks.
#[derive(Debug)]
pub struct Hearing {
    topic: String,
    /// As which group.
    group: String,
    state: Mutex<State>,
}

#[derive(Debug)]
enum State {
    /// Nothing is known yet.
    Joining,
    Listening,
    Failing {
        since: SystemTime,
        problem: String,
    },
}

impl Hearing {
    /// What is said in `topic`, heard by one of `group`.
    pub fn new(topic: impl Into<String>, group: impl Into<String>) -> Self {
        Self { topic: topic.into(), group: group.into(), state: Mutex::new(State::Joining) }
    }

    /// Whose acknowledgements those are, whether they are heard, and what is in the way; `ago` says how long ago a moment
    /// was, for people.
    pub fn view(&self, ago: impl Fn(SystemTime) -> String) -> Component {
        let (ok, detail) = match &*self.state() {
            State::Joining => (true, "joining".to_owned()),
            State::Listening => (true, "listening".to_owned()),
            State::Failing { since, problem } => {
                let since = ago(*since);
                (false, format!("paused {since}: {problem}; it goes on by itself and none is lost"))
            }
        };
        Component { name: format!("acknowledgements by topic {}", self.topic), ok, detail }
    }

    fn well(&self) {
        *self.state() = State::Listening;
    }

    /// The problem is the last one, and its time that of the first since it was well.
    fn fails(&self, problem: String) {
        let mut state = self.state();
        let since = match &*state {
            State::Failing { since, .. } => *since,
            _ => SystemTime::now(),
        };
        *state = State::Failing { since, problem };
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Listens until it is told to stop. What was heard and not written is heard again.
///
/// # Cancel safety
/// Dropped, it leaves its group when its lease runs out.
pub async fn listen(
    subscriber: Arc<dyn Subscriber>,
    hearing: Arc<Hearing>,
    desk: Arc<Desk>,
    mut stopped: watch::Receiver<bool>,
) {
    let mut wait = FIRST_WAIT;
    while !*stopped.borrow() {
        match hear(&*subscriber, &hearing, &desk, &mut stopped, &mut wait).await {
            Ok(()) => return,
            Err(error) => {
                hearing.fails(error.to_string());
                tracing::warn!(%error, topic = hearing.topic, "acknowledgements cannot be heard; trying again")
            }
        }
        pause(&mut wait, &mut stopped).await;
    }
}

/// Waits until the process stops.
async fn end(stopped: &mut watch::Receiver<bool>) {
    // An error means that the sender is gone: the process ends.
    let _ = stopped.wait_for(|stopped| *stopped).await;
}

async fn pause(wait: &mut Duration, stopped: &mut watch::Receiver<bool>) {
    let _ = tokio::time::timeout(*wait, end(stopped)).await;
    *wait = (*wait * 2).min(LAST_WAIT);
}

/// Hears and writes until the process stops or the broker fails.
async fn hear(
    subscriber: &dyn Subscriber,
    hearing: &Hearing,
    desk: &Desk,
    stopped: &mut watch::Receiver<bool>,
    wait: &mut Duration,
) -> Result<(), ReceiveError> {
    let mut subscription = subscriber.subscribe(&hearing.group, std::slice::from_ref(&hearing.topic)).await?;
    loop {
        let deliveries = tokio::select! {
            deliveries = receive(&mut *subscription, hearing) => deliveries?,
            () = end(stopped) => {
                subscription.close().await;
                return Ok(());
            }
        };
        let positions: Vec<Position> = deliveries.iter().map(|delivery| delivery.position).collect();
        while let Err(problem) = write(desk, &deliveries).await {
            tracing::warn!(error = problem.detail, "acknowledgements cannot be written; trying again");
            hearing.fails(problem.detail);
            pause(wait, stopped).await;
            if *stopped.borrow() {
                return give_back(subscription, &positions).await;
            }
        }
        *wait = FIRST_WAIT;
        subscription.acknowledge(&positions).await?;
        hearing.well();
    }
}

/// Waits for messages, which may be for ever, and says that the broker is well when it lets it wait.
async fn receive(
    subscription: &mut dyn Subscription,
    hearing: &Hearing,
) -> Result<Vec<Delivery>, ReceiveError> {
    let mut receiving = subscription.receive(BATCH);
    match tokio::time::timeout(STEADY, &mut receiving).await {
        Ok(deliveries) => deliveries,
        Err(_) => {
            hearing.well();
            receiving.await
        }
    }
}

async fn give_back(
    mut subscription: Box<dyn Subscription>,
    positions: &[Position],
) -> Result<(), ReceiveError> {
    subscription.give_back(positions).await?;
    subscription.close().await;
    Ok(())
}

/// Writes what can be written. An error says that nothing was, for now.
async fn write(desk: &Desk, deliveries: &[Delivery]) -> Result<(), Problem> {
    let mut requests = Vec::with_capacity(deliveries.len());
    for delivery in deliveries {
        match AcknowledgeRequest::parse(&delivery.message.payload) {
            Ok(request) => requests.push(request),
            Err(problem) => {
                let message = &delivery.message;
                tracing::warn!(message_id = %message.id, topic = message.topic, error = problem.detail, "this is no acknowledgement; going on");
            }
        }
    }
    for answer in desk.acknowledge_all(requests).await? {
        match answer {
            Ok(done) => {
                tracing::debug!(message_id = %done.message_id, group = done.consumer_group, "acknowledged by the topic");
            }
            Err(problem) => {
                tracing::warn!(error = problem.detail, "this acknowledgement is not taken; going on")
            }
        }
    }
    Ok(())
}
