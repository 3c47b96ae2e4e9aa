//! A train: settles the batches that came back, claims the next, sends them off, and again.
//!
//! What goes to one broker is a delivery of its own. The train does not wait for all of them: each turn with the store
//! settles those that are back and claims for the brokers that have none on the way. So a broker that hangs keeps its
//! own messages waiting and nobody else's, and an idle relay looks at the store once for all of its brokers.

use std::collections::{BTreeMap, HashMap};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::FutureExt;
use store::{Batch, BatchId, ClaimOrder, Left, Settlement, TopicRule, Turn, Verdict};
use tokio::sync::watch;
use tokio::task::{JoinError, JoinSet};

use crate::appetite::{Appetites, Portion};
use crate::breaker::{Destination, Gates};
use crate::deliver::Delivery;
use crate::leases::Complainant;
use crate::locks::Locks;
use crate::publish::Outcomes;
use crate::route::Settle;
use crate::{Route, Shared, once};

/// The first wait of a train that found nothing; doubled each time, up to the poll interval.
const FIRST_WAIT: Duration = Duration::from_millis(5);

/// While something is on its way, the bell of a busy destination makes the train look for the others so often at most; less
/// and less often while nothing is there for them.
const NEXT_LOOK: Duration = Duration::from_millis(2);
const LAST_LOOK: Duration = Duration::from_millis(16);

/// The wait before a train that panicked starts again.
const PANICKED: Duration = Duration::from_secs(1);

/// The wait after the store failed; doubled each time.
pub(crate) const STORE_WAIT: Duration = Duration::from_millis(20);

