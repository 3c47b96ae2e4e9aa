//! A hybrid inbox: Redis answers "seen", SQL decides, and nothing depends on Redis.

use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use message::Message;
use redis::Commands;
use store::hybrid::{Config, Hybrid};
use store::sqlite::SqliteStore;
use store::{Append, Arrival, Handled, Inbox, InboxRules, Inspect, Receipt, Reservation, Work};
use tempfile::TempDir;
use uuid::Uuid;

/// Longer than anything here takes, however slow the machine.
const PATIENCE: Duration = Duration::from_secs(60);

const GROUP: &str = "billing";

/// A Redis of the test's own, that it may flush and stop.
struct Server {
    process: Option<Child>,
    folder: TempDir,
    port: u16,
}

impl Server {
    async fn start() -> Self {
        let port =
            TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a port").port();
        let mut server = Self { process: None, folder: TempDir::new().expect("a folder"), port };
        server.resume().await;
        server
    }

    async fn resume(&mut self) {
        let folder: &Path = self.folder.path();
        let process = Command::new("redis-server")
            .args(["--port", &self.port.to_string(), "--bind", "127.0.0.1", "--save", "", "--dir"])
            .arg(folder)
            .stdout(Stdio::null())
            .spawn()
            .expect("redis-server is installed");
        self.process = Some(process);
        let answers =
            || async { self.client().get_connection().is_ok_and(|mut redis| redis.ping::<String>().is_ok()) };
        assert!(testkit::eventually(PATIENCE, answers).await, "redis-server does not answer");
    }

