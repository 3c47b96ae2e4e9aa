//! A relay on a real SQLite store: what it does with each outcome, and what it leaves behind.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use broker::embedded::{Broker, Config};
use broker::{Guarantees, Outcome, Outgoing, Publisher};
use message::{Message, MessageId, OnDead, RetryPolicy, Status};
use relay::{Relay, Route, Running, Settings};
use store::sqlite::SqliteStore;
use store::{Amend, Append, Appended, Edit, Filter, Inspect, Lanes, Page, Record};

/// What a test wants the door to answer; nothing lets the message through.
type Answer = Box<dyn Fn(&Message) -> Option<Outcome> + Send + Sync>;

/// The embedded broker with a door that the test holds: what the door answers is answered without the broker.
struct Door {
    broker: Broker,
    ordered: bool,
    answer: Answer,
    passed: Mutex<Vec<Message>>,
}

#[async_trait]
impl Publisher for Door {
    fn guarantees(&self) -> Guarantees {
        Guarantees { ordered_batches: self.ordered, ..self.broker.guarantees() }
    }

    async fn publish(&self, batch: Vec<Outgoing>) -> Vec<Outcome> {
        let mut outcomes = Vec::new();
        for outgoing in batch {
            let outcome = match (self.answer)(&outgoing.message) {
                Some(outcome) => outcome,
                None => self.broker.publish(vec![outgoing.clone()]).await.remove(0),
            };
            if outcome == Outcome::Confirmed {
                self.passed.lock().expect("no panic").push(Arc::unwrap_or_clone(outgoing.message));
            }
            outcomes.push(outcome);
        }
        outcomes
    }
}

struct Bench {
    store: Arc<SqliteStore>,
    broker: Broker,
    _folder: tempfile::TempDir,
}

