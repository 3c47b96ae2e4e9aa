//! A relay with several brokers: one that does not answer holds up nobody else.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use broker::embedded::{Broker, Config};
use broker::{Guarantees, Outcome, Outgoing, Publisher};
use message::{Message, MessageId, Status};
use relay::{Relay, Route, Running, Settings};
use store::sqlite::SqliteStore;
use store::{Append, Appended, Inspect, Lanes};
use tokio::sync::watch;

/// A broker that takes what it is given and does not answer until it is let go.
struct Hung {
    broker: Broker,
    free: watch::Sender<bool>,
    calls: AtomicUsize,
    stored: Mutex<Vec<Message>>,
}

#[async_trait]
impl Publisher for Hung {
    fn guarantees(&self) -> Guarantees {
        self.broker.guarantees()
    }

    async fn publish(&self, batch: Vec<Outgoing>) -> Vec<Outcome> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        self.free.subscribe().wait_for(|free| *free).await.expect("the sender is ours");
        let messages: Vec<Message> = batch.iter().map(|outgoing| (*outgoing.message).clone()).collect();
        self.stored.lock().expect("no panic").extend(messages);
        self.broker.publish(batch).await
    }
}

struct Bench {
    store: Arc<SqliteStore>,
    broker: Broker,
    hung: Arc<Hung>,
    _folder: tempfile::TempDir,
}