    fn stop(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.kill().expect("it runs");
            process.wait().expect("it has ended");
        }
    }

    fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    fn client(&self) -> redis::Client {
        redis::Client::open(self.url()).expect("a URL")
    }

    fn flush(&self) {
        let mut redis = self.client().get_connection().expect("it runs");
        redis.flushall::<()>().expect("flushed");
    }

    /// How often a command was called.
    fn calls(&self, command: &str) -> u64 {
        let mut redis = self.client().get_connection().expect("it runs");
        let stats: String = redis::cmd("INFO").arg("commandstats").query(&mut redis).expect("counts");
        let line = stats.lines().find_map(|line| line.strip_prefix(&format!("cmdstat_{command}:calls=")));
        line.map_or(0, |line| line.split(',').next().and_then(|calls| calls.parse().ok()).expect("a number"))
    }

    /// The slices of time whose ids it knows.
    fn slices(&self) -> Vec<String> {
        self.client().get_connection().expect("it runs").keys("postrider:seen:ids:*").expect("keys")
    }

    /// How many ids it knows.
    fn seen(&self) -> usize {
        let mut redis = self.client().get_connection().expect("it runs");
        self.slices().iter().map(|slice| redis.hlen::<_, usize>(slice).expect("a hash")).sum()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

struct World {
    server: Server,
    sql: Arc<SqliteStore>,
    inbox: Hybrid,
    folder: TempDir,
}

impl World {
    async fn new() -> Self {
        let (server, folder) = (Server::start().await, TempDir::new().expect("a folder"));
        let sql = Arc::new(SqliteStore::open(folder.path().join("store.db")).expect("a store"));
        let inbox = hybrid(&sql, &server, "one");
        Self { server, sql, inbox, folder }
    }

    async fn process(&self, arrivals: &[Arrival]) -> Vec<Receipt> {
        let receipts = self.inbox.process(GROUP, arrivals.to_vec(), &Work::Mark, &rules()).await;
        self.noted().await;
        receipts.expect("an answer")
    }

    /// Redis is told while others go on; whoever asks it anything waits for that.
    async fn noted(&self) {
        self.inbox.inbox_counts(GROUP).await.expect("counts");
    }

    /// What SQL itself was asked about.
    async fn sql_counts(&self) -> (u64, u64) {
        let counts = self.sql.inbox_counts(GROUP).await.expect("counts");
        (counts.processed, counts.duplicates)
    }
}

fn hybrid(sql: &Arc<SqliteStore>, server: &Server, scope: &str) -> Hybrid {
    // Patient, so that a busy machine does not turn Redis into one that is away.
    let config = Config { patience: Duration::from_secs(10), ..Config::new(server.url(), scope) };
    Hybrid::new(sql.clone(), &config).expect("an inbox")
}

fn rules() -> InboxRules {
    InboxRules { acknowledge: false, ..InboxRules::default() }
}

fn arrivals(count: usize) -> Vec<Arrival> {
    let message = |n: usize| Message::new("orders", n.to_string()).key(format!("k{n}"));
    (0..count).map(|n| Arrival { message: message(n), seq: Some(1), delivery: 0 }).collect()
}

fn all(receipt: &Receipt, receipts: &[Receipt]) -> bool {
    receipts.iter().all(|given| given == receipt)
}

#[tokio::test]
async fn redis_is_asked_as_long_as_that_spares_the_store_anything() {
    let world = World::new().await;
    let asked = || world.server.calls("time");
    let first = arrivals(1);
    world.process(&first).await;
    for _ in 0..200 {
        world.inbox.process(GROUP, arrivals(1), &Work::Mark, &rules()).await.expect("an answer");
    }
    assert!(asked() < 40, "{} of 201 batches without a duplicate", asked());
    // Whoever recognises the first that comes again, Redis is asked about the next.
    assert!(all(&Receipt::Duplicate, &world.process(&first).await));
    let (_, known_to_sql) = world.sql_counts().await;
    for _ in 0..10 {
        assert!(all(&Receipt::Duplicate, &world.process(&first).await));
    }
    assert_eq!(world.sql_counts().await.1, known_to_sql, "SQL was not asked again");
}

#[tokio::test]
async fn what_was_seen_is_a_duplicate_without_a_look_into_sql_and_is_counted() {
    let world = World::new().await;
    let arrivals = arrivals(50);
    assert!(all(&Receipt::Done, &world.process(&arrivals).await));
    assert!(all(&Receipt::Duplicate, &world.process(&arrivals).await));
    let reserved = world.inbox.reserve(GROUP, arrivals.clone(), PATIENCE, &rules()).await.expect("an answer");
    assert!(reserved.iter().all(|answer| *answer == Reservation::Settled(Receipt::Duplicate)));
    assert_eq!(world.sql_counts().await, (50, 0), "SQL saw each of them once");
    let counts = world.inbox.inbox_counts(GROUP).await.expect("counts");
    assert_eq!((counts.processed, counts.duplicates), (50, 100));
    let elsewhere = hybrid(&world.sql, &world.server, "one");
    assert_eq!(elsewhere.inbox_counts(GROUP).await.expect("counts"), counts, "every process counts the same");
}

#[tokio::test]
async fn what_sql_recognised_is_not_noted_anew_while_redis_is_not_asked() {
    let world = World::new().await;
    let first = arrivals(1);
    world.process(&first).await;
    let noted = || {
        let mut redis = world.server.client().get_connection().expect("it runs");
        let slice = world.server.slices().pop().expect("something was noted");
        redis.hget::<_, _, Vec<u8>>(slice, first[0].message.id.0.as_bytes()).expect("the id")
    };
    let before = noted();
    let sql_knew = || async {
        let (_, known_to_sql) = world.sql_counts().await;
        for _ in 0..8 {
            world.inbox.process(GROUP, arrivals(1), &Work::Mark, &rules()).await.expect("an answer");
        }
        assert!(all(&Receipt::Duplicate, &world.process(&first).await));
        world.sql_counts().await.1 > known_to_sql
    };
    assert!(testkit::eventually(PATIENCE, sql_knew).await, "Redis is asked every time");
    assert_eq!(noted(), before, "it would be known for longer than SQL keeps it");
}

#[tokio::test]
async fn a_batch_of_old_and_new_is_answered_in_order() {
    let world = World::new().await;
    let arrivals = arrivals(9);
    let old: Vec<Arrival> = arrivals.iter().step_by(2).cloned().collect();
    world.process(&old).await;
    let receipts = world.process(&arrivals).await;
    for (n, receipt) in receipts.iter().enumerate() {
        assert_eq!(*receipt, if n % 2 == 0 { Receipt::Duplicate } else { Receipt::Done }, "{n}");
    }
}

#[tokio::test]
async fn a_flushed_redis_doubles_nothing_and_learns_again() {
    let world = World::new().await;
    let arrivals = arrivals(50);
    let mut done = 0;
    for round in 0..10 {
        let receipts = world.process(&arrivals[..5 * (round + 1)]).await;
        done += receipts.iter().filter(|receipt| **receipt == Receipt::Done).count();
        assert_eq!(done, 5 * (round + 1), "each is done once");
        world.server.flush();
    }
    assert_eq!(world.sql_counts().await.0, 50);
    let (_, before) = world.sql_counts().await;
    assert!(all(&Receipt::Duplicate, &world.process(&arrivals).await));
    assert!(all(&Receipt::Duplicate, &world.process(&arrivals).await));
    assert_eq!(world.sql_counts().await, (50, before + 50), "the second time Redis knew");
}

#[tokio::test]
async fn without_redis_sql_goes_on_alone() {
    let mut world = World::new().await;
    let arrivals = arrivals(20);
    assert!(all(&Receipt::Done, &world.process(&arrivals[..10]).await));
    world.server.stop();
    assert!(all(&Receipt::Duplicate, &world.process(&arrivals[..10]).await));
    assert!(all(&Receipt::Done, &world.process(&arrivals[10..]).await));
    assert!(all(&Receipt::Duplicate, &world.process(&arrivals).await));
    assert_eq!(world.sql_counts().await, (20, 30), "SQL decided");
    assert_eq!(world.inbox.inbox_counts(GROUP).await.expect("counts").duplicates, 30);

    world.server.resume().await;
    // It is left alone for a while first; in the end it learns what was done without it.
    let asked_again = || async {
        assert!(all(&Receipt::Duplicate, &world.process(&arrivals).await));
        world.server.seen() == 20
    };
    assert!(testkit::eventually(PATIENCE, asked_again).await, "Redis was never asked again");
    assert_eq!(world.sql_counts().await.0, 20);
}

#[tokio::test]
async fn only_what_is_committed_is_noted_as_seen() {
    let world = World::new().await;
    let (arrivals, rules) = (arrivals(1), rules());
    let reserve = || world.inbox.reserve(GROUP, arrivals.clone(), PATIENCE, &rules);
    let conclude =
        |token, handled| world.inbox.conclude(GROUP, vec![(arrivals[0].clone(), token, handled)], &rules);
    let Reservation::Granted(token) = reserve().await.expect("an answer").remove(0) else {
        panic!("it is free")
    };
    let down = Handled::Unavailable { error: "down".to_owned() };
    conclude(token, down).await.expect("an answer");
    world.noted().await;
    assert_eq!(world.server.seen(), 0);
    let Reservation::Granted(token) = reserve().await.expect("an answer").remove(0) else {
        panic!("it is free again")
    };
    assert_eq!(world.server.seen(), 0);
    assert_eq!(conclude(token, Handled::Done).await.expect("an answer"), [Receipt::Done]);
    world.noted().await;
    assert_eq!(world.server.seen(), 1);
    assert_eq!(reserve().await.expect("an answer"), [Reservation::Settled(Receipt::Duplicate)]);
}

#[tokio::test]
async fn an_id_that_returns_with_other_content_goes_to_sql_and_is_dead() {
    let world = World::new().await;
    let first = arrivals(1);
    world.process(&first).await;
    let mut other = first.clone();
    other[0].message.payload = "other".into();
    assert!(matches!(world.process(&other).await[0], Receipt::Dead { .. }));
    assert_eq!(world.process(&first).await, [Receipt::Duplicate]);
}

#[tokio::test]
async fn what_another_store_or_group_has_done_is_not_seen() {
    let world = World::new().await;
    let arrivals = arrivals(5);
    world.process(&arrivals).await;
    let path = world.folder.path().join("other.db");
    let other = Arc::new(SqliteStore::open(path).expect("a store"));
    let inbox = hybrid(&other, &world.server, "two");
    let receipts = inbox.process(GROUP, arrivals.clone(), &Work::Mark, &rules()).await.expect("an answer");
    assert!(all(&Receipt::Done, &receipts));
    let receipts = world.inbox.process("audit", arrivals, &Work::Mark, &rules()).await.expect("an answer");
    assert!(all(&Receipt::Done, &receipts));
}

#[tokio::test]
async fn what_was_seen_is_acknowledged_again_where_the_store_is_the_producers() {
    let world = World::new().await;
    let (arrivals, rules) = (arrivals(1), InboxRules::default());
    let process = || world.inbox.process(GROUP, arrivals.clone(), &Work::Mark, &rules);
    let acknowledged = || async {
        let record = world.sql.record(arrivals[0].message.id).await.expect("readable").expect("it is there");
        record.acknowledgements.len()
    };
    world.sql.append(vec![arrivals[0].message.clone().into()]).await.expect("stored");
    // The relay that sent it died before it could say so: nobody can acknowledge what was not sent.
    assert_eq!(process().await.expect("an answer"), [Receipt::Done]);
    assert_eq!(acknowledged().await, 0);
    let relay = testkit::store::Relay::with_all_lanes(world.sql.clone()).await;
    assert_eq!(relay.claim(1).await.len(), 1);
    assert_eq!(process().await.expect("an answer"), [Receipt::Duplicate]);
    assert_eq!(acknowledged().await, 1);
    assert_eq!(world.sql_counts().await, (1, 0));
}

#[tokio::test]
async fn ids_end_in_redis_when_the_group_no_longer_keeps_them() {
    let world = World::new().await;
    let (hour, first) = (Duration::from_secs(3_600), arrivals(1));
    world.inbox.forget_ids(GROUP, hour).await.expect("an answer");
    world.process(&first).await;
    let mut redis = world.server.client().get_connection().expect("it runs");
    let rest: i64 = redis.pttl(&world.server.slices()[0]).expect("a key");
    // The hour, what is left of the slice, and one more.
    assert!((3_600_000..=3_600_000 + 2 * 900_000).contains(&rest), "{rest}");

    let moment = Duration::from_millis(400);
    let again = || async {
        world.inbox.forget_ids(GROUP, moment).await.expect("an answer");
        world.process(&first).await == [Receipt::Done]
    };
    assert!(testkit::eventually(PATIENCE, again).await, "it is new once nobody keeps its id");
    let gone = || async {
        world.inbox.forget_ids(GROUP, moment).await.expect("an answer");
        world.noted().await;
        // That of the hour has its end; those of the moment go.
        world.server.slices().len() == 1
    };
    assert!(testkit::eventually(PATIENCE, gone).await, "{:?}", world.server.slices());
}

#[test]
fn what_could_never_work_is_refused_without_telling_a_password() {
    let folder = TempDir::new().expect("a folder");
    let sql = Arc::new(SqliteStore::open(folder.path().join("store.db")).expect("a store"));
    let refused = |config: Config| Hybrid::new(sql.clone(), &config).expect_err("refused").to_string();
    assert!(refused(Config::new("redis://h", "")).contains("scope"));
    let error = refused(Config::new("http://me:secret@h", Uuid::nil().to_string()));
    assert!(error.contains("redis://host") && !error.contains("secret"), "{error}");
    assert!(!format!("{:?}", Config::new("redis://me:secret@h", "one")).contains("secret"));
}
