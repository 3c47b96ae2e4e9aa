//! One broker's share of a turn: published and judged by itself, however long the broker takes.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use broker::Outcome;
use futures::future::join_all;
use store::{Batch, Lease, Seq, Settlement, Verdict};

use crate::breaker::Destination;
use crate::publish::{Load, Outcomes, loads};
use crate::route::Settle;
use crate::verdict::{Circumstances, judge, unsendable};
use crate::{Route, Shared, together};

/// Batches of one channel.
pub(crate) struct Delivery {
    shared: Arc<Shared>,
    batches: Vec<Batch>,
    outcomes: Outcomes,
    /// What is not sent now, wherever it goes.
    unsendable: HashMap<Seq, Verdict>,
    /// In transactions of the broker, by the sender of this train.
    together: Option<usize>,
}

impl Delivery {
    /// A delivery of `batches`. Messages whose outcome is known already are not sent.
    pub(crate) fn new(
        shared: Arc<Shared>,
        batches: Vec<Batch>,
        mut outcomes: Outcomes,
        together: Option<usize>,
    ) -> Self {
        let mut aside = HashMap::new();
        for (b, batch) in batches.iter().enumerate() {
            for (m, claimed) in batch.messages.iter().enumerate() {
                if let Some(verdict) = unsendable(claimed) {
                    // Those of its key that are in this turn too go in the next.
                    outcomes.set((b, m), Outcome::Held);
                    aside.insert(claimed.seq, verdict);
                }
            }
        }
        Self { shared, batches, outcomes, unsendable: aside, together }
    }

    /// Publishes the batches whose lease stands and says what is to be written of each message.
    pub(crate) async fn run(mut self) -> Vec<Settlement> {
        let alive = match self.together {
            Some(train) => self.send_together(train).await,
            None => {
                let route = |topic: &str| self.shared.routes.of(topic).cloned();
                let loads = loads(&self.batches, route, &mut self.outcomes);
                self.send(loads).await
            }
        };
        self.judge(alive)
    }

    /// Sends all batches in one transaction. Answers whether the broker confirmed anything.
    async fn send_together(&mut self, train: usize) -> bool {
        let Self { shared, batches, outcomes, unsendable, .. } = self;
        let mut alive = false;
        for (b, done) in together::send(shared, train, batches, unsendable).await.into_iter().enumerate() {
            for (m, outcome) in done.into_iter().enumerate() {
                alive |= outcome == Outcome::Confirmed;
                outcomes.set((b, m), outcome);
            }
        }
        // All batches of a delivery go to one broker.
        let first = batches.iter().flat_map(|batch| &batch.messages).next().filter(|_| alive);
        if let Some(way) = first.and_then(|claimed| shared.routes.of(&claimed.message.topic)) {
            shared.breakers.succeeded(&Destination::Broker(way.route.broker.clone()));
        }
        alive
    }

    /// Sends all loads side by side and tells the breakers. Answers whether the broker confirmed anything.
    async fn send(&mut self, loads: Vec<Load>) -> bool {
        let Self { shared, batches, outcomes, .. } = self;
        let (shared, batches) = (&*shared, &*batches);
        // Until when all leases of these batches certainly stand, if they do.
        let lease = || batches.iter().map(|batch| shared.leases.until(&batch.lease)).min().flatten();
        let sending = loads.into_iter().map(|load| async move {
            let broker = load.way.route.broker.clone();
            (broker, load.publish(batches, lease).await)
        });
        let mut alive = false;
        for (broker, done) in join_all(sending).await {
            if done.iter().any(|(_, outcome)| *outcome == Outcome::Confirmed) {
                shared.breakers.succeeded(&Destination::Broker(broker));
                alive = true;
            }
            for (place, outcome) in done {
                outcomes.set(place, outcome);
            }
        }
        alive
    }

    /// What is to be written of each message. `alive`: the broker confirmed something.
    fn judge(&mut self, alive: bool) -> Vec<Settlement> {
        let Self { shared, batches, outcomes, unsendable, .. } = self;
        let mut failures = Failures::default();
        let mut topics: HashMap<&str, Topic<'_>> = HashMap::new();
        let settlements = batches
            .iter()
            .enumerate()
            .map(|(b, batch)| {
                let verdicts = batch.messages.iter().enumerate().map(|(m, claimed)| {
                    let name = claimed.message.topic.as_str();
                    let topic = topics.entry(name).or_insert_with(|| Topic::new(name, shared));
                    let outcome = outcomes.take((b, m));
                    // What is in the log already was sent in time.
                    let aside = unsendable.remove(&claimed.seq).filter(|_| outcome != Outcome::Confirmed);
                    if let Some(verdict) = aside {
                        log(claimed, &verdict);
                        return (claimed.seq, verdict);
                    }
                    let kind = failures.kind(&outcome, name, topic.route, alive);
                    let confirmed = outcome == Outcome::Confirmed;
                    let circumstances = Circumstances {
                        route: topic.route,
                        blamed: alive && shared.suspect(claimed.seq, &outcome, topic.route),
                        condemned: topic.condemned,
                        groups: if confirmed { topic.groups.clone() } else { Vec::new() },
                    };
                    let verdict = judge(claimed, outcome, circumstances);
                    match (kind, told(&verdict)) {
                        (Some(destination), Some((error, dead))) => failures.note(destination, error, dead),
                        _ => topic.fine |= confirmed,
                    }
                    log(claimed, &verdict);
                    (claimed.seq, verdict)
                });
                let lease: Lease = batch.lease;
                Settlement { batch: batch.id, lease, verdicts: verdicts.collect(), beside: Vec::new() }
            })
            .collect();
        for (name, _) in topics.into_iter().filter(|(_, topic)| topic.fine) {
            shared.breakers.succeeded(&Destination::Topic(name.to_owned()));
        }
        failures.tell(shared);
        settlements
    }
}

