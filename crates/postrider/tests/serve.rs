//! `serve`, as a person or a supervisor meets it.

#![cfg(unix)]

mod harness;

#[cfg(feature = "redis-streams")]
use std::net::{TcpListener, TcpStream};
#[cfg(feature = "redis-streams")]
use std::sync::Arc;
#[cfg(feature = "redis-streams")]
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use harness::{Folder, Server, raw};
use serde_json::Value;

#[test]
fn the_documented_calls_work_as_they_stand() {
    let folder = Folder::new();
    let server = folder.serve(&[]);
    let body = r#"{ "topic": "user-events", "message": "A user created an account", "consumerGroup": "default-consumer-group" }"#;
    let (status, answer) = server.post(&format!("{}/api/messages/send", server.producer), body);
    assert_eq!((status, answer["status"].as_str()), (202, Some("Pending")));
    let id = answer["messageId"].as_str().expect("an id");
    let view = server.until(&format!("{}/api/messages/status/{id}", server.producer), |view| {
        view["status"] == "Sent" && !view["acknowledgements"][0]["acknowledgedAt"].is_null()
    });
    assert_eq!(view["payload"], "A user created an account");
    assert_eq!(view["acknowledgements"][0]["consumerGroup"], "default-consumer-group");
    let (status, pending) = server.get(&format!("{}/api/messages/pending", server.producer));
    assert_eq!((status, pending["items"].as_array().map(Vec::len)), (200, Some(0)));
    let (_, done) = server.get(&format!("{}/api/consumer/processed/default-consumer-group", server.consumer));
    assert_eq!(done["items"][0]["messageId"], id);
    for health in [
        format!("{}/api/messages/health", server.producer),
        format!("{}/api/consumer/health", server.consumer),
    ] {
        assert_eq!(server.get(&health).0, 200);
    }
    assert!(server.said().contains(id), "the log names the message: {}", server.said());
}

#[test]
fn a_person_is_told_what_runs_where_and_what_to_try() {
    let folder = Folder::new();
    let mut child = folder
        .command(&["serve", "--listen-producer", "127.0.0.1:0", "--listen-consumer", "127.0.0.1:0"])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::null())
        .spawn()
        .expect("it starts");
    let mut lines =
        std::io::BufRead::lines(std::io::BufReader::new(child.stdout.take().expect("it is piped")));
    let mut banner = String::new();
    while !banner.contains("-d '{") {
        banner += &lines.next().expect("it goes on").expect("text");
        banner.push('\n');
    }
    child.kill().expect("it runs");
    child.wait().expect("it ends");
    for words in [
        "producer  http://127.0.0.1:",
        "relay     * → main",
        "consumer  http://",
        "store     sqlite://",
        "curl -X POST",
    ] {
        assert!(banner.contains(words), "{banner}");
    }
}

