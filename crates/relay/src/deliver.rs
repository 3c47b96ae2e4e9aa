//! One broker's share of a turn: published and judged by itself, however long the broker takes.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use broker::Outcome;
use futures::future::join_all;
use store::{Batch, Lease, Seq, Settlement, Verdict};

use crate::breaker::Destination;
use crate::publish::{Load, Outcomes, loads};
use crate::verdict::{Circumstances, judge};
use crate::{Route, Shared};

/// Batches of one channel.
pub(crate) struct Delivery {
    shared: Arc<Shared>,
    batches: Vec<Batch>,
    outcomes: Outcomes,
}

impl Delivery {
    /// A delivery of `batches`. Messages whose outcome is known already are not sent.
    pub(crate) fn new(shared: Arc<Shared>, batches: Vec<Batch>, outcomes: Outcomes) -> Self {
        Self { shared, batches, outcomes }
    }

    /// Publishes the batches whose lease stands and says what is to be written of each message.
    pub(crate) async fn run(mut self) -> Vec<Settlement> {
        let route = |topic: &str| self.shared.routes.of(topic).cloned();
        let loads = loads(&self.batches, route, &mut self.outcomes);
        let alive = self.send(loads).await;
        self.judge(alive)
    }

    /// Sends all loads side by side and tells the breakers. Answers whether the broker confirmed anything.
    async fn send(&mut self, loads: Vec<Load>) -> bool {
        let Self { shared, batches, outcomes } = self;
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
        let Self { shared, batches, outcomes } = self;
        let mut failures = Failures::default();
        let settlements = batches
            .iter()
            .enumerate()
            .map(|(b, batch)| {
                let verdicts = batch.messages.iter().enumerate().map(|(m, claimed)| {
                    let topic = &claimed.message.topic;
                    let route = shared.routes.of(topic).map(|way| &way.route);
                    let outcome = outcomes.take((b, m));
                    let kind = failures.kind(&outcome, topic, route, alive);
                    let confirmed = outcome == Outcome::Confirmed;
                    let circumstances = Circumstances {
                        route,
                        blamed: alive && shared.suspect(claimed.seq, &outcome, route),
                        condemned: shared.breakers.condemned(topic, Instant::now()),
                        groups: if confirmed { (shared.settings.groups)(topic) } else { Vec::new() },
                    };
                    let verdict = judge(claimed, outcome, circumstances);
                    if let Some(destination) = kind {
                        failures.note(destination, &verdict);
                    } else if confirmed {
                        failures.fine.insert(topic.clone());
                    }
                    log(claimed, &verdict);
                    (claimed.seq, verdict)
                });
                let lease: Lease = batch.lease;
                Settlement { batch: batch.id, lease, verdicts: verdicts.collect() }
            })
            .collect();
        self.tell(failures);
        settlements
    }

    fn tell(&self, failures: Failures) {
        let now = Instant::now();
        for topic in failures.fine {
            self.shared.breakers.succeeded(&Destination::Topic(topic));
        }
        for (destination, (error, expired)) in failures.down {
            if let Destination::Broker(broker) = &destination {
                self.shared.suspects.acquit(broker);
            }
            self.shared.breakers.failed(&destination, &error, expired, now);
        }
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

/// What a turn learned about destinations.
#[derive(Default)]
struct Failures {
    /// Destinations that are down, why, and whether a message had waited too long for them.
    down: HashMap<Destination, (String, bool)>,
    /// Topics that took something.
    fine: HashSet<String>,
}

impl Failures {
    /// The destination that this outcome speaks against, if it does.
    fn kind(
        &self,
        outcome: &Outcome,
        topic: &str,
        route: Option<&Route>,
        alive: bool,
    ) -> Option<Destination> {
        match outcome {
            Outcome::Misconfigured { .. } => Some(Destination::Topic(topic.to_owned())),
            Outcome::Unreachable { .. } | Outcome::Unconfirmed { .. } => route
                .filter(|route| !alive && !route.retry.count_outages)
                .map(|route| Destination::Broker(route.broker.clone())),
            _ => None,
        }
    }

    fn note(&mut self, destination: Destination, verdict: &Verdict) {
        let (error, dead) = match verdict {
            Verdict::Dead { error, .. } => (error.clone(), true),
            Verdict::Released { error } => (error.clone().unwrap_or_default(), false),
            Verdict::Failed { error, .. } => (error.clone(), false),
            Verdict::Sent { .. } => return,
        };
        let known = self.down.entry(destination).or_insert((error, dead));
        known.1 |= dead;
    }
}

fn log(claimed: &store::Claimed, verdict: &Verdict) {
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
    }
}