/// What a verdict says against its message's destination, and whether the message had waited too long for it.
fn told(verdict: &Verdict) -> Option<(&str, bool)> {
    match verdict {
        Verdict::Dead { error, .. } => Some((error, true)),
        Verdict::Released { error } => Some((error.as_deref().unwrap_or_default(), false)),
        Verdict::Failed { error, .. } => Some((error, false)),
        Verdict::Sent { .. } | Verdict::Postponed { .. } => None,
    }
}

impl Shared {
    /// Whether this message went unanswered before, and does again. Its broker answered others.
    fn suspect(&self, seq: Seq, outcome: &Outcome, route: Option<&Route>) -> bool {
        let Some(route) = route else { return false };
        match outcome {
            Outcome::Unreachable { .. } | Outcome::Unconfirmed { .. } => {
                self.suspects.again(&route.broker, seq)
            }
            Outcome::Held => false,
            _ => {
                self.suspects.answered(&route.broker, seq);
                false
            }
        }
    }
}

/// What all messages of a topic share when they are judged.
struct Topic<'a> {
    route: Option<&'a Route>,
    condemned: bool,
    groups: Vec<String>,
    /// It took something.
    fine: bool,
}

impl<'a> Topic<'a> {
    fn new(name: &str, shared: &'a Shared) -> Self {
        Self {
            route: shared.routes.of(name).map(|way| &way.route),
            condemned: shared.breakers.condemned(name, Instant::now()),
            groups: (shared.settings.groups)(name),
            fine: false,
        }
    }
}

/// Destinations that are down, why, and whether a message had waited too long for them.
#[derive(Default)]
pub(crate) struct Failures(HashMap<Destination, (String, bool)>);

impl Failures {
    /// The destination that this outcome speaks against, if it does.
    pub(crate) fn kind(
        &self,
        outcome: &Outcome,
        topic: &str,
        route: Option<&Route>,
        alive: bool,
    ) -> Option<Destination> {
        match outcome {
            Outcome::Misconfigured { .. } => Some(Destination::Topic(topic.to_owned())),
            // What is sent once has no attempts to count outages as.
            Outcome::Unreachable { .. } | Outcome::Unconfirmed { .. } if !alive => route
                .filter(|route| route.settle == Settle::Before || !route.retry.count_outages)
                .map(|route| Destination::Broker(route.broker.clone())),
            _ => None,
        }
    }

    pub(crate) fn note(&mut self, destination: Destination, error: &str, dead: bool) {
        let known = self.0.entry(destination).or_insert_with(|| (error.to_owned(), dead));
        known.1 |= dead;
    }

    /// Tells the breakers.
    pub(crate) fn tell(self, shared: &Shared) {
        let now = Instant::now();
        for (destination, (error, expired)) in self.0 {
            if let Destination::Broker(broker) = &destination {
                shared.suspects.acquit(broker);
            }
            shared.breakers.failed(&destination, &error, expired, now);
        }
    }
}

/// Says what became of a message.
pub(crate) fn log(claimed: &store::Claimed, verdict: &Verdict) {
    let (id, topic) = (claimed.message.id, &claimed.message.topic);
    match verdict {
        Verdict::Sent { .. } => tracing::info!(message_id = %id, topic, "sent"),
        Verdict::Failed { error, retry_after, .. } => {
            let attempt = claimed.state.attempts + 1;
            tracing::warn!(message_id = %id, topic, attempt, ?retry_after, error, "failed; trying again");
        }
        Verdict::Dead { reason, error, .. } => {
            tracing::error!(message_id = %id, topic, reason, error, "dead: `postrider dead show {id}` tells more");
        }
        Verdict::Released { error } => tracing::debug!(message_id = %id, topic, error, "given back"),
        Verdict::Postponed { wait } => {
            tracing::debug!(message_id = %id, topic, ?wait, "its time has not come")
        }
    }
}
