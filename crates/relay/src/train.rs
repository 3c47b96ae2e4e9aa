//! A train: settles its last batches, claims the next, publishes them, and again.

use std::collections::{HashMap, HashSet};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use broker::Outcome;
use futures::FutureExt;
use futures::future::join_all;
use store::{Batch, ClaimOrder, Lease, Settlement, TopicRule, Turn, Verdict};
use tokio::sync::watch;

use crate::breaker::{Destination, Gates};
use crate::leases::Complainant;
use crate::locks::Locks;
use crate::publish::{Load, Outcomes, loads};
use crate::verdict::{Circumstances, judge};
use crate::{Route, Shared};

/// The first wait of a train that found nothing; doubled each time, up to the poll interval.
const FIRST_WAIT: Duration = Duration::from_millis(5);

/// The wait before a train that panicked starts again.
const PANICKED: Duration = Duration::from_secs(1);

/// The wait after the store failed; doubled each time.
const STORE_WAIT: Duration = Duration::from_millis(20);

/// Runs a train for as long as the relay lives. One that panics leaves its batches as a crash would: its lanes are
/// given up at once, so that whoever takes them finds the orphans, and a new train starts.
pub(crate) async fn supervise(number: usize, shared: Arc<Shared>) {
    while AssertUnwindSafe(Train::new(number, shared.clone()).run()).catch_unwind().await.is_err() {
        tracing::error!(
            train = number,
            "a train of the relay panicked: its lanes are given up and it starts again"
        );
        let leases = shared.leases.abandon(lanes_of(number, &shared));
        if let Err(error) = shared.store.release(&leases).await {
            tracing::warn!(%error, "could not give lanes back: they free themselves when their lease ends");
        }
        shared.pulse.notify_one();
        if *shared.stopping.borrow() {
            return;
        }
        tokio::time::sleep(PANICKED).await;
    }
}

/// The lanes that a train works on.
fn lanes_of(number: usize, shared: &Shared) -> impl Fn(u16) -> bool + use<> {
    let trains = shared.settings.trains.max(1);
    move |lane| usize::from(lane) % trains == number
}

struct Train {
    number: usize,
    shared: Arc<Shared>,
    wake: watch::Receiver<u64>,
    stopping: watch::Receiver<bool>,
    idle: Duration,
    locks: Option<Locks>,
}

impl Train {
    fn new(number: usize, shared: Arc<Shared>) -> Self {
        let (wake, stopping) = (shared.wake.subscribe(), shared.stopping.subscribe());
        let locks = shared.settings.claims.clone().map(Locks::new);
        Self { number, shared, wake, stopping, idle: FIRST_WAIT, locks }
    }

    async fn run(mut self) {
        let mut settlements = Vec::new();
        loop {
            self.wake.borrow_and_update();
            let turn = self.turn(&mut settlements).await;
            self.give_back(&turn).await;
            self.leave(&turn.batches).await;
            if !turn.batches.is_empty() {
                fail::fail_point!("relay::claimed");
                self.idle = FIRST_WAIT;
                settlements = self.publish(turn.batches).await;
                fail::fail_point!("relay::published");
            } else if *self.stopping.borrow() {
                return;
            } else if !turn.more {
                self.wait(turn.next_due).await;
            }
        }
    }

    fn mine(&self) -> impl Fn(u16) -> bool + use<> {
        lanes_of(self.number, &self.shared)
    }

    /// One turn with the store, however long the store needs to be there.
    async fn turn(&self, settlements: &mut Vec<Settlement>) -> Turn {
        let mut wait = STORE_WAIT;
        loop {
            let gates = self.shared.breakers.gates(Instant::now());
            let order = (!*self.stopping.borrow()).then(|| self.order(gates));
            let leases = order.as_ref().map(|order| order.leases.clone()).unwrap_or_default();
            let settled = settlements.len();
            match self.shared.store.turn(settlements.clone(), order).await {
                Ok(turn) => {
                    settlements.clear();
                    if settled > 0 {
                        fail::fail_point!("relay::settled");
                    }
                    if !turn.fenced.is_empty() {
                        tracing::warn!(
                            batches = turn.fenced.len(),
                            "another relay owns these lanes by now: what was sent may be sent again"
                        );
                    }
                    self.shared.leases.well(Complainant::Train(self.number));
                    return turn;
                }
                Err(error) if error.is_transient() || !*self.stopping.borrow() => {
                    tracing::warn!(%error, settlements = settled, "the store does not answer; trying again");
                    self.shared.leases.complain(Complainant::Train(self.number), error.to_string());
                }
                Err(error) => {
                    tracing::error!(%error, "leaving with unsettled batches: they are sent again by others");
                    let fenced = settlements.drain(..).map(|settlement| settlement.batch).collect();
                    return Turn { fenced, ..Turn::default() };
                }
            }
            self.shared.leases.doubt(&leases);
            tokio::time::sleep(wait).await;
            wait = (wait * 2).min(Duration::from_secs(5));
        }
    }

