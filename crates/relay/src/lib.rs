//! RELAY: takes messages from the store, publishes them, and writes down what became of each.
//!
//! ```text
//!   heartbeat (own thread)      trains (a few tasks, each with its share of the lanes)
//!   renews leases, takes free   ┌─► turn: settle what is back, claim the next ─┬─► deliver to broker A ─┐
//!   lanes, gives up surplus     │                                              ├─► deliver to broker B ─┤
//!                               └──────────────────────────────────────────────┴────────────────────────┘
//! ```
//!
//! While one train waits for the brokers, another settles and claims: that is the pipeline. A lane belongs to one
//! train, and a topic of a lane is in one open batch at most, so messages of a key can never overtake each other. Each
//! broker has deliveries of its own: one that hangs holds up nobody else's messages.
//!
//! A relay that lost a lane can write nothing for it: the store refuses. Before each publish it also asks its
//! own monotonic clock whether the lease still stands, counted from before the renewal was asked.

mod appetite;
mod breaker;
pub mod claims;
mod deliver;
mod direct;
mod heart;
mod leases;
mod locks;
mod once;
mod overdue;
mod publish;
mod route;
mod suspects;
mod together;
mod train;
mod verdict;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use store::{Instance, Store};
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use uuid::Uuid;

pub use breaker::BreakerView;
pub use direct::{Direct, NotTaken, Try};
pub use once::Loss;
pub use overdue::{Overdue, Patience};
pub use route::{Route, Settle};

use breaker::Breakers;
use claims::Claims;
use heart::Heart;
use leases::Leases;
use once::Losses;
use route::Routes;
use suspects::Suspects;
pub use together::Ended;
use together::Senders;

/// Which groups must acknowledge a topic whose writer named none.
pub type Groups = Arc<dyn Fn(&str) -> Vec<String> + Send + Sync>;

/// How a relay works.
#[derive(Clone)]
pub struct Settings {
    /// How long a lane is leased. A relay that dies is replaced after this.
    pub lease: Duration,
    /// Messages claimed in one turn of a train at most. So many may be on the way to each broker. A train begins with
    /// fewer, and takes more while a backlog waits and the broker is quick.
    pub batch: usize,
    /// Bytes claimed in one turn of a train. So many may be on the way to each broker.
    pub bytes: usize,
    /// The longest time between two looks at an idle store.
    pub poll: Duration,
    /// How many trains work side by side.
    pub trains: usize,
    /// How long a drain may take before the rest is left to others.
    pub drain: Duration,
    /// Which groups must acknowledge a topic whose writer named none.
    pub groups: Groups,
    /// How long groups may take to acknowledge; those that are not named may take for ever.
    pub patience: Vec<Patience>,
    /// Locks and counts each message before it is sent, beside the lane.
    pub claims: Option<Arc<dyn Claims>>,
    /// How people see this relay: by its process id, unless said otherwise.
    pub name: String,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            lease: Duration::from_secs(30),
            batch: 10_000,
            bytes: 8 << 20,
            poll: Duration::from_secs(1),
            trains: 2,
            drain: Duration::from_secs(10),
            groups: Arc::new(|_| Vec::new()),
            patience: Vec::new(),
            claims: None,
            name: format!("relay-{}", std::process::id()),
        }
    }
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings")
            .field("lease", &self.lease)
            .field("batch", &self.batch)
            .field("poll", &self.poll)
            .field("trains", &self.trains)
            .field("claims", &self.claims.is_some())
            .finish_non_exhaustive()
    }
}

/// What trains and heartbeat share.
struct Shared {
    store: Arc<dyn Store>,
    routes: Routes,
    breakers: Breakers,
    suspects: Suspects,
    losses: Losses,
    overdue: overdue::Board,
    senders: Senders,
    leases: Leases,
    settings: Settings,
    instance: Instance,
    /// Rises when something may be there to do.
    wake: watch::Sender<u64>,
    /// Lanes were given up: the heartbeat looks at once who should have them.
    pulse: Notify,
    stopping: watch::Sender<bool>,
}

/// How a relay is doing.
#[derive(Clone, Debug)]
pub struct Status {
    /// The lanes it holds.
    pub lanes: Vec<u16>,
    /// Relays alive on the store, as of the last beat.
    pub instances: usize,
    /// Destinations that are closed off, or were and are being tried.
    pub breakers: Vec<BreakerView>,
    /// What routes that send at most once have lost.
    pub losses: Vec<Loss>,
    /// What groups have not acknowledged in time.
    pub overdue: Vec<Overdue>,
    /// How transactions ended on routes that send exactly once.
    pub transactions: Vec<Ended>,
    /// What keeps it from working, if anything does.
    pub problem: Option<String>,
}

