//! The process that things happen to: an application with its relay and its consumer, or some of them.
//!
//! It works until its standard input is closed, so none is left behind by a nemesis that is gone. Everything it knows it
//! reads from the database when it starts, as a service would.

use std::io::Read;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use broker::{Connected, Surroundings};
use inbox::{Acknowledge, Consumer, Group, Handler};
use message::{RetryPolicy, Semantics};
use rand::Rng;
use relay::{Relay, Route, Settings, Settle};
use store::InboxRules;
use tokio::sync::{mpsc, oneshot, watch};

use crate::elsewhere;
use crate::ground::broker_path;
use crate::listener;
use crate::receiver;
use crate::shop::{Address, Hold, Sale, Shop, TOPIC, customer};
use crate::trail::Witness;
use crate::unsteady::Unsteady;

/// The consumer group of the proof.
pub const GROUP: &str = "proof";

/// Orders in a transaction at most.
const SALE: u64 = 20;

/// What a worker does.
#[derive(Clone, clap::Args)]
pub struct Work {
    /// The folder of the broker and the trails.
    #[arg(long)]
    pub folder: PathBuf,
    /// The database, the prefix of all keys, or the file.
    #[arg(long)]
    pub name: String,
    /// The URL of the broker; the embedded one in the folder when there is none.
    #[arg(long, env = "POSTRIDER_PROOF_BROKER", default_value = "", hide_env_values = true)]
    pub broker: String,
    /// How the group acknowledges to its producer: `together` with its work, in the `store` when that is committed, or to
    /// a URL, of the producer's API or of the broker that has its topic.
    #[arg(long, env = "POSTRIDER_PROOF_ACKNOWLEDGE", default_value = "together", hide_env_values = true)]
    pub acknowledge: String,
    /// The parts to run. A `receiver` is what takes the consumer's place where orders go out by HTTP, and a `listener` hears
    /// acknowledgements that are said to a URL.
    #[arg(long, value_delimiter = ',', default_value = "producer,relay,consumer")]
    pub only: Vec<String>,
    /// Orders that there shall be in all.
    #[arg(long, default_value_t = u64::MAX)]
    pub messages: u64,
    /// Customers to spread them over.
    #[arg(long, default_value_t = 1_000)]
    pub keys: u64,
    /// Writers side by side.
    #[arg(long, default_value_t = 1)]
    pub writers: u32,
    /// The longest time that a transaction stays open.
    #[arg(long, default_value = "0s", value_parser = humantime::parse_duration)]
    pub open: Duration,
    /// Transactions that each writer makes in a second at most.
    #[arg(long)]
    pub pace: Option<u32>,
    /// Make one sale, and be stopped between its last statement and its commit.
    #[arg(long)]
    pub stall: bool,
    /// The lease of lanes and partitions: how long a dead process is waited for.
    #[arg(long, default_value = "1s", value_parser = humantime::parse_duration)]
    pub lease: Duration,
    /// The longest time that the broker takes.
    #[arg(long, default_value = "0s", value_parser = humantime::parse_duration)]
    pub delay: Duration,
    /// The share of messages that the broker turns away, again and again.
    #[arg(long, default_value_t = 0.0)]
    pub failing: f64,
    /// Send and handle at most once.
    #[arg(long)]
    pub once: bool,
    /// Send exactly once, by what the broker has for it.
    #[arg(long)]
    pub exact: bool,
    /// Plant a fault at this point: what a check must find.
    #[arg(long)]
    pub plant: Option<String>,
    /// Crash at the n-th time that this point is reached: `relay::published=3`.
    #[arg(long)]
    pub crash: Option<String>,
}

/// How messages that the broker turned away are tried again: soon, and for as long as it takes.
pub(crate) fn retry() -> RetryPolicy {
    RetryPolicy {
        first: Duration::from_millis(200),
        cap: Duration::from_secs(2),
        max_attempts: 1_000,
        ..RetryPolicy::default()
    }
}

