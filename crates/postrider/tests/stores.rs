//! The whole command on every server store, met as its users meet it: with `psql`, `mariadb`, `redis-cli` and Python.

#![cfg(all(unix, feature = "postgres", feature = "mysql", feature = "redis"))]

mod harness;
#[path = "harness/place.rs"]
mod place;

use harness::{Folder, Server};
use place::{Place, mariadb, mariadb_client, postgres, psql, redis, redis_cli, run};

/// A server on this store, with a group that logs what it gets, or handles it otherwise.
fn serve(place: &Place, handler: &str) -> (Folder, Server) {
    let folder = Folder::with(&format!(
        "[store]\n{}\n[consumers.ledger]\ntopics = [\"order-events\"]\n{handler}\n",
        place.settings
    ));
    let server = folder.serve(&[]);
    (folder, server)
}

/// Waits until the group has done as many messages, and answers their keys. Different keys may pass each other.
fn done(server: &Server, count: usize) -> Vec<String> {
    let url = format!("{}/api/consumer/processed/ledger", server.consumer);
    let view = server.until(&url, |view| view["items"].as_array().is_some_and(|items| items.len() >= count));
    let mut keys: Vec<String> = view["items"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|item| item["key"].as_str().unwrap_or_default().to_owned())
        .collect();
    keys.sort_unstable();
    keys
}

#[test]
fn what_psql_writes_beside_a_business_row_is_delivered_and_what_it_rolls_back_is_never_seen() {
    let place = postgres();
    let (_folder, server) = serve(&place, "");
    psql(
        &place.url,
        r#"CREATE TABLE orders (id text PRIMARY KEY);
           BEGIN;
           INSERT INTO orders VALUES ('1');
           INSERT INTO outbox_events (topic, key, payload) VALUES ('order-events', '1', '{"total": 10}');
           COMMIT;
           BEGIN;
           INSERT INTO orders VALUES ('2');
           INSERT INTO outbox_events (topic, key, payload) VALUES ('order-events', '2', '{"total": 20}');
           ROLLBACK;
           BEGIN;
           INSERT INTO orders VALUES ('3');
           SELECT postrider_send('order-events', '3', '{"total": 30}');
           COMMIT;"#,
    );
    assert_eq!(done(&server, 2), ["1", "3"]);
    assert_eq!(psql(&place.url, "SELECT key, status FROM outbox_status ORDER BY seq"), "1|sent\n3|sent\n");
}

#[test]
fn what_python_writes_is_delivered_and_what_it_rolls_back_is_never_seen() {
    let place = postgres();
    let (_folder, server) = serve(&place, "");
    let program = r#"
import sys, psycopg
with psycopg.connect(sys.argv[1]) as connection:
    connection.execute("CREATE TABLE orders (id text PRIMARY KEY)")
    connection.execute("INSERT INTO orders VALUES ('1')")
    connection.execute("INSERT INTO outbox_events (topic, key, payload) VALUES (%s, %s, %s)",
                       ("order-events", "1", b'{"total": 10}'))
try:
    with psycopg.connect(sys.argv[1]) as connection:
        connection.execute("INSERT INTO orders VALUES ('2')")
        connection.execute("SELECT postrider_send('order-events', '2', '{\"total\": 20}')")
        raise RuntimeError("the payment was refused")
except RuntimeError:
    pass
with psycopg.connect(sys.argv[1]) as connection:
    connection.execute("SELECT postrider_send('order-events', '3', '{\"total\": 30}')")
with psycopg.connect(sys.argv[1]) as connection:
    one = lambda: connection.execute("SELECT postrider_once('python', gen_random_uuid())").fetchone()[0]
    assert one() is True
    again = "SELECT postrider_once('python', '01890a5d-ac96-774b-bcce-b302099a8057')"
    assert connection.execute(again).fetchone()[0] is True
    assert connection.execute(again).fetchone()[0] is False
"#;
    run("/usr/bin/python3", &["-c", program, &place.url], "");
    assert_eq!(done(&server, 2), ["1", "3"]);
}

#[test]
fn what_the_mariadb_client_writes_is_delivered_and_what_it_rolls_back_is_never_seen() {
    let place = mariadb();
    let (_folder, server) = serve(&place, "");
    let (host, database) = place.url.rsplit_once('/').expect("it names a database");
    mariadb_client(
        host,
        database,
        r#"CREATE TABLE orders (id varchar(20) PRIMARY KEY);
           START TRANSACTION;
           INSERT INTO orders VALUES ('1');
           INSERT INTO outbox_events (topic, `key`, payload) VALUES ('order-events', '1', '{"total": 10}');
           COMMIT;
           START TRANSACTION;
           INSERT INTO orders VALUES ('2');
           INSERT INTO outbox_events (topic, `key`, payload) VALUES ('order-events', '2', '{"total": 20}');
           ROLLBACK;
           START TRANSACTION;
           INSERT INTO orders VALUES ('3');
           SELECT postrider_send('order-events', '3', '{"total": 30}');
           COMMIT;"#,
    );
    assert_eq!(done(&server, 2), ["1", "3"]);
    let status = mariadb_client(host, database, "SELECT `key`, status FROM outbox_status ORDER BY seq");
    assert_eq!(status, "1\tsent\n3\tsent\n");
}

