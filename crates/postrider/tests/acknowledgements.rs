//! Acknowledgements by HTTP over a way that loses, doubles and delays them.

#![cfg(unix)]

mod harness;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use harness::{Folder, raw, until};

const MESSAGES: usize = 100;

/// What became of requests on the way.
#[derive(Default)]
struct Way {
    requests: AtomicUsize,
    lost: AtomicUsize,
    doubled: AtomicUsize,
    late: AtomicUsize,
}

impl Way {
    /// Takes connections for `producer` and treats every fifth request badly, in four ways.
    fn open(producer: &str) -> (String, Arc<Self>) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = format!("http://{}", listener.local_addr().expect("it is bound"));
        let (way, producer) = (Arc::new(Self::default()), producer.to_owned());
        let there = Arc::clone(&way);
        // It ends with the process of the test.
        std::thread::spawn(move || {
            for connection in listener.incoming().flatten() {
                let (way, producer) = (Arc::clone(&there), producer.clone());
                std::thread::spawn(move || way.carry(connection, &producer));
            }
        });
        (address, way)
    }

    fn carry(&self, mut connection: TcpStream, producer: &str) {
        let Some(request) = read(&connection) else { return };
        let number = self.requests.fetch_add(1, Ordering::Relaxed);
        match number % 20 {
            // The request is lost.
            0 => {
                self.lost.fetch_add(1, Ordering::Relaxed);
                return;
            }
            // Its answer is: it will be asked again.
            5 => {
                self.lost.fetch_add(1, Ordering::Relaxed);
                raw(producer, &request);
                return;
            }
            10 => {
                self.doubled.fetch_add(1, Ordering::Relaxed);
                raw(producer, &request);
            }
            // After the relay has sent the message again.
            15 => {
                self.late.fetch_add(1, Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(1_300));
            }
            _ => {}
        }
        let _ = connection.write_all(raw(producer, &request).as_bytes());
    }
}

/// A whole request, with the wish to close the connection after it.
fn read(connection: &TcpStream) -> Option<String> {
    let mut reader = BufReader::new(connection);
    let (mut head, mut length) = (String::new(), 0);
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).ok()? == 0 {
            return None;
        }
        if line == "\r\n" {
            break;
        }
        let lower = line.to_ascii_lowercase();
        if let Some(value) = lower.strip_prefix("content-length:") {
            length = value.trim().parse().ok()?;
        }
        if !lower.starts_with("connection:") {
            head += &line;
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    Some(format!("{head}connection: close\r\n\r\n{}", String::from_utf8(body).ok()?))
}

#[test]
fn acknowledgements_that_are_lost_doubled_or_late_end_well_and_nothing_is_done_twice() {
    let patience = "acknowledge = { timeout = \"1s\", check_every = \"200ms\", max_redeliveries = 100 }";
    let groups = format!("[consumers.ledger]\ntopics = [\"order-events\"]\n{patience}\n");
    let there = Folder::with(&groups);
    let producer = there.serve(&["--only", "producer,relay"]);
    let (address, way) = Way::open(&producer.producer);
    let broker = there.path().join("postrider-data/broker.db");
    // Each time that the work is done leaves a line.
    let handler = "handler = { sql = \"INSERT INTO outbox_audit (at, actor, action, detail) VALUES (0, 'ledger', 'done', :payload)\" }";
    let here = Folder::with(&format!(
        "[consumer]\nacknowledge_to = \"{address}\"\n[brokers.main]\nurl = \"embedded://{}\"\n{groups}{handler}\n",
        broker.display()
    ));
    let consumer = here.serve(&["--only", "consumer"]);
    for number in 0..MESSAGES {
        let body = format!(r#"{{"topic": "order-events", "message": {number}, "key": "{}"}}"#, number % 10);
        let (status, answer) = producer.post(&format!("{}/api/messages/send", producer.producer), &body);
        assert_eq!(status, 202, "{answer}");
    }
    let counts = || producer.get(&format!("{}/api/counts", producer.producer)).1;
    let done = until(|| counts()["acknowledgedTotal"] == MESSAGES);
    assert!(done.is_ok(), "{}\n{}", counts(), consumer.said());
    let unacknowledged = format!("{}/api/messages/unacknowledged/ledger", producer.producer);
    producer.until(&unacknowledged, |page| page["items"].as_array().is_some_and(Vec::is_empty));
    assert_eq!(counts()["dead"], 0, "nothing is falsely Dead");
    let lines = rusqlite::Connection::open(here.path().join("postrider-data/postrider.db"))
        .and_then(|file| {
            let count = "SELECT count(*), count(DISTINCT detail) FROM outbox_audit WHERE action = 'done'";
            file.query_row(count, [], |row| Ok((row.get::<_, usize>(0)?, row.get::<_, usize>(1)?)))
        })
        .expect("the consumer's store can be read");
    assert_eq!(lines, (MESSAGES, MESSAGES), "each is done once");
    for (what, count) in [("lost", &way.lost), ("doubled", &way.doubled), ("late", &way.late)] {
        assert!(count.load(Ordering::Relaxed) > 0, "no request was {what}");
    }
}