/// Runs a train for as long as the relay lives. One that panics leaves its batches as a crash would: its lanes are
/// given up at once, so that whoever takes them finds the orphans, and a new train starts.
pub(crate) async fn supervise(number: usize, shared: Arc<Shared>) {
    while AssertUnwindSafe(Train::new(number, shared.clone()).run()).catch_unwind().await.is_err() {
        tracing::error!(
            train = number,
            "a train of the relay panicked: its lanes are given up and it starts again"
        );
        let leases = shared.leases.abandon(lanes_of(number, &shared));
        if let Err(error) = shared.store.release(&leases, Left::Unknown).await {
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
pub(crate) fn lanes_of(number: usize, shared: &Shared) -> impl Fn(u16) -> bool + use<> {
    let trains = shared.settings.trains.max(1);
    move |lane| usize::from(lane) % trains == number
}

struct Train {
    number: usize,
    shared: Arc<Shared>,
    wake: watch::Receiver<u64>,
    stopping: watch::Receiver<bool>,
    idle: Duration,
    looked: Instant,
    /// How long after it the bell is heard while something is on its way.
    next_look: Duration,
    locks: Option<Locks>,
    /// What is on its way: by channel, the lanes it is from.
    away: HashMap<usize, Vec<u16>>,
    appetites: Appetites,
    deliveries: JoinSet<Arrived>,
}

/// A delivery that is back.
struct Arrived {
    channel: usize,
    settlements: Vec<Settlement>,
    /// Messages that the broker confirmed.
    sent: usize,
    /// Since the turn that claimed it began.
    took: Duration,
}

impl Train {
    fn new(number: usize, shared: Arc<Shared>) -> Self {
        let (wake, stopping) = (shared.wake.subscribe(), shared.stopping.subscribe());
        let locks = shared.settings.claims.clone().map(Locks::new);
        let appetites = Appetites::new(shared.settings.batch, shared.routes.channels());
        Self {
            number,
            shared,
            wake,
            stopping,
            idle: FIRST_WAIT,
            looked: Instant::now(),
            next_look: NEXT_LOOK,
            locks,
            away: HashMap::new(),
            appetites,
            deliveries: JoinSet::new(),
        }
    }

    async fn run(mut self) {
        let mut settlements = Vec::new();
        loop {
            self.wake.borrow_and_update();
            self.looked = Instant::now();
            let portion = self.appetites.share_out(|channel| !self.away.contains_key(&channel));
            let Turn { fenced, batches, more, next_due } = self.turn(&mut settlements, &portion).await;
            self.give_back(&fenced, batches.is_empty()).await;
            self.appetites.found(&portion, |channel| batches.iter().any(|batch| batch.channel == channel));
            if !batches.is_empty() {
                fail::fail_point!("relay::claimed");
                self.idle = FIRST_WAIT;
                self.next_look = NEXT_LOOK;
                self.depart(batches).await;
            } else if portion.all {
                self.next_look = (self.next_look * 2).min(LAST_LOOK);
                self.appetites.rest(|channel| !self.away.contains_key(&channel));
            }
            self.leave().await;
            if self.away.is_empty() && *self.stopping.borrow() {
                return;
            }
            settlements = self.back();
            if settlements.is_empty() && portion.all && !(more && self.has_room()) {
                settlements = self.wait(next_due).await;
            }
            if !settlements.is_empty() {
                fail::fail_point!("relay::published");
            }
        }
    }

    fn mine(&self) -> impl Fn(u16) -> bool + use<> {
        lanes_of(self.number, &self.shared)
    }

    /// One turn with the store, however long the store needs to be there.
    async fn turn(&self, settlements: &mut Vec<Settlement>, portion: &Portion) -> Turn {
        let mut wait = STORE_WAIT;
        loop {
            let gates = self.shared.breakers.gates(Instant::now());
            let order = (!*self.stopping.borrow()).then(|| self.order(gates, portion));
            let leases = order.as_ref().map(|order| order.leases.clone()).unwrap_or_default();
            let settled = settlements.len();
            match self.shared.store.turn(settlements.clone(), order).await {
                Ok(turn) => {
                    let batches: Vec<BatchId> = settlements.drain(..).map(|settled| settled.batch).collect();
                    if settled > 0 {
                        fail::fail_point!("relay::settled");
                    }
                    self.shared.senders.settled(self.number, &batches, &turn.fenced);
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

    /// Whether it is worth a look what there is to claim: some broker has nothing on the way.
    fn has_room(&self) -> bool {
        let free = |channel| !self.away.contains_key(&channel);
        self.shared.routes.used().any(free) && !*self.stopping.borrow()
    }

    fn order(&self, gates: Gates, portion: &Portion) -> ClaimOrder {
        let (shared, rooms) = (self.shared.clone(), portion.rooms.clone());
        ClaimOrder {
            leases: self.shared.leases.usable(self.mine()),
            limit: portion.limit,
            bytes: self.shared.settings.bytes,
            rule: Arc::new(move |topic| {
                let way = shared.routes.of(topic);
                let channel = way.map_or(0, |way| way.channel);
                let route = way.map(|way| &way.route);
                let broker =
                    route.map_or(usize::MAX, |route| gates.limit(&Destination::Broker(route.broker.clone())));
                let topic_limit = gates.limit(&Destination::Topic(topic.to_owned()));
                let limit = broker.min(topic_limit).min(gates.limit(&Destination::Claims));
                TopicRule {
                    channel,
                    take: limit.min(rooms[channel]),
                    hold_failed: route.is_some_and(Route::holds_failed),
                    hold_dead: route.is_some_and(Route::holds_dead),
                }
            }),
        }
    }

    /// Gives back the lanes that others should have, once nothing of ours is in flight on them.
    async fn leave(&self) {
        let busy = |lane| self.away.values().any(|lanes| lanes.contains(&lane));
        let leases = self.shared.leases.leave(self.mine(), busy);
        if leases.is_empty() {
            return;
        }
        tracing::debug!(lanes = leases.len(), "gives lanes to other relays");
        let lanes: Vec<u16> = leases.iter().map(|lease| lease.lane).collect();
        self.shared.senders.give_back(self.number, |lane| lanes.contains(&lane)).await;
        // What may be open there is from claims whose answers were lost: nobody has sent any of it.
        if let Err(error) = self.shared.store.release(&leases, Left::Untouched).await {
            tracing::warn!(%error, "could not give lanes back: they free themselves when their lease ends");
        }
        self.shared.pulse.notify_one();
    }

    /// Gives back the claims on what is settled; with the next batch, if there is one.
    async fn give_back(&mut self, fenced: &[BatchId], now: bool) {
        let Some(locks) = &mut self.locks else { return };
        locks.settled(fenced);
        if now {
            locks.give_back(&self.shared.breakers).await;
        }
    }

    /// Sends batches off, those of each channel by themselves.
    async fn depart(&mut self, batches: Vec<Batch>) {
        let mut channels: BTreeMap<usize, Vec<Batch>> = BTreeMap::new();
        for batch in batches {
            channels.entry(batch.channel).or_default().push(batch);
        }
        for (channel, batches) in channels {
            self.away.insert(channel, batches.iter().map(|batch| batch.lease.lane).collect());
            let (began, shared) = (self.looked, self.shared.clone());
            let settle = shared.routes.channels()[channel];
            if settle == Settle::Before {
                self.deliveries.spawn(async move {
                    let sent = once::deliver(&shared, batches).await;
                    Arrived { channel, settlements: Vec::new(), sent, took: began.elapsed() }
                });
                continue;
            }
            let mut outcomes = Outcomes::new(&batches);
            if let Some(locks) = self.locks.as_mut().filter(|_| settle == Settle::After) {
                locks.take(&batches, &shared.routes, &shared.breakers, &mut outcomes).await;
            }
            let together = (settle == Settle::Together).then_some(self.number);
            let delivery = Delivery::new(shared, batches, outcomes, together);
            self.deliveries.spawn(async move {
                let settlements = delivery.run().await;
                let verdicts = settlements.iter().flat_map(|settlement| &settlement.verdicts);
                let sent = verdicts.filter(|(_, verdict)| matches!(verdict, Verdict::Sent { .. })).count();
                Arrived { channel, settlements, sent, took: began.elapsed() }
            });
        }
    }

    /// What is back by now, to be settled.
    fn back(&mut self) -> Vec<Settlement> {
        let mut settlements = Vec::new();
        while let Some(arrived) = self.deliveries.try_join_next() {
            settlements.extend(self.arrived(arrived));
        }
        settlements
    }

    fn arrived(&mut self, arrived: Result<Arrived, JoinError>) -> Vec<Settlement> {
        let Arrived { channel, settlements, sent, took } = match arrived {
            Ok(arrived) => arrived,
            // The train falls over with it, and its lanes are given up.
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            // The runtime ends.
            Err(_) => return Vec::new(),
        };
        self.away.remove(&channel);
        self.appetites.learn(channel, sent, took);
        if let Some(locks) = &mut self.locks {
            locks.judged(&settlements);
        }
        settlements
    }

    /// Waits until something is back or may be there to claim. Answers what is to be settled.
    async fn wait(&mut self, next_due: Option<Duration>) -> Vec<Settlement> {
        let mut wait = self.idle.min(self.shared.settings.poll);
        for sooner in [next_due, self.shared.breakers.next_probe(Instant::now())].into_iter().flatten() {
            wait = wait.min(sooner.max(FIRST_WAIT));
        }
        let room = self.has_room();
        let quiet = if self.away.is_empty() { self.looked } else { self.looked + self.next_look };
        let back = tokio::select! {
            Some(arrived) = self.deliveries.join_next() => Some(arrived),
            () = tokio::time::sleep(wait), if room => {
                self.idle = (self.idle * 2).min(self.shared.settings.poll);
                None
            }
            () = rung(&mut self.wake, quiet), if room => {
                self.idle = FIRST_WAIT;
                None
            }
            _ = self.stopping.changed() => None,
        };
        let mut settlements = back.map(|arrived| self.arrived(arrived)).unwrap_or_default();
        settlements.extend(self.back());
        settlements
    }
}

/// Waits for the bell, but not before `quiet` is over.
async fn rung(wake: &mut watch::Receiver<u64>, quiet: Instant) {
    tokio::time::sleep_until(quiet.into()).await;
    let _ = wake.changed().await;
}
