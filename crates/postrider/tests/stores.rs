//! The whole command on every server store, met as its users meet it: with `psql`, `mariadb`, `redis-cli` and Python.

#![cfg(all(unix, feature = "postgres", feature = "mysql", feature = "redis"))]

mod harness;

use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use harness::{Folder, Server};

/// A database, or a prefix, that nobody has used; gone when it is dropped.
struct Place {
    url: String,
    forget: Box<dyn Fn()>,
}

impl Drop for Place {
    fn drop(&mut self) {
        (self.forget)();
    }
}

fn fresh_name() -> String {
    static MADE: AtomicU32 = AtomicU32::new(0);
    format!("command_{}_{}", std::process::id(), MADE.fetch_add(1, Ordering::Relaxed))
}

fn postgres() -> Place {
    let server = testkit::servers::url("postgres");
    let name = fresh_name();
    psql(&server, &format!("CREATE DATABASE {name}"));
    let url = format!("{}/{name}", server.rsplit_once('/').expect("the URL names a database").0);
    let forget = move || drop(psql(&server, &format!("DROP DATABASE {name} WITH (FORCE)")));
    Place { url, forget: Box::new(forget) }
}

fn mariadb() -> Place {
    let server = testkit::servers::url("mariadb");
    let name = fresh_name();
    mariadb_client(&server, "", &format!("CREATE DATABASE {name}"));
    let url = format!("{}/{name}", server.trim_end_matches('/'));
    let forget = move || drop(mariadb_client(&server, "", &format!("DROP DATABASE {name}")));
    Place { url, forget: Box::new(forget) }
}

/// Runs a program with `input` on its standard input; it must succeed.
fn run(program: &str, arguments: &[&str], input: &str) -> String {
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| {
            panic!("cannot run {program}: {error}; `cargo xtask servers up` installs it with its server")
        });
    std::io::Write::write_all(&mut child.stdin.take().expect("it is piped"), input.as_bytes())
        .expect("it reads its input");
    let output = child.wait_with_output().expect("it ends");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{program} {input}: {said}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn psql(url: &str, sql: &str) -> String {
    run("psql", &["-v", "ON_ERROR_STOP=1", "-qtA", url], sql)
}

/// `url` is that of the server; the client does not read URLs.
fn mariadb_client(url: &str, database: &str, sql: &str) -> String {
    let authority = url.split("://").nth(1).and_then(|rest| rest.split('/').next()).expect("a URL");
    let (user, address) = authority.split_once('@').expect("the URL names a user");
    let (host, port) = address.split_once(':').expect("the URL names a port");
    run("mariadb", &["-h", host, "-P", port, "-u", user, "-N", "-B", database], sql)
}

/// A server on this store, with a group that logs what it gets.
fn serve(place: &Place) -> (Folder, Server) {
    let folder = Folder::with(&format!(
        "[store]\nurl = \"{}\"\n[consumers.ledger]\ntopics = [\"order-events\"]\n",
        place.url
    ));
    let server = folder.serve(&[]);
    (folder, server)
}

/// Waits until the group has done as many messages, and answers their keys, oldest first.
fn done(server: &Server, count: usize) -> Vec<String> {
    let url = format!("{}/api/consumer/processed/ledger", server.consumer);
    let view = server.until(&url, |view| view["items"].as_array().is_some_and(|items| items.len() >= count));
    let mut keys: Vec<String> = view["items"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|item| item["key"].as_str().unwrap_or_default().to_owned())
        .collect();
    keys.reverse();
    keys
}

#[test]
fn what_psql_writes_beside_a_business_row_is_delivered_and_what_it_rolls_back_is_never_seen() {
    let place = postgres();
    let (_folder, server) = serve(&place);
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
    let (_folder, server) = serve(&place);
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
    let (_folder, server) = serve(&place);
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
