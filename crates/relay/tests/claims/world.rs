//! A store, a Redis, destinations, and workers that die.

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
use relay::{Relay, Route, Running, Settings};
use store::sqlite::SqliteStore;
use store::{Append, Inspect, Record};
use uuid::Uuid;

/// Longer than anything here takes, however slow the machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Attempts that a message has here.
pub(crate) const LIMIT: u32 = 3;

/// What the destinations here promise: nothing that would matter.
pub(crate) const PLAIN: Guarantees = Guarantees {
    key_order: true,
    ordered_batches: false,
    groups: true,
    fenced: true,
    max_payload: None,
    max_batch: 100,
    deduplication: None,
    durability: "none",
    needs: &[],
};

/// A destination that remembers what it was asked, and when.
pub(crate) struct Destination {
    answer: Box<dyn Fn(&Message) -> Outcome + Send + Sync>,
    requests: Mutex<Vec<(MessageId, Instant)>>,
}

impl Destination {
    pub(crate) fn new(answer: impl Fn(&Message) -> Outcome + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Self { answer: Box::new(answer), requests: Mutex::default() })
    }

    pub(crate) fn requests(&self) -> Vec<(MessageId, Instant)> {
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
pub(crate) struct Abyss(pub(crate) PathBuf);

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
pub(crate) struct World {
    pub(crate) store: Arc<SqliteStore>,
    pub(crate) folder: tempfile::TempDir,
    pub(crate) claims: Config,
}

impl World {
    pub(crate) fn new(ttl: Duration) -> Self {
        Self::on(testkit::servers::url("redis"), ttl)
    }

    pub(crate) fn on(redis: String, ttl: Duration) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let store = Arc::new(SqliteStore::open(folder.path().join("store.db")).expect("a store"));
        let claims = Config { prefix: format!("test:{}:{{id}}", Uuid::new_v4()), ttl, ..Config::new(redis) };
        Self { store, folder, claims }
    }

    pub(crate) fn relay(&self, publisher: Arc<dyn Publisher>) -> Running {
        relay(self.store.clone(), publisher, &self.claims)
    }

    /// A relay in a process of its own that hangs while it sends. Answers when it does.
    pub(crate) fn dying_worker(&self) -> Worker {
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

    pub(crate) async fn write(&self, messages: Vec<Message>) -> Vec<MessageId> {
        let ids = messages.iter().map(|message| message.id).collect();
        self.store.append(messages.into_iter().map(Into::into).collect()).await.expect("stored");
        ids
    }

    pub(crate) async fn record(&self, id: MessageId) -> Record {
        self.store.record(id).await.expect("readable").expect("it is there")
    }

    pub(crate) async fn until(&self, id: MessageId, what: &str, so: impl Fn(&Record) -> bool) -> Record {
        testkit::within(PATIENCE, what, || async {
            let record = self.record(id).await;
            so(&record).then_some(record)
        })
        .await
    }

    pub(crate) async fn until_status(&self, id: MessageId, status: Status) -> Record {
        self.until(id, &format!("{status}"), |record| record.state.status == status).await
    }

    pub(crate) fn redis(&self) -> Connection {
        redis::Client::open(self.claims.url.as_str()).expect("a URL").get_connection().expect("Redis")
    }

    pub(crate) fn lock(&self, id: MessageId) -> String {
        self.claims.prefix.replace("{id}", &id.to_string())
    }

    /// Every key of this world.
    pub(crate) fn keys(&self) -> Vec<String> {
        self.redis().keys(self.claims.prefix.replace("{id}", "*")).expect("keys")
    }

    pub(crate) async fn until_no_keys(&self) {
        let gone = testkit::eventually(PATIENCE, || async { self.keys().is_empty() }).await;
        assert!(gone, "{:?} were left", self.keys());
    }

    pub(crate) fn counter(&self, id: MessageId) -> HashMap<String, String> {
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
pub(crate) struct Worker {
    child: Child,
    requests: PathBuf,
    before: usize,
}

impl Worker {
    pub(crate) async fn until_it_sends(&self) {
        let sends = testkit::eventually(PATIENCE, || async { lines(&self.requests) > self.before }).await;
        assert!(sends, "the worker never sent anything");
    }

    pub(crate) fn kill(self) {
        drop(self);
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.child.kill().expect("SIGKILL");
        self.child.wait().expect("it is dead");
    }
}

pub(crate) fn lines(file: &Path) -> usize {
    std::fs::read_to_string(file).map_or(0, |text| text.lines().count())
}

pub(crate) fn relay(store: Arc<SqliteStore>, publisher: Arc<dyn Publisher>, claims: &Config) -> Running {
    let soon = Duration::from_millis(1);
    let mut route = Route::new("main", &["*"], publisher);
    route.retry = RetryPolicy { first: soon, cap: soon, max_attempts: LIMIT, ..RetryPolicy::default() };
    let claims = Arc::new(RedisClaims::new(claims).expect("claims"));
    let settings = Settings { lease: Duration::from_secs(5), claims: Some(claims), ..Settings::default() };
    Relay::start(store, vec![route], settings)
}

pub(crate) fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a port").port()
}

/// A Redis of the test's own, that it may stop.
pub(crate) struct Server(Child);

impl Server {
    pub(crate) async fn start(port: u16, folder: &Path) -> Self {
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