/// Starts relays.
#[derive(Debug)]
pub struct Relay;

impl Relay {
    /// Starts a relay on `store`. It works until it is [drained](Running::drain) or dropped.
    ///
    /// # Panics
    /// Outside a tokio runtime, or when the system cannot start a thread.
    pub fn start(store: Arc<dyn Store>, routes: Vec<Route>, settings: Settings) -> Running {
        let instance = Instance { id: Uuid::new_v4(), name: settings.name.clone() };
        let shared = Arc::new(Shared {
            store,
            routes: Routes::new(routes),
            breakers: Breakers::default(),
            suspects: Suspects::default(),
            losses: Losses::default(),
            overdue: overdue::Board::of(&settings.patience),
            senders: Senders::default(),
            leases: Leases::default(),
            settings,
            instance,
            wake: watch::Sender::new(0),
            pulse: Notify::new(),
            stopping: watch::Sender::new(false),
        });
        let mut trains = JoinSet::new();
        for number in 0..shared.settings.trains.max(1) {
            trains.spawn(train::supervise(number, shared.clone()));
        }
        for patience in shared.settings.patience.clone() {
            trains.spawn(overdue::watch(patience, shared.clone()));
        }
        let bell = tokio::spawn(listen(shared.clone()));
        let heart = Heart::start(shared.clone());
        Running { shared, trains, bell, heart: Some(heart) }
    }
}

/// Passes the store's bell on to all trains.
async fn listen(shared: Arc<Shared>) {
    loop {
        shared.store.woken().await;
        shared.wake.send_modify(|count| *count += 1);
    }
}

/// A relay at work. Dropped without a drain, it stops like a crash: its lanes free themselves.
pub struct Running {
    shared: Arc<Shared>,
    /// And those who look after what is overdue.
    trains: JoinSet<()>,
    bell: tokio::task::JoinHandle<()>,
    heart: Option<Heart>,
}

impl fmt::Debug for Running {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Running").field("instance", &self.shared.instance).finish_non_exhaustive()
    }
}

impl Running {
    /// How it is doing.
    pub fn status(&self) -> Status {
        Reporter(self.shared.clone()).status()
    }

    /// A handle that tells how it is doing for as long as anybody asks.
    pub fn reporter(&self) -> Reporter {
        Reporter(self.shared.clone())
    }

    /// Stops claiming, finishes and settles what is in flight, and gives the lanes back, so that others
    /// go on at once. What is not finished within the drain time is left as a crash would leave it.
    ///
    /// # Cancel safety
    /// A drain that is dropped stops the relay like a crash.
    pub async fn drain(mut self) {
        self.shared.stopping.send_replace(true);
        let mut trains = std::mem::take(&mut self.trains);
        let finish = async move { while trains.join_next().await.is_some() {} };
        if tokio::time::timeout(self.shared.settings.drain, finish).await.is_ok() {
            for train in 0..self.shared.settings.trains.max(1) {
                self.shared.senders.give_back(train, |_| true).await;
            }
        } else {
            tracing::warn!("the drain took too long: what is still in flight is left to others");
        }
        if let Some(heart) = self.heart.take() {
            heart.stop().await;
        }
        if let Err(error) = self.shared.store.leave(&self.shared.instance).await {
            tracing::warn!(%error, "could not give the lanes back: they free themselves when the lease ends");
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.shared.stopping.send_replace(true);
        self.bell.abort();
        if let Some(heart) = &self.heart {
            heart.abandon();
        }
    }
}

/// Tells how a relay is doing.
#[derive(Clone)]
pub struct Reporter(Arc<Shared>);

impl fmt::Debug for Reporter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Reporter").field(&self.0.instance.name).finish()
    }
}

impl Reporter {
    /// How it is doing now.
    pub fn status(&self) -> Status {
        let (lanes, instances, problem) = self.0.leases.report();
        Status {
            lanes,
            instances,
            breakers: self.0.breakers.views(),
            losses: self.0.losses.views(),
            overdue: self.0.overdue.views(),
            transactions: self.0.senders.ended(),
            problem,
        }
    }
}