impl Bench {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let store = Arc::new(SqliteStore::open(folder.path().join("store.db")).expect("a store"));
        let broker = Broker::open(Config::new(folder.path().join("broker.db"))).expect("a broker");
        let (free, calls, stored) = (watch::Sender::new(false), AtomicUsize::new(0), Mutex::default());
        let hung = Arc::new(Hung { broker: broker.clone(), free, calls, stored });
        Self { store, broker, hung, _folder: folder }
    }

    /// A relay with two brokers: one hangs, one does not.
    fn relay(&self, settings: Settings) -> Running {
        let slow = Route::new("slow", &["slow"], self.hung.clone());
        let quick = Route::new("quick", &["quick"], Arc::new(self.broker.clone()));
        Relay::start(self.store.clone(), vec![slow, quick], settings)
    }

    /// Writes messages of all lanes.
    async fn write(&self, topic: &str, count: usize) -> Vec<MessageId> {
        let message = |n: usize| Message::new(topic, n.to_string()).key(format!("key {}", n % 50)).into();
        let results = self.store.append((0..count).map(message).collect()).await.expect("stored");
        let id = |result| match result {
            Ok(Appended::New(id) | Appended::Repeated(id)) => id,
            Err(turned) => panic!("{turned}"),
        };
        results.into_iter().map(id).collect()
    }

    async fn until(&self, what: &str, condition: impl AsyncFn(&SqliteStore) -> bool) {
        let started = Instant::now();
        while !condition(&self.store).await {
            assert!(started.elapsed() < Duration::from_secs(60), "{what} never came");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    async fn until_sent(&self, count: u64) {
        let what = format!("{count} sent messages");
        self.until(&what, async |store| store.counts().await.expect("counts").sent == count).await;
    }

    async fn until_it_hangs(&self, trains: usize) {
        self.until("a call to each train's share", async |_| {
            self.hung.calls.load(Ordering::SeqCst) >= trains
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_hangs_holds_up_nobody_else_and_keeps_its_keys_in_order() {
    const ROUNDS: usize = 100;
    let bench = Bench::new();
    let relay = bench.relay(Settings::default());
    bench.write("slow", 500).await;
    bench.until_it_hangs(2).await;

    let mut waits = Vec::new();
    for round in 1..=ROUNDS {
        // The bell of the one that hangs rings too.
        bench.write("slow", 1).await;
        let asked = Instant::now();
        bench.write("quick", 1).await;
        bench.until_sent(round as u64).await;
        waits.push(asked.elapsed());
    }
    waits.sort_unstable();
    let slowest = waits[ROUNDS * 99 / 100 - 1];
    assert!(slowest < Duration::from_secs(1), "99 of 100 came within {slowest:?}, while one broker hung");
    assert_eq!(bench.hung.calls.load(Ordering::SeqCst), 2, "it is not asked again before it has answered");
    assert!(relay.status().breakers.is_empty(), "it has not failed yet");

    bench.hung.free.send_replace(true);
    bench.until_sent(500 + 2 * ROUNDS as u64).await;
    let stored = bench.hung.stored.lock().expect("no panic").clone();
    assert_eq!(stored.len(), 500 + ROUNDS, "each once");
    for key in 0..50 {
        let key = Some(format!("key {key}"));
        let of_key = stored.iter().filter(|message| message.key == key);
        let numbers: Vec<usize> = of_key
            .map(|message| String::from_utf8_lossy(&message.payload).parse().expect("a number"))
            .collect();
        let first = &numbers[..10];
        assert!(first.is_sorted(), "{key:?}: {first:?}");
    }
    relay.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_does_not_wait_longer_than_it_may_for_a_broker_that_hangs() {
    const DRAIN: Duration = Duration::from_millis(500);
    let bench = Bench::new();
    let settings = Settings { drain: DRAIN, ..Settings::default() };
    let relay = bench.relay(settings.clone());
    let slow = bench.write("slow", 100).await;
    bench.until_it_hangs(2).await;
    let quick = bench.write("quick", 100).await;
    bench.until_sent(100).await;

    let asked = Instant::now();
    relay.drain().await;
    assert!(asked.elapsed() >= DRAIN, "it was given its time");
    assert!(asked.elapsed() < DRAIN + Duration::from_secs(10), "{:?}", asked.elapsed());
    assert!(bench.store.lanes().await.expect("lanes").iter().all(|lane| lane.owner.is_none()));
    for id in quick {
        let record = bench.store.record(id).await.expect("readable").expect("it is there");
        assert_eq!((record.state.status, record.state.crashes), (Status::Sent, 0));
    }

    // Whoever comes next finds what was left, and nothing else.
    bench.hung.free.send_replace(true);
    let next = bench.relay(settings);
    bench.until_sent(200).await;
    for id in slow {
        let record = bench.store.record(id).await.expect("readable").expect("it is there");
        assert_eq!((record.state.crashes, record.state.attempts), (1, 0));
    }
    next.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_backlog_for_one_broker_does_not_hide_what_goes_to_another() {
    let bench = Bench::new();
    // Far more than a turn claims, all written before.
    bench.write("slow", 5_000).await;
    bench.write("quick", 50).await;
    let relay = bench.relay(Settings { batch: 100, ..Settings::default() });
    bench.until_sent(50).await;
    assert!(bench.hung.stored.lock().expect("no panic").is_empty());
    drop(relay);
}

/// A broker that takes one message at a time and never answers.
struct Silent {
    broker: Broker,
    calls: AtomicUsize,
}

#[async_trait]
impl Publisher for Silent {
    fn guarantees(&self) -> Guarantees {
        Guarantees { max_batch: 1, ..self.broker.guarantees() }
    }

    async fn publish(&self, batch: Vec<Outgoing>) -> Vec<Outcome> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        vec![Outcome::Unreachable { error: "nobody is there".to_owned() }; batch.len()]
    }
}

/// A broker whose memory somebody else has set, and may change.
struct Forgetful {
    broker: Broker,
    window: watch::Sender<Duration>,
    calls: AtomicUsize,
}

#[async_trait]
impl Publisher for Forgetful {
    fn guarantees(&self) -> Guarantees {
        self.broker.guarantees()
    }

    async fn recognises(&self, horizon: Duration) -> Result<(), Outcome> {
        match *self.window.borrow() >= horizon {
            true => Ok(()),
            false => Err(Outcome::Misconfigured { error: "it forgets too early".to_owned() }),
        }
    }

    async fn publish(&self, batch: Vec<Outgoing>) -> Vec<Outcome> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        self.broker.publish(batch).await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_sent_to_a_broker_that_forgets_too_early_until_that_is_mended() {
    let hour = Duration::from_secs(3_600);
    let bench = Bench::new();
    bench.write("exact", 50).await;
    let (window, calls) = (watch::Sender::new(hour / 60), AtomicUsize::new(0));
    let forgetful = Arc::new(Forgetful { broker: bench.broker.clone(), window, calls });
    let exact = Route { recognised: Some(hour), ..Route::new("exact", &["exact"], forgetful.clone()) };
    let relay = Relay::start(bench.store.clone(), vec![exact], Settings::default());
    bench
        .until("the breaker", async |_| relay.status().breakers.iter().any(|found| found.misconfigured))
        .await;
    let told = relay.status().breakers.remove(0);
    assert_eq!((told.destination.as_str(), told.error.as_str()), ("topic exact", "it forgets too early"));
    assert_eq!(forgetful.calls.load(Ordering::SeqCst), 0);
    forgetful.window.send_replace(hour);
    bench.until_sent(50).await;
    relay.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_does_not_answer_is_not_asked_for_each_message_of_a_delivery() {
    let bench = Bench::new();
    bench.write("slow", 100).await;
    let silent = Arc::new(Silent { broker: bench.broker.clone(), calls: AtomicUsize::new(0) });
    let relay = Relay::start(
        bench.store.clone(),
        vec![Route::new("slow", &["slow"], silent.clone())],
        Settings::default(),
    );
    bench.until("the breaker", async |_| !relay.status().breakers.is_empty()).await;
    let calls = silent.calls.load(Ordering::SeqCst);
    assert!(calls <= 2, "{calls} calls, and one of each train tells enough");
    relay.drain().await;
}
