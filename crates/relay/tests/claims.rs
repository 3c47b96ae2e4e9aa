//! Claims in Redis: what is locked, counted and given back, and what a worker leaves that died.
//!
//! Workers that die are processes of their own, killed while they send: this file runs itself again for them.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::HashMap;
use std::fs::OpenOptions;
use std::io::Write;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use broker::{Guarantees, Outcome, Outgoing, Publisher};
use message::{Message, MessageId, RetryPolicy, Status};
use redis::{Commands, Connection};
use relay::claims::redis::{Config, RedisClaims};
use relay::claims::{Answer, Claims, End, Over, Wanted};
use relay::{Relay, Route, Running, Settings};
use store::sqlite::SqliteStore;
use store::{Amend, Append, Inspect, Record};
use uuid::Uuid;

/// Longer than anything here takes, however slow the machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Attempts that a message has here.
const LIMIT: u32 = 3;

/// What the destinations here promise: nothing that would matter.
const PLAIN: Guarantees = Guarantees {
    ordered_batches: false,
    max_payload: None,
    max_batch: 100,
    deduplication: None,
    durability: "none",
};

/// A destination that remembers what it was asked, and when.
struct Destination {
    answer: Box<dyn Fn(&Message) -> Outcome + Send + Sync>,
    requests: Mutex<Vec<(MessageId, Instant)>>,
}

impl Destination {
    fn new(answer: impl Fn(&Message) -> Outcome + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Self { answer: Box::new(answer), requests: Mutex::default() })
    }

    fn requests(&self) -> Vec<(MessageId, Instant)> {
        self.requests.lock().expect("no panic").clone()
    }
}

#[async_trait]
impl Publisher for Destination {
    fn guarantees(&self) -> Guarantees {
        PLAIN
    }

    async fn publish(&self, batch: Vec<Outgoing>) -> Vec<Outcome> {
        let now = Instant::now();
        self.requests.lock().expect("no panic").extend(batch.iter().map(|out| (out.message.id, now)));
        batch.iter().map(|out| (self.answer)(&out.message)).collect()
    }
}

/// A destination that never answers; what it was asked is in a file.
struct Abyss(PathBuf);

#[async_trait]
impl Publisher for Abyss {
    fn guarantees(&self) -> Guarantees {
        PLAIN
    }

    async fn publish(&self, batch: Vec<Outgoing>) -> Vec<Outcome> {
        let mut file = OpenOptions::new().create(true).append(true).open(&self.0).expect("a file");
        for out in &batch {
            writeln!(file, "{}", out.message.id).expect("written");
        }
        std::future::pending().await
    }
}

/// A store in a folder, and keys of its own in Redis.
struct World {
    store: Arc<SqliteStore>,
    folder: tempfile::TempDir,
    claims: Config,
}

impl World {
    fn new(ttl: Duration) -> Self {
        Self::on(testkit::servers::url("redis"), ttl)
    }