#[test]
fn what_redis_cli_writes_beside_a_key_of_its_own_is_delivered_and_what_it_discards_is_never_seen() {
    let place = redis();
    let (_folder, server) = serve(&place, "");
    let prefix = &place.url;
    let said = redis_cli(&format!(
        r#"MULTI
SET "{prefix}:order:1" 10
FCALL postrider_send 1 {prefix} order-events 1 "{{\"total\": 10}}"
EXEC
MULTI
SET "{prefix}:order:2" 20
FCALL postrider_send 1 {prefix} order-events 2 "{{\"total\": 20}}"
DISCARD
FCALL postrider_send 1 {prefix} order-events 3 "{{\"total\": 30}}"
EXISTS "{prefix}:order:1"
EXISTS "{prefix}:order:2"
"#
    ));
    assert!(said.ends_with("1\n0\n"), "{said}");
    assert_eq!(done(&server, 2), ["1", "3"]);
}

#[test]
fn the_documented_calls_work_on_every_store() {
    for place in [postgres(), mariadb(), redis()] {
        let (folder, server) = serve(&place, "");
        let body = r#"{ "topic": "order-events", "message": {"total": 10}, "key": "7" }"#;
        let (status, answer) = server.post(&format!("{}/api/messages/send", server.producer), body);
        assert_eq!((status, answer["status"].as_str()), (202, Some("Pending")), "{}", place.settings);
        let id = answer["messageId"].as_str().expect("an id");
        let view = server.until(&format!("{}/api/messages/status/{id}", server.producer), |view| {
            view["status"] == "Sent" && !view["acknowledgements"][0]["acknowledgedAt"].is_null()
        });
        assert_eq!(view["payload"]["total"], 10);
        assert_eq!(done(&server, 1), ["7"]);
        assert_eq!(server.get(&format!("{}/api/messages/health", server.producer)).0, 200);
        let status = folder.json(&["status"]);
        assert_eq!((&status["counts"]["sent"], &status["counts"]["dead"]), (&1.into(), &0.into()));
    }
}

#[test]
fn work_and_mark_are_one_on_every_store() {
    let script = "redis.call('RPUSH', KEYS_OF_SHOP, message.key)";
    let cases = [
        (
            postgres(),
            r#"handler = { sql = "INSERT INTO ledger (message_id, total) VALUES (:id, (convert_from(:payload, 'UTF8')::json ->> 'total')::int)" }"#
                .to_owned(),
        ),
        (
            mariadb(),
            r#"handler = { sql = "INSERT INTO ledger (message_id, total) VALUES (:id, JSON_EXTRACT(:payload, '$.total'))" }"#
                .to_owned(),
        ),
        (redis(), String::new()),
    ];
    for (place, handler) in cases {
        let handler = match handler.is_empty() {
            true => {
                let list = format!("'{}:ledger'", place.url);
                format!("handler = {{ script = \"{}\" }}", script.replace("KEYS_OF_SHOP", &list))
            }
            false => handler,
        };
        let (_folder, server) = serve(&place, &handler);
        let send = |key: &str| {
            let body =
                format!(r#"{{ "topic": "order-events", "message": {{"total": 10}}, "key": "{key}" }}"#);
            assert_eq!(server.post(&format!("{}/api/messages/send", server.producer), &body).0, 202);
        };
        send("early");
        // A table that is not there yet stops nobody's message: it waits.
        make_ledger(&place);
        send("late");
        assert_eq!(done(&server, 2), ["early", "late"], "{}", place.settings);
        assert_eq!(ledger(&place), 2);
    }
}

fn make_ledger(place: &Place) {
    if !place.is_redis() {
        place.ask("CREATE TABLE ledger (message_id varchar(40) PRIMARY KEY, total int)");
    }
}

fn ledger(place: &Place) -> usize {
    let said = match place.is_redis() {
        true => place.ask(&format!("LLEN \"{}:ledger\"", place.url)),
        false => place.ask("SELECT count(*) FROM ledger"),
    };
    said.parse().expect("a number")
}

#[test]
fn a_password_is_never_shown() {
    for url in
        ["postgres://ann:hush@127.0.0.1:1/x", "mysql://ann:hush@127.0.0.1:1/x", "redis://:hush@127.0.0.1:1"]
    {
        let folder = Folder::with(&format!("[store]\nurl = \"{url}\"\n"));
        for command in [&["status"][..], &["config", "show"], &["migrate"], &["serve"]] {
            let run = folder.run(command);
            assert!(!format!("{run:?}").contains("hush"), "{run:?}");
        }
    }
}

#[cfg(feature = "kafka")]
#[test]
fn the_example_with_redis_and_kafka_delivers_to_both_of_its_groups_from_two_processes() {
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/config/redis-kafka.toml");
    let example = std::fs::read_to_string(example).expect("the example is there");
    let (place, name) = (redis(), place::fresh_name());
    let kafka = format!("{}?prefix={name}", testkit::servers::url("kafka"));
    let changes = [
        ("url = \"redis://127.0.0.1:6379\"", place.settings.as_str()),
        ("kafka://127.0.0.1:9092", &kafka),
        ("127.0.0.1:5299", "127.0.0.1:0"),
        ("127.0.0.1:5287", "127.0.0.1:0"),
    ];
    let mut settings = example;
    for (there, here) in changes {
        assert!(settings.contains(there), "the example has no {there}");
        settings = settings.replace(there, here);
    }
    let folders = [Folder::with(&settings), Folder::with(&settings)];
    let servers = folders.each_ref().map(|folder| folder.serve(&[]));
    for (number, topic) in ["user-events", "order-events", "analytics-events"].into_iter().enumerate() {
        let server = &servers[number % 2];
        let body = format!(r#"{{ "topic": "{topic}", "message": "hello" }}"#);
        let (status, answer) = server.post(&format!("{}/api/messages/send", server.producer), &body);
        assert_eq!(status, 202, "{answer}");
        let id = answer["messageId"].as_str().expect("an id");
        server.until(&format!("{}/api/messages/status/{id}", server.producer), |view| {
            !view["acknowledgements"][0]["acknowledgedAt"].is_null()
        });
    }
}