#[test]
fn a_signal_drains_and_nothing_is_left_locked() {
    for signal in ["TERM", "INT"] {
        let folder = Folder::new();
        let mut server = folder.serve(&[]);
        server.until(&format!("{}/api/lanes", server.producer), |view| !view["lanes"][0]["owner"].is_null());
        for number in 0..20 {
            let body = format!(r#"{{"topic": "user-events", "message": {number}, "key": "k"}}"#);
            assert_eq!(server.post(&format!("{}/api/messages/send", server.producer), &body).0, 202);
        }
        let start = Instant::now();
        server.signal(signal);
        assert_eq!(server.wait(), Some(0), "{}", server.said());
        assert!(start.elapsed() < Duration::from_secs(5), "took {:?}", start.elapsed());
        assert!(server.said().contains("drained"));
        let lanes = folder.json(&["lanes"]);
        assert!(
            lanes["lanes"].as_array().expect("lanes").iter().all(|lane| lane["owner"].is_null()),
            "{lanes}"
        );
        assert_eq!(folder.json(&["status"])["counts"]["inFlight"], 0);
    }
}

#[test]
fn a_second_signal_ends_at_once() {
    // The handler takes longer than anybody waits.
    let folder = Folder::with(
        "[routes.default]\ntopics = [\"*\"]\nidempotent = true\n\
         [consumers.slow]\ntopics = [\"t\"]\nhandler = { command = [\"sh\", \"-c\", \"touch started; exec sleep 600\"], timeout = \"20m\" }\n",
    );
    let mut server = folder.serve(&[]);
    server.post(&format!("{}/api/messages/send", server.producer), r#"{"topic": "t", "message": 1}"#);
    harness::until(|| folder.path().join("started").exists()).expect("the handler starts");
    server.signal("TERM");
    harness::until(|| server.said().contains("SIGTERM")).expect("the signal is heard");
    server.signal("INT");
    assert_eq!(server.wait(), Some(1), "{}", server.said());
    assert!(server.said().contains("ended at once"));
}

#[test]
fn a_port_that_is_taken_is_one_clear_line() {
    let folder = Folder::new();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = taken.local_addr().expect("an address").to_string();
    let run = folder.run(&["serve", "--listen-producer", &address, "--listen-consumer", "127.0.0.1:0"]);
    run.failed(5, &[&format!("cannot listen on {address}"), "--listen-producer"]);
    assert_eq!(run.err.lines().count(), 1, "{run:?}");
    assert!(!folder.path().join("postrider-data").exists(), "nothing was opened");
    folder
        .run(&["serve", "--listen-consumer", "0.0.0.0:1"])
        .failed(2, &["can be reached from other machines"]);
}

#[test]
fn a_data_folder_that_cannot_be_used_is_one_clear_line() {
    let folder = Folder::with("[store]\nurl = \"sqlite://occupied/postrider.db\"\n");
    folder.write("occupied", "a file where a folder should be");
    let arguments = ["serve", "--listen-producer", "127.0.0.1:0", "--listen-consumer", "127.0.0.1:0"];
    let run = folder.run(&arguments);
    run.failed(5, &["cannot use the folder occupied", "store.url"]);
    assert_eq!(run.err.lines().count(), 1, "{run:?}");
    let folder = Folder::with("[store]\nurl = \"sqlite://notes.txt\"\n");
    folder.write("notes.txt", &"this is not a database, only text. ".repeat(50));
    folder.run(&arguments).failed(5, &["notes.txt"]);
    folder.run(&["status"]).failed(5, &["notes.txt"]);
}

#[test]
fn the_parts_run_apart() {
    let folder = Folder::new();
    let producer = folder.serve(&["--only", "producer"]);
    assert!(producer.consumer.is_empty());
    let (_, answer) = producer.post(
        &format!("{}/api/messages/send", producer.producer),
        r#"{"topic": "user-events", "message": 1}"#,
    );
    let id = answer["messageId"].as_str().expect("an id").to_owned();
    let status = format!("{}/api/messages/status/{id}", producer.producer);
    assert_eq!(producer.get(&status).1["status"], "Pending");
    let relay = folder.serve(&["--only", "relay"]);
    assert!(relay.producer.is_empty() && relay.consumer.is_empty());
    producer.until(&status, |view| view["status"] == "Sent");
    let consumer = folder.serve(&["--only", "consumer"]);
    assert!(consumer.producer.is_empty());
    producer.until(&status, |view| !view["acknowledgements"][0]["acknowledgedAt"].is_null());
    folder.run(&["serve", "--only", "mailman"]).failed(2, &["mailman", "producer", "relay", "consumer"]);
}

#[test]
fn a_consumer_elsewhere_acknowledges_by_http() {
    let there = Folder::new();
    let producer = there.serve(&["--only", "producer,relay"]);
    let broker = there.path().join("postrider-data/broker.db");
    let here = Folder::with(&format!(
        "[consumer]\nacknowledge_to = \"{}\"\n[brokers.main]\nurl = \"embedded://{}\"\n",
        producer.producer,
        broker.display()
    ));
    let _consumer = here.serve(&["--only", "consumer"]);
    let (_, answer) = producer.post(
        &format!("{}/api/messages/send", producer.producer),
        r#"{"topic": "order-events", "message": 1}"#,
    );
    let id = answer["messageId"].as_str().expect("an id");
    producer.until(&format!("{}/api/messages/status/{id}", producer.producer), |view| {
        !view["acknowledgements"][0]["acknowledgedAt"].is_null()
    });
}

/// Sends a message, and waits until its broker has it.
fn sent(server: &Server, topic: &str, message: &str) -> String {
    let body = format!(r#"{{"topic": "{topic}", "message": {message}}}"#);
    let (code, answer) = server.post(&format!("{}/api/messages/send", server.producer), &body);
    assert_eq!(code, 202, "{answer}");
    let id = answer["messageId"].as_str().expect("an id").to_owned();
    server.until(&format!("{}/api/messages/status/{id}", server.producer), |view| view["status"] == "Sent");
    id
}

fn forged(id: &str, proof: &str) -> String {
    format!(r#"{{"messageId": "{id}", "consumerGroup": "default-consumer-group"{proof}}}"#)
}

fn acknowledged_at(producer: &Server, id: &str) -> Value {
    let (_, view) = producer.get(&format!("{}/api/messages/status/{id}", producer.producer));
    let group = &view["acknowledgements"][0];
    assert_eq!(group["consumerGroup"], "default-consumer-group", "{view}");
    group["acknowledgedAt"].clone()
}

fn component<'a>(health: &'a Value, name: &str) -> Option<&'a Value> {
    health["components"].as_array()?.iter().find(|one| one["name"] == name)
}

#[test]
fn a_consumer_elsewhere_acknowledges_by_a_topic_while_its_producer_is_away() {
    let there = Folder::with(
        "[producer]\nacknowledge_secrets = [\"0123456789abcdef\"]\nacknowledgements = { topic = \"acknowledgements\" }\n",
    );
    let producer = there.serve(&["--only", "producer,relay"]);
    let listening = "acknowledgements by topic acknowledgements";
    producer.until(&format!("{}/api/messages/health", producer.producer), |health| {
        component(health, listening).is_some_and(|one| one["ok"] == true && one["detail"] == "listening")
    });
    let ids = [1, 2, 3].map(|number| sent(&producer, "order-events", &number.to_string()));
    // The other service does not listen to this topic, so nobody is done with it, whatever is said.
    let victim = sent(&producer, "user-events", "4");
    // What is no acknowledgement, or not a proven one, is heard and in nobody's way.
    sent(&producer, "acknowledgements", "17");
    sent(&producer, "acknowledgements", &forged(&victim, ""));
    for refused in ["this is no acknowledgement", "has no `proof`"] {
        harness::until(|| producer.said().contains(refused)).expect("it is heard");
    }
    assert!(acknowledged_at(&producer, &victim).is_null());
    drop(producer);

    let broker = there.path().join("postrider-data/broker.db");
    let here = Folder::with(&format!(
        "[consumer]\nacknowledge_to = {{ topic = \"acknowledgements\" }}\n[brokers.main]\nurl = \"embedded://{}\"\n\
         [consumers.default-consumer-group]\ntopics = [\"order-events\"]\n",
        broker.display()
    ));
    here.run(&["config", "show"])
        .answered(&["acknowledge_to = { topic = \"acknowledgements\", broker = \"main\" }"]);
    // While the producer is away, somebody writes to the topic before and after those who may.
    let mut consumer = here.serve(&["--only", "producer,relay"]);
    sent(&consumer, "acknowledgements", &forged(&victim, r#", "proof": "0.made-up""#));
    drop(consumer);
    consumer = here.serve(&[]);
    let processed = format!("{}/api/consumer/processed/default-consumer-group", consumer.consumer);
    consumer.until(&processed, |page| page["items"].as_array().is_some_and(|items| items.len() == ids.len()));
    sent(&consumer, "acknowledgements", &forged(&victim, ""));

    let producer = there.serve(&["--only", "producer,relay"]);
    for refused in ["has no `proof`", "not for this message and group"] {
        harness::until(|| producer.said().contains(refused)).expect("it is heard");
    }
    for id in &ids {
        harness::until(|| !acknowledged_at(&producer, id).is_null()).expect("it is acknowledged");
    }
    assert!(acknowledged_at(&producer, &victim).is_null());
    there.run(&["config", "show"]).answered(&[
        "acknowledgements = { topic = \"acknowledgements\", broker = \"main\", group = \"producer\" }",
    ]);
}

/// A way to the real Redis that is shut until it is opened.
#[cfg(feature = "redis-streams")]
fn gate(open: &Arc<AtomicBool>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("it is bound").to_string();
    let open = Arc::clone(open);
    // It ends with the process of the test.
    std::thread::spawn(move || {
        let redis = testkit::servers::url("redis");
        let redis = redis.trim_start_matches("redis://").trim_end_matches('/');
        for here in listener.incoming().flatten().filter(|_| open.load(Ordering::Relaxed)) {
            let there = TcpStream::connect(redis).expect("Redis listens");
            let back = (there.try_clone().expect("a socket"), here.try_clone().expect("a socket"));
            for (mut from, mut to) in [(here, there), back] {
                std::thread::spawn(move || std::io::copy(&mut from, &mut to));
            }
        }
    });
    address
}

#[cfg(feature = "redis-streams")]
#[test]
fn acknowledgements_that_cannot_be_heard_are_said_by_health_until_they_can_and_unproven_ones_at_the_start() {
    let open = Arc::new(AtomicBool::new(false));
    let there = Folder::with(&format!(
        "[producer]\nacknowledgements = {{ topic = \"done\", broker = \"far\" }}\n\
         [brokers.main]\nurl = \"embedded://\"\n[brokers.far]\nurl = \"redis://{}?prefix=heard{}\"\n\
         [routes.default]\ntopics = [\"*\"]\nbroker = \"main\"\n[consumers]\n",
        gate(&open),
        std::process::id()
    ));
    let producer = there.serve(&["--only", "producer"]);
    let warning = "whoever can write to `done` on `far` can acknowledge any message";
    assert!(producer.said().contains(warning), "{}", producer.said());
    let said = there.run(&["doctor"]).out;
    assert!(said.contains("can acknowledge any message") && said.contains("acknowledge_secrets"), "{said}");
    let health = format!("{}/api/messages/health", producer.producer);
    let heard = |health: &Value, ok: bool, detail: &str| {
        let one = component(health, "acknowledgements by topic done");
        one.is_some_and(|one| one["ok"] == ok && one["detail"].to_string().contains(detail))
    };
    let failing = producer.until(&health, |health| heard(health, false, "cannot be reached"));
    assert_eq!(failing["status"], "failing");
    open.store(true, Ordering::Relaxed);
    let well = producer.until(&health, |health| heard(health, true, "listening"));
    assert_eq!(well["status"], "ok");
}

#[test]
fn with_secrets_a_consumer_elsewhere_proves_what_it_acknowledges_and_nobody_else_can() {
    let there = Folder::with("[producer]\nacknowledge_secrets = [\"0123456789abcdef\"]\n");
    let producer = there.serve(&["--only", "producer,relay"]);
    let broker = there.path().join("postrider-data/broker.db");
    let (_, answer) = producer.post(
        &format!("{}/api/messages/send", producer.producer),
        r#"{"topic": "order-events", "message": 1}"#,
    );
    let id = answer["messageId"].as_str().expect("an id");
    let status = format!("{}/api/messages/status/{id}", producer.producer);
    producer.until(&status, |view| view["status"] == "Sent");
    let (code, refused) = producer.post(
        &format!("{}/api/messages/acknowledge", producer.producer),
        &format!(r#"{{"messageId": "{id}", "consumerGroup": "default-consumer-group"}}"#),
    );
    assert_eq!(
        (code, refused["detail"].as_str().is_some_and(|told| told.contains("no `proof`"))),
        (403, true)
    );
    let here = Folder::with(&format!(
        "[consumer]\nacknowledge_to = \"{}\"\n[brokers.main]\nurl = \"embedded://{}\"\n",
        producer.producer,
        broker.display()
    ));
    let _consumer = here.serve(&["--only", "consumer"]);
    producer.until(&status, |view| !view["acknowledgements"][0]["acknowledgedAt"].is_null());
    let shown = there.run(&["config", "show"]);
    shown.answered(&["acknowledge_secrets: 1"]);
    assert!(!shown.out.contains("0123456789abcdef"));
}

#[test]
fn a_sql_handler_works_in_the_store() {
    let folder = Folder::with(
        "[consumers.ledger]\ntopics = [\"payments\"]\nhandler = { sql = \"INSERT INTO outbox_audit (at, actor, action, detail) VALUES (:occurred_at, :group, 'paid', :payload)\" }\n",
    );
    let server = folder.serve(&[]);
    server.post(
        &format!("{}/api/messages/send", server.producer),
        r#"{"topic": "payments", "message": {"amount": 100}}"#,
    );
    server.until(&format!("{}/api/consumer/processed/ledger", server.consumer), |page| {
        page["items"].as_array().is_some_and(|items| items.len() == 1)
    });
}

#[test]
fn a_handler_whose_endpoint_is_down_is_said_by_health_and_spends_nothing() {
    let closed =
        std::net::TcpListener::bind("127.0.0.1:0").expect("a free port").local_addr().expect("an address");
    let folder = Folder::with(&format!(
        "[routes.default]\ntopics = [\"*\"]\nidempotent = true\n\
         [consumers.hooks]\ntopics = [\"t\"]\nhandler = {{ http = \"http://{closed}/hook\" }}\n"
    ));
    let server = folder.serve(&[]);
    server.post(&format!("{}/api/messages/send", server.producer), r#"{"topic": "t", "message": 1}"#);
    let health =
        server.until(&format!("{}/api/consumer/health", server.consumer), |view| view["status"] == "failing");
    assert!(health.to_string().contains("no message is lost"), "{health}");
    let (_, parked) = server.get(&format!("{}/api/consumer/parked/hooks", server.consumer));
    assert_eq!(parked["items"].as_array().map(Vec::len), Some(0));
}

#[test]
fn logs_can_be_json() {
    let folder = Folder::new().variable("POSTRIDER__LOG__FORMAT", "json");
    let server = folder.serve(&[]);
    let (_, answer) = server
        .post(&format!("{}/api/messages/send", server.producer), r#"{"topic": "user-events", "message": 1}"#);
    let id = answer["messageId"].as_str().expect("an id").to_owned();
    harness::until(|| server.said().contains(&id)).expect("the log names the message");
    for line in server.said().lines() {
        serde_json::from_str::<serde_json::Value>(line).unwrap_or_else(|error| panic!("{error}: {line}"));
    }
}

#[test]
fn nonsense_on_the_wire_is_survived() {
    let folder = Folder::new();
    let server = folder.serve(&[]);
    raw(&server.producer, "\0\0\0 not HTTP at all\r\n\r\n");
    raw(
        &server.producer,
        &format!("GET / HTTP/1.1\r\nhost: localhost\r\nx: {}\r\n\r\n", "y".repeat(10 << 20)),
    );
    assert_eq!(server.get(&format!("{}/api/messages/health", server.producer)).0, 200);
}