impl Bench {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let store = Arc::new(SqliteStore::open(folder.path().join("store.db")).expect("a store"));
        let config = Config { max_payload: 1_000, ..Config::new(folder.path().join("broker.db")) };
        Self { store, broker: Broker::open(config).expect("a broker"), _folder: folder }
    }

    fn door(&self, answer: impl Fn(&Message) -> Option<Outcome> + Send + Sync + 'static) -> Arc<Door> {
        let passed = Mutex::default();
        Arc::new(Door { broker: self.broker.clone(), ordered: false, answer: Box::new(answer), passed })
    }

    fn relay(&self, publisher: Arc<dyn Publisher>, change: impl FnOnce(&mut Route)) -> Running {
        let mut route = Route::new("main", &["*"], publisher);
        route.retry = RetryPolicy {
            first: Duration::from_millis(20),
            cap: Duration::from_millis(50),
            max_attempts: 3,
            ..RetryPolicy::default()
        };
        change(&mut route);
        let settings = Settings { lease: Duration::from_secs(5), ..Settings::default() };
        Relay::start(self.store.clone(), vec![route], settings)
    }

    async fn write(&self, messages: Vec<Message>) -> Vec<MessageId> {
        let results =
            self.store.append(messages.into_iter().map(Into::into).collect()).await.expect("stored");
        let id = |result| match result {
            Ok(Appended::New(id) | Appended::Repeated(id)) => id,
            Err(turned) => panic!("{turned}"),
        };
        results.into_iter().map(id).collect()
    }

    async fn record(&self, id: MessageId) -> Record {
        self.store.record(id).await.expect("readable").expect("it is there")
    }

    async fn until(&self, what: &str, condition: impl AsyncFn(&SqliteStore) -> bool) {
        let started = Instant::now();
        while !condition(&self.store).await {
            assert!(started.elapsed() < Duration::from_secs(20), "{what} never came");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    async fn until_sent(&self, count: u64) {
        let what = format!("{count} sent messages");
        self.until(&what, async |store| store.counts().await.expect("counts").sent == count).await;
    }
}

fn order(key: &str, n: usize) -> Message {
    Message::new("orders", format!("{{\"n\":{n}}}")).key(key)
}

fn texts(messages: &[Message]) -> Vec<String> {
    messages.iter().map(|message| String::from_utf8_lossy(&message.payload).into_owned()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_poison_message_is_dead_at_once_and_delays_nobody_but_its_key() {
    let bench = Bench::new();
    let mut messages: Vec<Message> = (0..1_000).map(|n| order(&format!("k{}", n % 50), n)).collect();
    let poison = Message::new("orders", vec![b'x'; 2_000]).key("poisoned");
    messages.insert(0, poison.clone());
    messages.extend((0..3).map(|n| order("poisoned", n)));
    let started = Instant::now();
    bench.write(messages).await;
    let relay = bench.relay(Arc::new(bench.broker.clone()), |_| {});
    bench.until_sent(1_000).await;
    assert!(started.elapsed() < Duration::from_secs(10), "the good ones took {:?}", started.elapsed());

    let dead = bench.record(poison.id).await;
    assert_eq!((dead.state.status, dead.state.attempts), (Status::Dead, 1));
    assert!(dead.dead_reason.expect("a reason").contains("Rejected"));
    bench
        .until("parked followers", async |store| {
            let held =
                store.list(&Filter { key: Some("poisoned".to_owned()), ..Filter::default() }, all()).await;
            held.expect("a list").items.iter().filter(|record| record.held).count() == 3
        })
        .await;
    let holds = bench.store.holds(10).await.expect("holds");
    assert_eq!((holds.len(), holds[0].id), (1, Some(poison.id)));

    // Mended, it goes first, and those behind it follow in order.
    let edit = Edit { payload: Some("{\"n\":\"mended\"}".into()), ..Edit::default() };
    bench.store.edit(poison.id, &edit, "test").await.expect("edited");
    bench.until_sent(1_004).await;
    assert!(bench.store.holds(10).await.expect("holds").is_empty());
    assert_eq!(bench.record(poison.id).await.state.delivery, 1);
    relay.drain().await;
}

fn all() -> Page {
    Page { after: None, limit: 1_000, newest_first: false }
}

#[tokio::test(flavor = "multi_thread")]
async fn followers_of_a_dead_message_come_in_order_after_it_is_requeued() {
    let bench = Bench::new();
    let broken = Arc::new(AtomicBool::new(true));
    let switch = broken.clone();
    let door = bench.door(move |message| {
        let bad = switch.load(Ordering::Relaxed) && message.payload.starts_with(b"{\"n\":0}");
        bad.then(|| Outcome::Rejected { error: "never".to_owned() })
    });
    let ids = bench.write((0..6).map(|n| order("k", n)).collect()).await;
    let relay = bench.relay(door.clone(), |_| {});
    bench.until("the dead one", async |store| store.counts().await.expect("counts").dead == 1).await;
    assert!(door.passed.lock().expect("no panic").is_empty());
    broken.store(false, Ordering::Relaxed);
    bench.store.requeue(ids[0], "test").await.expect("requeued");
    bench.until_sent(6).await;
    let passed = texts(&door.passed.lock().expect("no panic"));
    assert_eq!(passed, (0..6).map(|n| format!("{{\"n\":{n}}}")).collect::<Vec<_>>());
    relay.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn with_skip_the_followers_of_a_dead_message_pass() {
    let bench = Bench::new();
    let door = bench.door(|message| {
        message.payload.starts_with(b"{\"n\":0}").then(|| Outcome::Rejected { error: "never".to_owned() })
    });
    bench.write((0..6).map(|n| order("k", n)).collect()).await;
    let relay = bench.relay(door, |route| route.on_dead = OnDead::Skip);
    bench.until_sent(5).await;
    assert_eq!(bench.store.counts().await.expect("counts").dead, 1);
    relay.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_keeps_failing_is_dead_after_its_attempts_with_its_history() {
    let bench = Bench::new();
    let door = bench.door(|_| Some(Outcome::Deferred { error: "not now".to_owned(), after: None }));
    let ids = bench.write(vec![order("k", 0)]).await;
    let relay = bench.relay(door, |_| {});
    bench.until("the dead one", async |store| store.counts().await.expect("counts").dead == 1).await;
    let record = bench.record(ids[0]).await;
    assert_eq!(record.dead_reason.as_deref(), Some("MaxAttempts(3) exceeded"));
    assert_eq!((record.state.attempts, record.last_error.as_deref()), (3, Some("not now")));
    let attempts = bench.store.attempts(ids[0]).await.expect("history");
    let outcomes: Vec<&str> = attempts.iter().map(|attempt| attempt.outcome.as_str()).collect();
    assert_eq!(outcomes, ["failed", "failed", "dead"]);
    let counts = bench.store.counts().await.expect("counts");
    assert_eq!((counts.publish_failure_total, counts.dead_total), (3, 1));
    relay.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_destination_that_is_down_spends_no_attempts_and_is_drained_when_it_is_back() {
    let bench = Bench::new();
    let down = Arc::new(AtomicBool::new(true));
    let switch = down.clone();
    let door = bench.door(move |_| {
        let down = switch.load(Ordering::Relaxed);
        down.then(|| Outcome::Unreachable { error: "connection refused".to_owned() })
    });
    let ids = bench.write((0..300).map(|n| order(&format!("k{n}"), n)).collect()).await;
    let relay = bench.relay(door.clone(), |_| {});
    // Several probes in vain.
    bench
        .until("probes", async |store| {
            let counts = store.counts().await.expect("counts");
            counts.publish_failure_total > 300 || !relay.status().breakers.is_empty()
        })
        .await;
    assert_eq!(relay.status().breakers[0].destination, "broker main");
    for id in &ids {
        let record = bench.record(*id).await;
        assert_eq!(record.state.attempts, 0);
        assert!(matches!(record.state.status, Status::Pending | Status::InFlight));
    }
    down.store(false, Ordering::Relaxed);
    bench.until_sent(300).await;
    assert_eq!(bench.store.counts().await.expect("counts").dead, 0);
    relay.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_destination_that_goes_away_in_the_middle_of_a_batch_costs_no_attempt() {
    let bench = Bench::new();
    let left = Arc::new(AtomicUsize::new(40));
    let stock = left.clone();
    let door = bench.door(move |_| {
        let more = stock.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        more.is_err().then(|| Outcome::Unconfirmed { error: "connection lost".to_owned() })
    });
    let ids = bench.write((0..100).map(|n| order(&format!("k{n}"), n)).collect()).await;
    let relay = bench.relay(door.clone(), |_| {});
    bench.until("an open breaker", async |_| !relay.status().breakers.is_empty()).await;
    left.store(usize::MAX, Ordering::Relaxed);
    bench.until_sent(100).await;
    for id in ids {
        assert_eq!(bench.record(id).await.state.attempts, 0);
    }
    relay.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_goes_unanswered_again_and_again_while_others_are_answered_ends_in_dead() {
    let bench = Bench::new();
    let door = bench.door(|message| {
        let poison = message.key.as_deref() == Some("poison");
        poison.then(|| Outcome::Unconfirmed { error: "connection lost".to_owned() })
    });
    let ids = bench.write(vec![order("poison", 0)]).await;
    let relay = bench.relay(door.clone(), |_| {});
    let dead = async || bench.store.counts().await.expect("counts").dead == 1;
    while !dead().await {
        bench.write((0..20).map(|n| order(&format!("k{n}"), n)).collect()).await;
    }
    let record = bench.record(ids[0]).await;
    assert_eq!(record.dead_reason.as_deref(), Some("MaxAttempts(3) exceeded"));
    relay.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outage_longer_than_the_horizon_ends_in_dead() {
    let bench = Bench::new();
    let door = bench.door(|_| Some(Outcome::Unreachable { error: "connection refused".to_owned() }));
    let ids = bench.write((0..40).map(|n| order(&format!("k{n}"), n)).collect()).await;
    let relay = bench.relay(door, |route| route.retry.give_up_after = Duration::ZERO);
    bench.until("all dead", async |store| store.counts().await.expect("counts").dead == 40).await;
    let record = bench.record(ids[0]).await;
    assert!(record.dead_reason.expect("a reason").starts_with("GaveUpAfter"));
    assert_eq!(record.state.attempts, 0);
    relay.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_is_kept_in_order_through_random_failures_on_a_broker_that_may_reorder() {
    let bench = Bench::new();
    let door = bench.door(|_| {
        (RandomState::new().hash_one(0).is_multiple_of(10))
            .then(|| Outcome::Deferred { error: "try again".to_owned(), after: None })
    });
    bench.write((0..600).map(|n| order(&format!("k{}", n % 6), n)).collect()).await;
    let relay = bench.relay(door.clone(), |route| route.retry.max_attempts = 100);
    bench.until_sent(600).await;
    let passed = door.passed.lock().expect("no panic").clone();
    for key in 0..6 {
        let of_key: Vec<Message> =
            passed.iter().filter(|message| message.key == Some(format!("k{key}"))).cloned().collect();
        let expected: Vec<String> =
            (0..600).filter(|n| n % 6 == key).map(|n| format!("{{\"n\":{n}}}")).collect();
        assert_eq!(texts(&of_key), expected, "key k{key}");
    }
    relay.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_that_no_route_takes_waits_and_does_not_stop_the_others() {
    let bench = Bench::new();
    bench.write(vec![Message::new("unknown", "1"), Message::new("orders", "2")]).await;
    let relay = bench.relay(Arc::new(bench.broker.clone()), |route| {
        route.topics = vec![message::TopicPattern::new("orders")];
    });
    bench.until_sent(1).await;
    bench.until("the breaker", async |_| !relay.status().breakers.is_empty()).await;
    let counts = bench.store.counts().await.expect("counts");
    assert_eq!((counts.pending + counts.in_flight, counts.dead), (1, 0));
    assert_eq!(relay.status().breakers[0].destination, "topic unknown");
    relay.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_leaves_no_batch_no_lane_and_no_crash_behind() {
    let bench = Bench::new();
    let ids = bench.write((0..5_000).map(|n| order(&format!("k{}", n % 100), n)).collect()).await;
    let relay = bench.relay(Arc::new(bench.broker.clone()), |_| {});
    bench.until("some work", async |store| store.counts().await.expect("counts").sent > 0).await;
    relay.drain().await;
    let lanes = bench.store.lanes().await.expect("lanes");
    assert!(lanes.iter().all(|lane| lane.owner.is_none() && lane.in_flight == 0));
    assert_eq!(bench.store.counts().await.expect("counts").in_flight, 0);
    let next = bench.relay(Arc::new(bench.broker.clone()), |_| {});
    bench.until_sent(5_000).await;
    for id in ids.iter().step_by(500) {
        assert_eq!(bench.record(*id).await.state.crashes, 0);
    }
    next.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_number_of_lanes_changes_under_traffic_and_keeps_order() {
    let bench = Bench::new();
    let door = bench.door(|_| None);
    let relay = bench.relay(door.clone(), |_| {});
    for round in 0..4 {
        bench.write((0..500).map(|n| order(&format!("k{}", n % 5), round * 500 + n)).collect()).await;
        let count = [4, 64, 1, 16][round];
        bench.store.set_lanes(count).await.expect("a power of two");
        bench
            .until("the new number", async |store| {
                store.lanes().await.expect("lanes").len() == usize::from(count)
            })
            .await;
    }
    bench.until_sent(2_000).await;
    let passed = door.passed.lock().expect("no panic").clone();
    assert_eq!(passed.len(), 2_000);
    for key in 0..5 {
        let of_key: Vec<Message> =
            passed.iter().filter(|message| message.key == Some(format!("k{key}"))).cloned().collect();
        let expected: Vec<String> =
            (0..2_000).filter(|n| n % 5 == key).map(|n| format!("{{\"n\":{n}}}")).collect();
        assert_eq!(texts(&of_key), expected, "key k{key}");
    }
    relay.drain().await;
}

/// A broker that takes its time, or falls over, before it does what the embedded one does.
struct Slow {
    broker: Broker,
    each: Duration,
    panics: Mutex<u32>,
    calls: Mutex<Vec<Message>>,
}

#[async_trait]
impl Publisher for Slow {
    fn guarantees(&self) -> Guarantees {
        Guarantees { ordered_batches: false, ..self.broker.guarantees() }
    }

    async fn publish(&self, batch: Vec<Outgoing>) -> Vec<Outcome> {
        let panics = {
            let mut left = self.panics.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            let panics = *left > 0;
            *left = left.saturating_sub(1);
            panics
        };
        assert!(!panics, "on purpose");
        tokio::time::sleep(self.each).await;
        self.calls.lock().expect("no panic").extend(batch.iter().map(|outgoing| (*outgoing.message).clone()));
        self.broker.publish(batch).await
    }
}

fn slow(bench: &Bench, each: Duration, panics: u32) -> Arc<Slow> {
    let (panics, calls) = (Mutex::new(panics), Mutex::default());
    Arc::new(Slow { broker: bench.broker.clone(), each, panics, calls })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_that_takes_longer_than_the_lease_is_sent_once_while_the_lease_is_renewed() {
    let bench = Bench::new();
    let slow = slow(&bench, Duration::from_millis(100), 0);
    // One key: one call after another, three seconds in all, under a lease of one.
    let ids = bench.write((0..30).map(|n| order("k", n)).collect()).await;
    let route = Route::new("main", &["*"], slow.clone());
    let settings = Settings { lease: Duration::from_secs(1), ..Settings::default() };
    let relay = Relay::start(bench.store.clone(), vec![route], settings);
    bench.until_sent(30).await;
    assert_eq!(slow.calls.lock().expect("no panic").len(), 30, "nothing was sent twice");
    for id in ids {
        assert_eq!(bench.record(id).await.state.attempts, 0);
    }
    relay.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publisher_that_panics_stops_nothing_for_good() {
    let bench = Bench::new();
    let slow = slow(&bench, Duration::ZERO, 3);
    bench.write((0..100).map(|n| order(&format!("k{n}"), n)).collect()).await;
    let relay = bench.relay(slow, |_| {});
    bench.until_sent(100).await;
    relay.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_whose_code_panics_gives_up_its_lanes_and_goes_on() {
    let bench = Bench::new();
    bench.write((0..100).map(|n| order(&format!("k{n}"), n)).collect()).await;
    let panics = std::sync::atomic::AtomicU32::new(2);
    let groups = move |_: &str| {
        assert!(
            panics.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_err()
        );
        Vec::new()
    };
    let settings =
        Settings { lease: Duration::from_secs(3), groups: Arc::new(groups), ..Settings::default() };
    let route = Route::new("main", &["*"], Arc::new(bench.broker.clone()));
    let relay = Relay::start(bench.store.clone(), vec![route], settings);
    bench.until_sent(100).await;
    relay.drain().await;
}