/// Works on the server at `store` until the standard input is closed.
///
/// # Errors
/// When a part of it cannot work.
pub async fn run(work: Work, store: String) -> Result<()> {
    if let Some(crash) = &work.crash {
        arm(crash)?;
    }
    if let Some(point) = &work.plant {
        fail::cfg(point, "return").map_err(anyhow::Error::msg)?;
    }
    let runs = |part: &str| work.only.iter().any(|only| only == part);
    let shop = Address { store, name: work.name.clone() }.open().await?;
    let broker = Brokers::open(&work)?;
    let relay = runs("relay").then(|| relay(&work, &*shop, &broker)).transpose()?;
    let ear = match work.acknowledge.as_str() {
        "together" => Acknowledge::InStore,
        "store" => Acknowledge::Store(shop.store()),
        url => listener::acknowledge(url, broker.said.as_ref().map(|said| said.publisher.clone()))?,
    };
    let group = |handler: Handler| {
        let group = Group::new(GROUP, shop.store(), handler, InboxRules::default()).acknowledge(ear.clone());
        if work.once { group.at_most_once() } else { group }
    };
    let consumer = |handler: Handler, broker: &Connected, topic: &str| {
        let subscriber = broker.subscriber.clone().context("nothing can be received from this broker")?;
        anyhow::Ok(Consumer::new(Arc::new(group(handler)), subscriber, vec![topic.to_owned()]).start())
    };
    let mut consumers = Vec::new();
    if runs("consumer") {
        consumers.push(consumer(shop.handler(), &broker.orders, TOPIC)?);
    }
    if let Some(other) = broker.other.as_ref().filter(|_| runs("relay")) {
        consumers.push(consumer(Handler::Log, other, elsewhere::TOPIC)?);
    }
    if runs("receiver") {
        receiver::start(&work.broker, group(shop.handler())).await?;
    }
    let (stop, stopped) = watch::channel(false);
    let mut listener = None;
    if runs("listener") {
        let said = broker.said.as_ref().and_then(|said| said.subscriber.clone());
        listener = Some(listener::start(&work.acknowledge, said, shop.store(), stopped).await?);
    }

    let closed = Arc::new(AtomicBool::new(false));
    let (fail, mut failed) = mpsc::channel(1);
    let writers = if runs("producer") { writers(&work, &shop, &closed, &fail).await? } else { Vec::new() };
    tokio::select! {
        () = standard_input_closed() => {}
        Some(error) = failed.recv() => return Err(error),
    }
    closed.store(true, Ordering::Relaxed);
    for writer in writers {
        writer.join().map_err(|_| anyhow::anyhow!("a writer panicked"))?;
    }
    for consumer in consumers {
        consumer.drain().await;
    }
    stop.send_replace(true);
    if let Some(listener) = listener {
        listener.await??;
    }
    if let Some(relay) = relay {
        relay.drain().await;
    }
    failed.try_recv().map_or(Ok(()), Err)
}

/// Where messages go.
struct Brokers {
    /// The broker that orders go through.
    orders: Connected,
    /// The embedded one, where that is another.
    other: Option<Connected>,
    /// The one that acknowledgements are said in, if any are.
    said: Option<Connected>,
}

impl Brokers {
    fn open(work: &Work) -> Result<Self> {
        let lease = humantime::format_duration(work.lease);
        let surroundings = Surroundings { file: broker_path(&work.folder), max_payload: 1 << 20 };
        let embedded = || broker::open(&format!("embedded://?lease={lease}"), &surroundings);
        let by_topic = work.acknowledge.contains("://") && !work.acknowledge.starts_with("http://");
        let said = by_topic.then(|| broker::open(&work.acknowledge, &surroundings)).transpose()?;
        if work.broker.is_empty() {
            return Ok(Self { orders: embedded()?, other: None, said });
        }
        let orders = broker::open(&work.broker, &surroundings)?;
        Ok(Self { orders, other: Some(embedded()?), said })
    }
}

async fn standard_input_closed() {
    let (closed, wait) = oneshot::channel();
    // A thread of its own: the runtime would wait for a read that never ends.
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        let _ = closed.send(());
    });
    let _ = wait.await;
}

/// Makes the process abort, without unwinding or flushing anything, at a named point.
fn arm(crash: &str) -> Result<()> {
    let (point, times) = crash.split_once('=').context("--crash wants POINT=TIMES")?;
    let left = AtomicI64::new(times.parse()?);
    fail::cfg_callback(point, move || {
        if left.fetch_sub(1, Ordering::Relaxed) == 1 {
            std::process::abort();
        }
    })
    .map_err(anyhow::Error::msg)
}

