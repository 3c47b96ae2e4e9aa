//! One of two groups never acknowledges, on real brokers: what it gets again, what the other notices of it, and what the
//! producer says.

#![cfg(all(unix, feature = "kafka", feature = "nats"))]

mod harness;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::Path;
use std::time::{Duration, Instant};

use broker::{Seen, Span, Surroundings};
use harness::{Folder, Server, until};
use serde_json::Value;

const MESSAGES: usize = 30;

/// Longer than the relay waits for an acknowledgement, and until it looks again.
const QUIET: Duration = Duration::from_secs(3);

/// What both groups may take, in the producer's settings and in their own.
const PATIENCE: &str = "acknowledge = { timeout = \"1s\", check_every = \"200ms\", max_redeliveries = 3 }";

/// Each time that the work is done leaves a line.
const HANDLER: &str = "handler = { sql = \"INSERT INTO outbox_audit (at, actor, action, detail) \
                       VALUES (0, :group, 'done', :id)\" }";

/// A producer's address where every acknowledgement is taken with thanks, and nobody hears it.
fn swallower() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = format!("http://{}", listener.local_addr().expect("it is bound"));
    // It ends with the process of the test.
    std::thread::spawn(move || {
        for mut connection in listener.incoming().flatten() {
            let mut request = [0; 4096];
            if connection.read(&mut request).is_ok() {
                let thanks = "HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
                let _ = connection.write_all(thanks.as_bytes());
            }
        }
    });
    address
}

/// A group in a process and with a store of its own, that acknowledges to `producer`.
fn group(name: &str, broker: &str, producer: &str) -> (Folder, Server) {
    let folder = Folder::with(&format!(
        "[brokers.main]\nurl = \"{broker}\"\n[consumer]\nacknowledge_to = \"{producer}\"\n\
         [consumers.{name}]\ntopics = [\"order-events\"]\n{PATIENCE}\n{HANDLER}\n"
    ));
    let server = folder.serve(&["--only", "consumer"]);
    (folder, server)
}

/// How often the work was done and of how many messages, and how many arrivals were duplicates.
fn done(folder: &Folder) -> (usize, usize, usize) {
    let file = rusqlite::Connection::open(folder.path().join("postrider-data/postrider.db"));
    let counted = file.and_then(|file| {
        let sql = "SELECT (SELECT count(*) FROM outbox_audit WHERE action = 'done'), \
                          (SELECT count(DISTINCT detail) FROM outbox_audit WHERE action = 'done'), \
                          (SELECT coalesce(sum(duplicates), 0) FROM inbox_groups)";
        file.query_row(sql, [], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))
    });
    counted.expect("the group's store can be read")
}

/// Which deliveries of each message lie in the broker.
fn deliveries(broker: &str) -> BTreeMap<String, BTreeSet<u32>> {
    let surroundings = Surroundings { file: Path::new("none").to_owned(), max_payload: 1 << 20 };
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let mut found: BTreeMap<String, BTreeSet<u32>> = BTreeMap::new();
    runtime.block_on(async {
        let reader = broker::open(broker, &surroundings).expect("a broker").reader.expect("it is a log");
        let now = std::time::SystemTime::now();
        let hour = Duration::from_secs(3_600);
        let span = Span { since: (now - hour).into(), until: (now + hour).into() };
        let mut see = |Seen { id, delivery, .. }| {
            let new = found.entry(id.to_string()).or_default().insert(delivery);
            assert!(new, "{id} lies there twice as delivery {delivery}");
        };
        reader.browse("order-events", span, &mut see).await.expect("it can be read");
    });
    found
}

fn unacknowledged(producer: &Server, group: &str) -> BTreeSet<String> {
    let (status, page) =
        producer.get(&format!("{}/api/messages/unacknowledged/{group}?limit=1000", producer.producer));
    assert_eq!(status, 200, "{page}");
    let id = |item: &Value| item["messageId"].as_str().expect("an id").to_owned();
    page["items"].as_array().expect("a list").iter().map(id).collect()
}

fn send(producer: &Server, number: usize) -> String {
    let body = format!(r#"{{"topic": "order-events", "message": {number}, "key": "{}"}}"#, number % 10);
    let (status, answer) = producer.post(&format!("{}/api/messages/send", producer.producer), &body);
    assert_eq!(status, 202, "{answer}");
    answer["messageId"].as_str().expect("an id").to_owned()
}

/// `ledger` acknowledges, and what `audit` says is never heard.
fn the_other_group_is_not_disturbed(name: &str) {
    let server = testkit::servers::url(name);
    let broker = format!("{server}?prefix=silence{}", std::process::id());
    let there = Folder::with(&format!(
        "[brokers.main]\nurl = \"{broker}\"\n[consumers.ledger]\ntopics = [\"order-events\"]\n{PATIENCE}\n\
         [consumers.audit]\ntopics = [\"order-events\"]\n{PATIENCE}\n"
    ));
    let producer = there.serve(&["--only", "producer,relay"]);
    let (ledger, _ledger) = group("ledger", &broker, &producer.producer);
    let (audit, _audit) = group("audit", &broker, &swallower());
    let ids: BTreeSet<String> = (0..MESSAGES).map(|number| send(&producer, number)).collect();

    let copies = || deliveries(&broker).values().map(BTreeSet::len).sum::<usize>();
    let all = until(|| copies() >= MESSAGES * 4 && done(&ledger).2 + done(&audit).2 >= MESSAGES * 6);
    assert!(all.is_ok(), "{} of {} came: {}", copies(), MESSAGES * 4, producer.said());

    let (quiet, counts) = (Instant::now(), || producer.get(&format!("{}/api/counts", producer.producer)).1);
    while quiet.elapsed() < QUIET {
        assert_eq!(unacknowledged(&producer, "audit"), ids);
        assert_eq!(unacknowledged(&producer, "ledger"), BTreeSet::new());
        let counts = counts();
        assert_eq!((&counts["dead"], &counts["sent"]), (&Value::from(0), &Value::from(MESSAGES)), "{counts}");
    }
    let lie = deliveries(&broker);
    assert_eq!(lie.keys().cloned().collect::<BTreeSet<_>>(), ids);
    for (id, deliveries) in lie {
        assert_eq!(deliveries, BTreeSet::from([0, 1, 2, 3]), "{id}: sent again three times, and no more");
    }
    // Copies are for everybody who listens to the topic, and everybody recognises them.
    for group in [&ledger, &audit] {
        assert_eq!(done(group), (MESSAGES, MESSAGES, MESSAGES * 3));
    }
}

#[test]
fn a_group_that_is_never_heard_gets_three_copies_on_nats_and_the_other_recognises_them() {
    the_other_group_is_not_disturbed("nats");
}

#[test]
fn a_group_that_is_never_heard_gets_three_copies_on_kafka_and_the_other_recognises_them() {
    the_other_group_is_not_disturbed("kafka");
}