    fn on(redis: String, ttl: Duration) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let store = Arc::new(SqliteStore::open(folder.path().join("store.db")).expect("a store"));
        let claims = Config { prefix: format!("test:{}:{{id}}", Uuid::new_v4()), ttl, ..Config::new(redis) };
        Self { store, folder, claims }
    }

    fn relay(&self, publisher: Arc<dyn Publisher>) -> Running {
        relay(self.store.clone(), publisher, &self.claims)
    }

    /// A relay in a process of its own that hangs while it sends. Answers when it does.
    fn dying_worker(&self) -> Worker {
        let requests = self.folder.path().join("requests");
        let before = lines(&requests);
        let child = Command::new(std::env::current_exe().expect("a path"))
            .args(["--exact", "a_worker_in_a_process_of_its_own", "--ignored", "--nocapture"])
            .env("CLAIMS_STORE", self.folder.path().join("store.db"))
            .env("CLAIMS_REQUESTS", &requests)
            .env("CLAIMS_REDIS", &self.claims.url)
            .env("CLAIMS_PREFIX", &self.claims.prefix)
            .env("CLAIMS_TTL", self.claims.ttl.as_millis().to_string())
            .stdout(Stdio::null())
            .spawn()
            .expect("a process");
        Worker { child, requests, before }
    }

    async fn write(&self, messages: Vec<Message>) -> Vec<MessageId> {
        let ids = messages.iter().map(|message| message.id).collect();
        self.store.append(messages.into_iter().map(Into::into).collect()).await.expect("stored");
        ids
    }

    async fn record(&self, id: MessageId) -> Record {
        self.store.record(id).await.expect("readable").expect("it is there")
    }

    async fn until(&self, id: MessageId, what: &str, so: impl Fn(&Record) -> bool) -> Record {
        testkit::within(PATIENCE, what, || async {
            let record = self.record(id).await;
            so(&record).then_some(record)
        })
        .await
    }

    async fn until_status(&self, id: MessageId, status: Status) -> Record {
        self.until(id, &format!("{status}"), |record| record.state.status == status).await
    }

    fn redis(&self) -> Connection {
        redis::Client::open(self.claims.url.as_str()).expect("a URL").get_connection().expect("Redis")
    }

    fn lock(&self, id: MessageId) -> String {
        self.claims.prefix.replace("{id}", &id.to_string())
    }

    /// Every key of this world.
    fn keys(&self) -> Vec<String> {
        self.redis().keys(self.claims.prefix.replace("{id}", "*")).expect("keys")
    }

    async fn until_no_keys(&self) {
        let gone = testkit::eventually(PATIENCE, || async { self.keys().is_empty() }).await;
        assert!(gone, "{:?} were left", self.keys());
    }

    fn counter(&self, id: MessageId) -> HashMap<String, String> {
        self.redis().hgetall(format!("{}:attempts", self.lock(id))).expect("a hash")
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if let Ok(mut redis) = redis::Client::open(self.claims.url.as_str()).and_then(|c| c.get_connection())
        {
            for key in
                redis.keys::<_, Vec<String>>(self.claims.prefix.replace("{id}", "*")).unwrap_or_default()
            {
                let _: Result<(), _> = redis.del(key);
            }
        }
    }
}

/// A process that will not end well.
struct Worker {
    child: Child,
    requests: PathBuf,
    before: usize,
}

impl Worker {
    async fn until_it_sends(&self) {
        let sends = testkit::eventually(PATIENCE, || async { lines(&self.requests) > self.before }).await;
        assert!(sends, "the worker never sent anything");
    }

    fn kill(self) {
        drop(self);
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.child.kill().expect("SIGKILL");
        self.child.wait().expect("it is dead");
    }
}

fn lines(file: &Path) -> usize {
    std::fs::read_to_string(file).map_or(0, |text| text.lines().count())
}

fn relay(store: Arc<SqliteStore>, publisher: Arc<dyn Publisher>, claims: &Config) -> Running {
    let soon = Duration::from_millis(1);
    let mut route = Route::new("main", &["*"], publisher);
    route.retry = RetryPolicy { first: soon, cap: soon, max_attempts: LIMIT, ..RetryPolicy::default() };
    let claims = Arc::new(RedisClaims::new(claims).expect("claims"));
    let settings = Settings { lease: Duration::from_secs(5), claims: Some(claims), ..Settings::default() };
    Relay::start(store, vec![route], settings)
}

/// What [`World::dying_worker`] runs.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "a process that others start and kill"]
async fn a_worker_in_a_process_of_its_own() {
    let given =
        |name: &str| std::env::var(name).unwrap_or_else(|_| panic!("{name} is set by whoever starts it"));
    let store = Arc::new(SqliteStore::open(given("CLAIMS_STORE")).expect("a store"));
    let claims = Config {
        prefix: given("CLAIMS_PREFIX"),
        ttl: Duration::from_millis(given("CLAIMS_TTL").parse().expect("milliseconds")),
        ..Config::new(given("CLAIMS_REDIS"))
    };
    let _relay = relay(store, Arc::new(Abyss(given("CLAIMS_REQUESTS").into())), &claims);
    std::future::pending::<()>().await;
}

fn order(key: &str) -> Message {
    Message::new("orders", "{}").key(key)
}

