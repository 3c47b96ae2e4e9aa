//! The whole arrow under kills and crashes, on real files, in processes of their own.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Child;
use std::time::{Duration, Instant};

use proof::check::check;
use proof::nemesis::{CRASH_POINTS, Nemesis, wait};
use proof::worker::store_path;
use rusqlite::Connection;

const PROGRAM: &str = env!("CARGO_BIN_EXE_proof");

fn nemesis(data: &Path, messages: u64, keys: u64) -> Nemesis<'_> {
    Nemesis { program: Path::new(PROGRAM), data, messages, keys, lease: Duration::from_millis(500) }
}

#[test]
fn thirty_kills_lose_nothing_double_nothing_and_keep_every_key_in_order() {
    let folder = tempfile::tempdir().expect("a folder");
    let (report, killed) = nemesis(folder.path(), 100_000, 1_000)
        .kill(30, Duration::from_millis(100), Duration::from_millis(2_500))
        .expect("the run ends");
    report.verdict().expect("every promise is kept");
    assert_eq!(report.committed, 100_000);
    assert!(killed >= 10, "only {killed} kills came before the work was done");
}

#[test]
fn a_crash_at_any_point_between_claim_and_acknowledgement_breaks_no_promise() {
    let folder = tempfile::tempdir().expect("a folder");
    for point in CRASH_POINTS {
        let data = folder.path().join(point.replace(':', "-"));
        let report = nemesis(&data, 3_000, 100).crash_at(point, 2).expect(point);
        report.verdict().expect(point);
    }
}

/// The names of the relays that hold lanes, and how many lanes are held.
fn owners(store: &Connection) -> (BTreeSet<String>, usize) {
    let mut statement = store
        .prepare(
            "SELECT owner FROM lanes WHERE locked_until > CAST(unixepoch('now', 'subsec') * 1000 AS INTEGER)",
        )
        .expect("the table is there");
    let owners: Vec<String> = statement
        .query_map([], |row| row.get(0))
        .expect("owners")
        .map(|owner| owner.expect("text"))
        .collect();
    let held = owners.len();
    (owners.into_iter().collect(), held)
}

fn until(what: &str, patience: Duration, mut condition: impl FnMut() -> bool) -> Duration {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < patience, "{what} did not happen within {patience:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
    started.elapsed()
}

#[test]
fn three_relays_share_the_lanes_and_a_dead_ones_move_within_its_lease() {
    let folder = tempfile::tempdir().expect("a folder");
    let nemesis = Nemesis { lease: Duration::from_secs(6), ..nemesis(folder.path(), 40_000, 500) };
    let relay = || nemesis.worker(&["--only", "relay"]).expect("a relay");
    let mut relays: Vec<Child> = (0..3).map(|_| relay()).collect();
    let store = until_open(folder.path());
    until("three relays sharing sixteen lanes", Duration::from_secs(20), || {
        assert!(
            relays.iter_mut().all(|relay| matches!(relay.try_wait(), Ok(None))),
            "a relay ended by itself"
        );
        let (owners, held) = owners(&store);
        owners.len() == 3 && held == 16
    });

    let others = nemesis.worker(&["--only", "producer,consumer"]).expect("producer and consumer");
    until("half the work", Duration::from_secs(120), || sent(&store) > 20_000);
    let copies = check(folder.path()).expect("readable").broker_copies;
    assert_eq!(copies, 0, "without a fault, no message is claimed by two relays");

    let mut dead = relays.remove(0);
    let before = owners(&store).0;
    dead.kill().expect("killed");
    dead.wait().expect("gone");
    let moved = until("the lanes moving", Duration::from_secs(20), || {
        let (owners, held) = owners(&store);
        owners.len() == 2 && held == 16 && owners.is_subset(&before)
    });
    // The others look every third of a lease and see that its process is gone.
    assert!(moved < Duration::from_secs(6), "the lanes took {moved:?} to move");

    for process in relays.into_iter().chain([others]) {
        assert!(wait(process).expect("it ends").success());
    }
    check(folder.path()).expect("readable").verdict().expect("every promise is kept");
}

fn sent(store: &Connection) -> u64 {
    store.query_row("SELECT sent FROM counters", [], |row| row.get(0)).expect("a count")
}

/// Opens the store once a worker has made it.
fn until_open(data: &Path) -> Connection {
    let read = || {
        let flags = rusqlite::OpenFlags::SQLITE_OPEN_READ_ONLY;
        let store = Connection::open_with_flags(store_path(data), flags)?;
        store.query_row("SELECT count(*) FROM inbox_groups", [], |row| row.get::<_, u64>(0))
    };
    until("the store", Duration::from_secs(20), || read().is_ok());
    let store = Connection::open(store_path(data)).expect("the store opens");
    store.busy_timeout(Duration::from_secs(10)).expect("patience");
    store
}

#[test]
fn the_checker_finds_every_planted_corruption() {
    let folder = tempfile::tempdir().expect("a folder");
    nemesis(folder.path(), 500, 5).finish().expect("a clean run");
    check(folder.path()).expect("readable").verdict().expect("the run was clean");

    let corruptions = [
        ("lost 1", "DELETE FROM effects WHERE position = 250"),
        ("phantom 1", "INSERT INTO effects (message_id, key, n) VALUES ('x', 'customer-0', 999)"),
        (
            "doubled 1",
            "INSERT INTO effects (message_id, key, n) SELECT message_id, key, n FROM effects LIMIT 1",
        ),
        (
            "disordered 1",
            "UPDATE effects SET n = CASE n WHEN 1 THEN 2 ELSE 1 END WHERE key = 'customer-1' AND n IN (1, 2)",
        ),
        ("unsent 1", "UPDATE outbox_events SET status = 'dead' WHERE seq = 7"),
        ("unacknowledged 1", "DELETE FROM acknowledgements WHERE seq = 9"),
    ];
    for (finding, sql) in corruptions {
        let copy = folder.path().join(finding.replace(' ', "-"));
        std::fs::create_dir(&copy).expect("a folder");
        for file in ["shop.db", "broker.db"] {
            let source = Connection::open(folder.path().join(file)).expect("opens");
            source
                .execute("VACUUM INTO ?1", [copy.join(file).to_str().expect("a plain path")])
                .expect("copied");
        }
        Connection::open(store_path(&copy)).expect("opens").execute_batch(sql).expect(sql);
        let error = check(&copy).expect("readable").verdict().expect_err(finding).to_string();
        assert!(error.contains(finding), "{error:?} should say {finding:?}");
    }
}