fn relay(work: &Work, shop: &dyn Shop, brokers: &Brokers) -> Result<relay::Running> {
    let settings =
        Settings { lease: work.lease, groups: Arc::new(|_| vec![GROUP.to_owned()]), ..Settings::default() };
    let Brokers { orders, other, .. } = brokers;
    let publisher = orders.publisher.clone();
    let semantics = match (work.once, work.exact) {
        (true, _) => Semantics::AtMostOnce,
        (_, true) => Semantics::ExactlyOnce,
        _ => Semantics::EffectivelyOnce,
    };
    let settle = Settle::keeping(semantics, &*publisher);
    let broker = if semantics.sends_again() { publisher } else { publisher.once().unwrap_or(publisher) };
    let orders = Unsteady { broker, delay: work.delay, failing: work.failing };
    let mut routes = vec![Route { retry: retry(), settle, ..Route::new("main", &[TOPIC], Arc::new(orders)) }];
    if let Some(other) = other {
        routes.push(Route::new("other", &[elsewhere::TOPIC], other.publisher.clone()));
    }
    let witness = Witness::new(shop.store(), &work.folder)?;
    Ok(Relay::start(Arc::new(witness), routes, settings))
}

/// Starts the writers, each on a thread of its own: some drivers block.
async fn writers(
    work: &Work,
    shop: &Arc<dyn Shop>,
    closed: &Arc<AtomicBool>,
    fail: &mpsc::Sender<anyhow::Error>,
) -> Result<Vec<std::thread::JoinHandle<()>>> {
    let committed = shop.orders().await?.len() as u64;
    let left = Arc::new(Left(AtomicU64::new(work.messages.saturating_sub(committed))));
    let start = |_| {
        let writer =
            Writer { work: work.clone(), shop: shop.clone(), left: left.clone(), closed: closed.clone() };
        let fail = fail.clone();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let done =
                runtime.map_err(anyhow::Error::from).and_then(|runtime| runtime.block_on(writer.run()));
            if let Err(error) = done {
                let _ = fail.blocking_send(error.context("a writer failed"));
            }
        })
    };
    Ok((0..work.writers).map(start).collect())
}

/// Orders that are still to be written, by all writers of a process together.
struct Left(AtomicU64);

impl Left {
    /// Takes up to `most` of them.
    fn take(&self, most: u64) -> u64 {
        let rest = |left: u64| Some(left.saturating_sub(most));
        let Ok(before) = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, rest) else { return 0 };
        before.min(most)
    }

    fn give_back(&self, orders: u64) {
        self.0.fetch_add(orders, Ordering::Relaxed);
    }
}

struct Writer {
    work: Work,
    shop: Arc<dyn Shop>,
    left: Arc<Left>,
    closed: Arc<AtomicBool>,
}

impl Writer {
    /// Commits orders with their messages, a few in a transaction, and rolls every tenth transaction back.
    async fn run(self) -> Result<()> {
        let mut till = self.shop.till().await?;
        if self.work.stall {
            let sale = Sale { hold: Hold::Stopped, commit: true, ..self.sale(SALE) };
            till.sell(&sale).await?;
            return Ok(());
        }
        let pace = self.work.pace.map(|pace| Duration::from_secs(1) / pace);
        while !self.closed.load(Ordering::Relaxed) {
            let began = Instant::now();
            let size = self.left.take(rand::rng().random_range(1..=SALE));
            if size == 0 {
                return Ok(());
            }
            let sold = till.sell(&self.sale(size)).await?;
            self.left.give_back(size - sold);
            self.shop.ring();
            if let Some(pause) = pace.and_then(|pace| pace.checked_sub(began.elapsed())) {
                tokio::time::sleep(pause).await;
            }
        }
        Ok(())
    }

    fn sale(&self, size: u64) -> Sale {
        let mut random = rand::rng();
        Sale {
            customers: (0..size).map(|_| customer(random.random_range(0..self.work.keys))).collect(),
            hold: Hold::For(random.random_range(Duration::ZERO..=self.work.open)),
            commit: random.random_range(0..10) > 0,
        }
    }
}