fn deferred() -> Outcome {
    Outcome::Deferred { error: "not now".to_owned(), after: None }
}

#[tokio::test(flavor = "multi_thread")]
async fn while_it_is_sent_a_message_is_locked_and_afterwards_it_is_sent_and_has_no_key() {
    let world = World::new(Duration::from_secs(60));
    let (claims, seen) = (world.claims.clone(), Arc::new(Mutex::new(Vec::new())));
    let looked = seen.clone();
    let destination = Destination::new(move |message| {
        let mut redis = redis::Client::open(claims.url.as_str()).unwrap().get_connection().unwrap();
        let lock = claims.prefix.replace("{id}", &message.id.to_string());
        let value: Option<String> = redis.get(&lock).unwrap();
        let counter: Option<String> = redis.hget(format!("{lock}:attempts"), "attempts").unwrap();
        let (rest, keep): (i64, i64) =
            (redis.pttl(&lock).unwrap(), redis.pttl(format!("{lock}:attempts")).unwrap());
        looked.lock().unwrap().push((value, counter, rest, keep));
        Outcome::Confirmed
    });
    let ids = world.write((0..20).map(|n| order(&format!("k{n}"))).collect()).await;
    let relay = world.relay(destination.clone());
    for id in &ids {
        world.until_status(*id, Status::Sent).await;
    }
    world.until_no_keys().await;
    relay.drain().await;
    assert_eq!(destination.requests().len(), 20);
    for (value, counter, rest, keep) in seen.lock().expect("no panic").iter() {
        assert_eq!((value.as_deref(), counter.as_deref()), (Some("1"), Some("1")));
        assert!((1..=60_000).contains(rest), "{rest}");
        assert!(*keep > 6 * 24 * 3_600_000, "{keep}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_of_a_worker_that_was_killed_is_sent_again_when_its_lock_ends_and_not_before() {
    let world = World::new(Duration::from_secs(3));
    let ids = world.write(vec![order("k"), order("k")]).await;
    let worker = world.dying_worker();
    worker.until_it_sends().await;
    worker.kill();
    let (looked_at, rest) =
        (Instant::now(), world.redis().pttl::<_, i64>(world.lock(ids[0])).expect("a lock"));
    assert!(rest > 0, "the lock is there: {rest}");

    let destination = Destination::new(|_| Outcome::Confirmed);
    let relay = world.relay(destination.clone());
    let waiting = world.until_status(ids[0], Status::Failed).await;
    assert_eq!(waiting.state.attempts, 1, "the attempt of the dead one counts");
    assert!(waiting.last_error.expect("an error").contains("another worker held its lock"));
    for id in &ids {
        world.until_status(*id, Status::Sent).await;
    }
    let requests = destination.requests();
    assert_eq!(requests.iter().map(|(id, _)| *id).collect::<Vec<_>>(), ids, "once each, in order");
    let ended = looked_at + Duration::from_millis(u64::try_from(rest).expect("positive"));
    assert!(requests[0].1 >= ended, "sent {:?} too early", ended.duration_since(requests[0].1));
    assert_eq!(world.record(ids[0]).await.state.attempts, 1);
    world.until_no_keys().await;
    relay.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_attempt_of_which_only_the_count_is_left_is_counted_in_the_store_too() {
    let world = World::new(Duration::from_millis(200));
    let ids = world.write(vec![order("k")]).await;
    let worker = world.dying_worker();
    worker.until_it_sends().await;
    worker.kill();
    let ended = || async { !world.redis().exists::<_, bool>(world.lock(ids[0])).expect("Redis") };
    assert!(testkit::eventually(PATIENCE, ended).await);
    assert_eq!(world.counter(ids[0])["attempts"], "1", "it outlives the lock");

    let destination = Destination::new(|_| Outcome::Confirmed);
    let relay = world.relay(destination.clone());
    let sent = world.until_status(ids[0], Status::Sent).await;
    assert_eq!((sent.state.attempts, destination.requests().len()), (1, 1));
    world.until_no_keys().await;
    relay.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn after_three_failures_it_is_dead_without_a_fourth_request_and_both_agree() {
    let world = World::new(Duration::from_secs(60));
    let ids = world.write(vec![order("k")]).await;
    let destination = Destination::new(|_| deferred());
    let relay = world.relay(destination.clone());
    world.until(ids[0], "a failure", |record| record.state.attempts == 1).await;
    let dead = world.until_status(ids[0], Status::Dead).await;
    assert_eq!((dead.state.attempts, destination.requests().len()), (LIMIT, 3));
    assert_eq!(dead.dead_reason.as_deref(), Some("MaxAttempts(3) exceeded"));
    world.until_no_keys().await;

    // A person sends it again: that is a life of its own.
    world.store.requeue(ids[0], "test").await.expect("requeued");
    let again = |record: &Record| record.state.status == Status::Dead && record.state.delivery == 1;
    let dead = world.until(ids[0], "dead again", again).await;
    assert_eq!((dead.state.attempts, destination.requests().len()), (LIMIT, 6));
    world.until_no_keys().await;
    relay.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn after_three_crashes_of_its_workers_it_is_dead_without_a_fourth_request_and_both_agree() {
    let world = World::new(Duration::from_millis(500));
    let ids = world.write(vec![order("k")]).await;
    for crash in 1..=3 {
        let worker = world.dying_worker();
        worker.until_it_sends().await;
        assert_eq!(world.counter(ids[0])["attempts"], crash.to_string());
        worker.kill();
    }
    let destination = Destination::new(|_| Outcome::Confirmed);
    let relay = world.relay(destination.clone());
    let dead = world.until_status(ids[0], Status::Dead).await;
    assert_eq!(dead.dead_reason.as_deref(), Some("MaxAttempts(3) exceeded"));
    assert_eq!(dead.state.attempts, LIMIT);
    assert!(destination.requests().is_empty(), "no fourth request");
    assert_eq!(lines(&world.folder.path().join("requests")), 3);
    world.until_no_keys().await;
    relay.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lock_that_somebody_else_has_keeps_its_message_and_its_key_and_nobody_else() {
    let world = World::new(Duration::from_secs(60));
    let ids = world.write(vec![order("k"), order("k"), order("other")]).await;
    let _: () = world.redis().pset_ex(world.lock(ids[0]), "1", 1_500).expect("a lock");
    let locked_at = Instant::now();
    let destination = Destination::new(|_| Outcome::Confirmed);
    let relay = world.relay(destination.clone());
    world.until_status(ids[2], Status::Sent).await;
    assert_eq!(destination.requests().len(), 1, "those of the key wait");
    for id in &ids[..2] {
        world.until_status(*id, Status::Sent).await;
    }
    let requests = destination.requests();
    assert_eq!(requests.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [ids[2], ids[0], ids[1]]);
    assert!(requests[1].1.duration_since(locked_at) >= Duration::from_millis(1_400));
    world.until_no_keys().await;
    relay.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_destination_that_is_down_leaves_no_lock_and_spends_no_attempt_anywhere() {
    let world = World::new(Duration::from_secs(60));
    let ids = world.write(vec![order("k")]).await;
    let destination = Destination::new(|_| Outcome::Unreachable { error: "refused".to_owned() });
    let relay = world.relay(destination.clone());
    let probed = || async { destination.requests().len() >= 2 };
    assert!(testkit::eventually(PATIENCE, probed).await);
    world.until_no_keys().await;
    relay.drain().await;
    assert_eq!(world.record(ids[0]).await.state.attempts, 0);
    assert_eq!(world.keys(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_message_waits_without_a_lock_and_with_its_count() {
    let world = World::new(Duration::from_secs(60));
    let ids = world.write(vec![order("k")]).await;
    let wait = Duration::from_secs(3_600);
    let destination =
        Destination::new(move |_| Outcome::Deferred { error: "later".to_owned(), after: Some(wait) });
    let relay = world.relay(destination.clone());
    world.until_status(ids[0], Status::Failed).await;
    let counter = format!("{}:attempts", world.lock(ids[0]));
    let kept = testkit::eventually(PATIENCE, || async { world.keys() == [counter.clone()] }).await;
    assert!(kept, "{:?}", world.keys());
    assert_eq!(world.counter(ids[0])["attempts"], "1");
    relay.drain().await;
}

/// One exchange for one message.
async fn want(claims: &RedisClaims, id: MessageId, owner: Uuid, delivery: u32, attempts: u32) -> Answer {
    let wanted = [Wanted { id, owner, delivery, attempts }];
    claims.exchange(&[], &wanted).await.expect("an answer").remove(0)
}

async fn give_back(claims: &RedisClaims, id: MessageId, owner: Uuid, end: End) {
    claims.exchange(&[Over { id, owner, end }], &[]).await.expect("an answer");
}

fn is_held_by(answer: Answer, whom: Uuid) -> bool {
    matches!(answer, Answer::Held { owner: Some(owner), rest: Some(_) } if owner == whom)
}

#[tokio::test]
async fn only_its_owner_gives_a_lock_back_however_often_he_says_so() {
    let world = World::new(Duration::from_secs(60));
    let claims = RedisClaims::new(&world.claims).expect("claims");
    let (id, mine, other) = (MessageId::new(), Uuid::new_v4(), Uuid::new_v4());
    assert_eq!(want(&claims, id, mine, 0, 0).await, Answer::Locked);
    for end in [End::Finished, End::Failed, End::Released] {
        give_back(&claims, id, other, end).await;
    }
    assert!(is_held_by(want(&claims, id, other, 0, 0).await, mine));
    give_back(&claims, id, mine, End::Failed).await;
    assert_eq!(want(&claims, id, other, 0, 1).await, Answer::Locked);
    // The answer to the first time was lost.
    give_back(&claims, id, mine, End::Failed).await;
    assert!(is_held_by(want(&claims, id, mine, 0, 1).await, other));
}

#[tokio::test]
async fn what_is_released_was_never_counted() {
    let world = World::new(Duration::from_secs(60));
    let claims = RedisClaims::new(&world.claims).expect("claims");
    let (id, batch) = (MessageId::new(), Uuid::new_v4());
    for _ in 0..5 {
        assert_eq!(want(&claims, id, batch, 0, 1).await, Answer::Locked);
        assert_eq!(world.redis().get::<_, String>(world.lock(id)).expect("a lock"), "2");
        give_back(&claims, id, batch, End::Released).await;
    }
    assert_eq!(world.counter(id)["attempts"], "1");
}

#[tokio::test]
async fn a_lock_whose_attempt_the_store_has_settled_holds_nobody() {
    let world = World::new(Duration::from_secs(60));
    let claims = RedisClaims::new(&world.claims).expect("claims");
    let (id, dead, next) = (MessageId::new(), Uuid::new_v4(), Uuid::new_v4());
    // The worker settled a failure and died before it gave the lock back.
    assert_eq!(want(&claims, id, dead, 0, 0).await, Answer::Locked);
    assert_eq!(want(&claims, id, next, 0, 1).await, Answer::Locked);
    assert_eq!(world.redis().get::<_, String>(world.lock(id)).expect("a lock"), "2");
    // So it is with one that a person sends again, and only with a later delivery.
    assert!(is_held_by(want(&claims, id, dead, 0, 1).await, next));
    assert_eq!(want(&claims, id, dead, 1, 0).await, Answer::Locked);
    assert_eq!((&*world.counter(id)["attempts"], &*world.counter(id)["delivery"]), ("1", "1"));
}

#[tokio::test]
async fn keys_of_others_break_nothing_and_a_lock_without_an_end_gets_one() {
    let world = World::new(Duration::from_millis(300));
    let claims = RedisClaims::new(&world.claims).expect("claims");
    let (id, batch) = (MessageId::new(), Uuid::new_v4());
    let _: () = world.redis().set(format!("{}:attempts", world.lock(id)), "text").expect("a key");
    let _: () = world.redis().set(world.lock(id), "1").expect("a lock");
    give_back(&claims, id, batch, End::Finished).await;
    assert!(matches!(want(&claims, id, batch, 0, 0).await, Answer::Held { owner: None, rest: Some(_) }));
    let ended = || async { want(&claims, id, batch, 0, 0).await == Answer::Locked };
    assert!(testkit::eventually(PATIENCE, ended).await);
}

#[tokio::test]
async fn a_batch_of_any_size_is_exchanged_in_order_and_a_lost_script_is_loaded_again() {
    let (port, folder) = (free_port(), tempfile::tempdir().expect("a folder"));
    let _server = Server::start(port, folder.path()).await;
    let world = World::on(format!("redis://127.0.0.1:{port}"), Duration::from_secs(60));
    let claims = RedisClaims::new(&world.claims).expect("claims");
    let owner = Uuid::new_v4();
    let ids: Vec<MessageId> = (0..2_500).map(|_| MessageId::new()).collect();
    let wanted: Vec<Wanted> =
        ids.iter().map(|id| Wanted { id: *id, owner, delivery: 0, attempts: 0 }).collect();
    let held = want(&claims, ids[1_234], Uuid::nil(), 0, 0).await;
    assert_eq!(held, Answer::Locked);
    let _: () = redis::cmd("SCRIPT").arg("FLUSH").query(&mut world.redis()).expect("flushed");
    let answers = claims.exchange(&[], &wanted).await.expect("answers");
    assert_eq!(answers.len(), 2_500);
    assert!(is_held_by(answers[1_234], Uuid::nil()));
    assert_eq!(answers.iter().filter(|answer| **answer == Answer::Locked).count(), 2_499);
    let mut over: Vec<Over> = ids.iter().map(|id| Over { id: *id, owner, end: End::Finished }).collect();
    over[1_234].owner = Uuid::nil();
    assert_eq!(claims.exchange(&over, &wanted[..3]).await.expect("answers"), [Answer::Locked; 3]);
    assert_eq!(world.keys().len(), 6);
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a port").port()
}

/// A Redis of the test's own, that it may stop.
struct Server(Child);

impl Server {
    async fn start(port: u16, folder: &Path) -> Self {
        let server = Command::new("redis-server")
            .args([
                "--port",
                &port.to_string(),
                "--bind",
                "127.0.0.1",
                "--save",
                "",
                "--appendonly",
                "yes",
                "--dir",
            ])
            .arg(folder)
            .stdout(Stdio::null())
            .spawn()
            .expect("redis-server is installed");
        let client = redis::Client::open(format!("redis://127.0.0.1:{port}")).expect("a URL");
        let answers =
            || async { client.get_connection().is_ok_and(|mut redis| redis.ping::<String>().is_ok()) };
        assert!(testkit::eventually(PATIENCE, answers).await, "redis-server does not answer");
        Self(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.0.kill().expect("it runs");
        self.0.wait().expect("it has ended");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn while_redis_is_away_nothing_is_sent_and_nothing_spent_and_all_flows_when_it_is_back() {
    let port = free_port();
    let world = World::on(format!("redis://127.0.0.1:{port}"), Duration::from_secs(60));
    let ids = world.write((0..200).map(|n| order(&format!("k{n}"))).collect()).await;
    let destination = Destination::new(|_| Outcome::Confirmed);
    let relay = world.relay(destination.clone());
    let away =
        || async { relay.status().breakers.iter().any(|view| view.open && view.destination == "claims") };
    assert!(testkit::eventually(PATIENCE, away).await);
    let server = Server::start(port, world.folder.path()).await;
    for id in &ids {
        let record = world.until_status(*id, Status::Sent).await;
        assert_eq!(record.state.attempts, 0);
    }
    assert_eq!(destination.requests().len(), 200, "once each");
    world.until_no_keys().await;

    drop(server);
    let ids = world.write((0..200).map(|n| order(&format!("k{n}"))).collect()).await;
    assert!(testkit::eventually(PATIENCE, away).await);
    assert_eq!(destination.requests().len(), 200, "nothing is sent without its lock");
    let _server = Server::start(port, world.folder.path()).await;
    for id in &ids {
        assert_eq!(world.until_status(*id, Status::Sent).await.state.attempts, 0);
    }
    assert_eq!(destination.requests().len(), 400);
    world.until_no_keys().await;
    relay.drain().await;
}