    fn order(&self, gates: Gates) -> ClaimOrder {
        let shared = self.shared.clone();
        ClaimOrder {
            leases: self.shared.leases.usable(self.mine()),
            limit: self.shared.settings.batch,
            bytes: self.shared.settings.bytes,
            rule: Arc::new(move |topic| {
                let route = shared.routes.of(topic).map(|way| &way.route);
                let broker =
                    route.map_or(usize::MAX, |route| gates.limit(&Destination::Broker(route.broker.clone())));
                let topic_limit = gates.limit(&Destination::Topic(topic.to_owned()));
                TopicRule {
                    take: broker.min(topic_limit).min(gates.limit(&Destination::Claims)),
                    hold_failed: route.is_some_and(Route::holds_failed),
                    hold_dead: route.is_some_and(Route::holds_dead),
                }
            }),
        }
    }

    /// Gives back the lanes that others should have, once nothing of ours is in flight on them.
    async fn leave(&self, batches: &[Batch]) {
        let busy = |lane| batches.iter().any(|batch| batch.lease.lane == lane);
        let leases = self.shared.leases.leave(self.mine(), busy);
        if leases.is_empty() {
            return;
        }
        tracing::debug!(lanes = leases.len(), "gives lanes to other relays");
        if let Err(error) = self.shared.store.release(&leases).await {
            tracing::warn!(%error, "could not give lanes back: they free themselves when their lease ends");
        }
        self.shared.pulse.notify_one();
    }

    /// Gives back the claims on what is settled; with the next batch, if there is one.
    async fn give_back(&mut self, turn: &Turn) {
        let Some(locks) = &mut self.locks else { return };
        locks.settled(&turn.fenced);
        if turn.batches.is_empty() {
            locks.give_back(&self.shared.breakers).await;
        }
    }

    async fn wait(&mut self, next_due: Option<Duration>) {
        let mut wait = self.idle.min(self.shared.settings.poll);
        for sooner in [next_due, self.shared.breakers.next_probe(Instant::now())].into_iter().flatten() {
            wait = wait.min(sooner.max(FIRST_WAIT));
        }
        tokio::select! {
            () = tokio::time::sleep(wait) => self.idle = (self.idle * 2).min(self.shared.settings.poll),
            _ = self.wake.changed() => self.idle = FIRST_WAIT,
            _ = self.stopping.changed() => {}
        }
    }

    /// Publishes the batches whose lease stands and says what is to be written of each message.
    async fn publish(&mut self, batches: Vec<Batch>) -> Vec<Settlement> {
        let mut outcomes = Outcomes::new(&batches);
        if let Some(locks) = &mut self.locks {
            locks.take(&batches, &self.shared.routes, &self.shared.breakers, &mut outcomes).await;
        }
        let route = |topic: &str| self.shared.routes.of(topic).cloned();
        let loads = loads(&batches, route, &mut outcomes);
        let alive = self.send(loads, &batches, &mut outcomes).await;
        let settlements = self.judge(&batches, &mut outcomes, &alive);
        if let Some(locks) = &mut self.locks {
            locks.judged(&settlements);
        }
        settlements
    }

    /// Until when all leases of these batches certainly stand, if they do.
    fn lease_of(&self, batches: &[Batch]) -> Option<Instant> {
        batches.iter().map(|batch| self.shared.leases.until(&batch.lease)).min().flatten()
    }

    /// Sends all loads side by side and tells the breakers. Answers the brokers that confirmed anything.
    async fn send(&self, loads: Vec<Load>, batches: &[Batch], outcomes: &mut Outcomes) -> HashSet<String> {
        let mut alive = HashSet::new();
        let sending = loads.into_iter().map(|load| async {
            let broker = load.way.route.broker.clone();
            (broker, load.publish(batches, || self.lease_of(batches)).await)
        });
        for (broker, done) in join_all(sending).await {
            if done.iter().any(|(_, outcome)| *outcome == Outcome::Confirmed) {
                self.shared.breakers.succeeded(&Destination::Broker(broker.clone()));
                alive.insert(broker);
            }
            for (place, outcome) in done {
                outcomes.set(place, outcome);
            }
        }
        alive
    }

    fn judge(&self, batches: &[Batch], outcomes: &mut Outcomes, alive: &HashSet<String>) -> Vec<Settlement> {
        let mut failures = Failures::default();
        let settlements = batches
            .iter()
            .enumerate()
            .map(|(b, batch)| {
                let verdicts = batch.messages.iter().enumerate().map(|(m, claimed)| {
                    let topic = &claimed.message.topic;
                    let route = self.shared.routes.of(topic).map(|way| &way.route);
                    let alive = route.is_some_and(|route| alive.contains(&route.broker));
                    let outcome = outcomes.take((b, m));
                    let kind = failures.kind(&outcome, topic, route, alive);
                    let confirmed = outcome == Outcome::Confirmed;
                    let circumstances = Circumstances {
                        route,
                        alive,
                        condemned: self.shared.breakers.condemned(topic, Instant::now()),
                        groups: if confirmed { (self.shared.settings.groups)(topic) } else { Vec::new() },
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
            self.shared.breakers.failed(&destination, &error, expired, now);
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
