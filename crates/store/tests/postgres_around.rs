//! What stands around the store: a pooler in between, or a replica in the primary's place.

#![cfg(feature = "postgres")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

mod postgres_server;

use std::collections::BTreeMap;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use message::Message;
use store::postgres::{Config, PostgresStore};
use store::{Arrival, InboxRules, Receipt, Store, Work};
use tempfile::TempDir;
use testkit::store::{Relay, sent};
use testkit::within;

use postgres_server::{Database, server};

const PATIENCE: Duration = Duration::from_secs(30);

/// A server of this test's own, which ends with it.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // It is gone, or will be: nothing else is to be done about it here.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A command that runs as the user `postgres` where this one is root, whom neither server serves.
fn command(program: &Path) -> Command {
    let mut command = Command::new(program);
    let id = |flag: &str, user: &str| -> u32 {
        let found = Command::new("id").args([flag, user]).output().unwrap();
        String::from_utf8(found.stdout).unwrap().trim().parse().unwrap()
    };
    let own = Command::new("id").arg("-u").output().unwrap().stdout;
    if own == b"0\n" {
        command.uid(id("-u", "postgres")).gid(id("-g", "postgres"));
    }
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command
}

/// A folder that another user may use.
fn folder() -> TempDir {
    let folder = TempDir::new().unwrap();
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    folder
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

async fn answers(port: u16) {
    let reached = || async { TcpStream::connect(("127.0.0.1", port)).ok().map(drop) };
    within(PATIENCE, "the server to answer", reached).await;
}

/// The first of these programs that is there.
fn program(name: &str, package: &str, folders: impl IntoIterator<Item = PathBuf>) -> PathBuf {
    let mut found = folders.into_iter().map(|folder| folder.join(name)).filter(|path| path.exists());
    found.next().unwrap_or_else(|| panic!("{name} is missing: run `apt-get install -y {package}`"))
}

/// A pgbouncer that lends a server's connection for one transaction at a time, and has two of them.
async fn pooler() -> (Running, TempDir, u16) {
    let (folder, port) = (folder(), free_port());
    let address = server().split('@').nth(1).unwrap().split('/').next().unwrap().to_owned();
    let (host, upstream) = address.split_once(':').unwrap();
    let settings = folder.path().join("pgbouncer.ini");
    std::fs::write(
        &settings,
        format!(
            "[databases]\n* = host={host} port={upstream} user=postgres\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\n\
             unix_socket_dir =\nauth_type = any\npool_mode = transaction\ndefault_pool_size = 2\nmax_client_conn = 100\n"
        ),
    )
    .unwrap();
    let program = program("pgbouncer", "pgbouncer", ["/usr/sbin", "/usr/bin"].map(PathBuf::from));
    let running = Running(command(&program).arg(&settings).spawn().unwrap());
    answers(port).await;
    (running, folder, port)
}

#[tokio::test]
async fn a_transaction_mode_pooler_may_stand_in_between() {
    const KEYS: usize = 8;
    const EACH: usize = 40;
    let database = Database::fresh().await;
    let (_pooler, _folder, port) = pooler().await;
    let url = format!("postgres://postgres@127.0.0.1:{port}/{}", database.name());
    let mut relays = Vec::new();
    for _ in 0..3 {
        let store = PostgresStore::connect(Config { pool: 4, ..Config::new(&url) }).await.unwrap();
        relays.push(Relay::new(Arc::new(store) as Arc<dyn Store>));
    }
    for relay in &mut relays {
        relay.renew().await;
    }
    for relay in &mut relays {
        assert!(!relay.beat().await.held.is_empty());
    }
    // Many more clients than connections, all at once: a session's state would be somebody else's by now.
    let writers = (0..KEYS).map(|key| {
        let store = relays[key % relays.len()].store.clone();
        tokio::spawn(async move {
            for n in 0..EACH {
                let message = Message::new("orders", n.to_string()).key(key.to_string());
                store.append(vec![message.into()]).await.unwrap();
            }
        })
    });
    let writers: Vec<_> = writers.collect();
    let mut taken: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    let mut count = 0;
    while count < KEYS * EACH {
        let drained = round(&relays).await;
        count += drained.len();
        for (key, number) in drained {
            taken.entry(key).or_default().push(number);
        }
    }
    for writer in writers {
        writer.await.unwrap();
    }
    for (key, numbers) in &taken {
        assert_eq!(*numbers, (0..EACH).collect::<Vec<_>>(), "key {key}");
    }
    inbox_works(&relays[0].store).await;
    let counts = relays[1].store.counts().await.unwrap();
    assert_eq!((counts.sent, counts.pending), ((KEYS * EACH) as u64, 0));
}

/// What all relays take in one round, side by side: each message's key and number.
async fn round(relays: &[Relay]) -> Vec<(String, usize)> {
    let [a, b, c] = relays else { panic!("three relays") };
    let everything = sent();
    let (a, b, c) =
        tokio::join!(a.drain(20, &everything), b.drain(20, &everything), c.drain(20, &everything));
    let claimed = [a, b, c].into_iter().flatten();
    let read = |claimed: store::Claimed| {
        let number = std::str::from_utf8(&claimed.message.payload).unwrap().parse().unwrap();
        (claimed.message.key.clone().unwrap(), number)
    };
    claimed.map(read).collect()
}

async fn inbox_works(store: &Arc<dyn Store>) {
    let work = Work::Sql(
        "INSERT INTO outbox_events (id, topic, payload) VALUES (:id, 'effects', :payload)".to_owned(),
    );
    store.check(&work).await.unwrap();
    let arrival = |_| Arrival { message: Message::new("in", "{}").key("k"), seq: None, delivery: 0 };
    let arrivals: Vec<Arrival> = (0..20).map(arrival).collect();
    let rules = InboxRules::default();
    for expected in [Receipt::Done, Receipt::Duplicate] {
        let receipts = store.process("billing", arrivals.clone(), &work, &rules).await.unwrap();
        assert!(receipts.iter().all(|receipt| *receipt == expected), "{receipts:?}");
    }
    for arrival in arrivals {
        store.delete(arrival.message.id, "test").await.unwrap();
    }
}

#[tokio::test]
async fn a_replica_is_refused_with_the_reason() {
    let (folder, port) = (folder(), free_port());
    let data = folder.path().join("data");
    let versions = std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let bin: Vec<PathBuf> = versions.map(|version| version.path().join("bin")).collect();
    let initdb = program("initdb", "postgresql", bin.clone());
    let mut make = command(&initdb);
    make.arg("-D").arg(&data).args(["-U", "postgres", "--auth=trust", "-E", "UTF8", "--no-sync"]);
    assert!(make.status().unwrap().success());
    // A server that follows another is in recovery from its first moment, also while the other is not there.
    std::fs::write(data.join("standby.signal"), "").unwrap();
    let postgres = program("postgres", "postgresql", bin);
    let mut start = command(&postgres);
    start.arg("-D").arg(&data).args(["-p", &port.to_string(), "-h", "127.0.0.1", "-k", ""]);
    let _replica = Running(start.spawn().unwrap());
    answers(port).await;
    let url = format!("postgres://postgres@127.0.0.1:{port}/postgres");
    let error = within(PATIENCE, "a refusal", || async {
        let error = PostgresStore::connect(Config::new(&url)).await.unwrap_err();
        // It may still be starting.
        (!error.is_transient()).then(|| error.to_string())
    })
    .await;
    assert!(error.contains("replica") && error.contains("primary"), "{error}");
}
