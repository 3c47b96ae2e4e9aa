//! Acknowledgements, by HTTP and by a topic, over a way that loses, doubles and delays them.

#![cfg(unix)]

mod harness;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use broker::{Outcome, Outgoing, Publisher, Subscriber};
use harness::{Folder, Server, raw, until};
use message::MessageId;
use postrider::embedded::{Broker, Config};

const MESSAGES: usize = 100;

/// Longer than the relay waits for an acknowledgement.
const LATE: Duration = Duration::from_millis(1_300);

/// How every fifth acknowledgement is treated, by turns.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    Lost,
    /// The producer hears it, and whoever said it does not know.
    Unanswered,
    Doubled,
    /// After the relay has sent the message again.
    Late,
    Carried,
}

/// What became of acknowledgements on the way.
#[derive(Default)]
struct Way {
    seen: AtomicUsize,
    lost: AtomicUsize,
    doubled: AtomicUsize,
    late: AtomicUsize,
}

impl Way {
    /// What becomes of the next one.
    fn next(&self) -> Fate {
        let (fate, count) = match self.seen.fetch_add(1, Ordering::Relaxed) % 20 {
            0 => (Fate::Lost, &self.lost),
            5 => (Fate::Unanswered, &self.lost),
            10 => (Fate::Doubled, &self.doubled),
            15 => (Fate::Late, &self.late),
            _ => return Fate::Carried,
        };
        count.fetch_add(1, Ordering::Relaxed);
        fate
    }

    /// Takes connections for `producer`.
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
        match self.next() {
            Fate::Lost => return,
            Fate::Unanswered => {
                raw(producer, &request);
                return;
            }
            Fate::Doubled => drop(raw(producer, &request)),
            Fate::Late => std::thread::sleep(LATE),
            Fate::Carried => {}
        }
        let _ = connection.write_all(raw(producer, &request).as_bytes());
    }

    /// Carries what is said in the topic `done` of one broker to that of another, for as long as the test runs.
    async fn bridge(self: Arc<Self>, from: Broker, to: Broker) {
        let topics = ["done".to_owned()];
        let mut heard = Subscriber::subscribe(&from, "bridge", &topics).await.expect("it can be heard");
        loop {
            let deliveries = heard.receive(10).await.expect("it can be heard");
            let positions: Vec<_> = deliveries.iter().map(|delivery| delivery.position).collect();
            for mut message in deliveries.into_iter().map(|delivery| delivery.message) {
                match self.next() {
                    // Nobody answers for what is in a topic.
                    Fate::Lost | Fate::Unanswered => continue,
                    Fate::Doubled => say(&to, message.clone()).await,
                    Fate::Late => {
                        let to = to.clone();
                        tokio::spawn(async move {
                            tokio::time::sleep(LATE).await;
                            say(&to, message).await;
                        });
                        continue;
                    }
                    Fate::Carried => {}
                }
                // A message of its own, as if it had been said twice.
                message.id = MessageId::new();
                say(&to, message).await;
            }
            heard.acknowledge(&positions).await.expect("it can be heard");
        }
    }
}

async fn say(to: &Broker, message: message::Message) {
    assert_eq!(to.publish(vec![Outgoing::new(message, 0)]).await, [Outcome::Confirmed]);
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

/// A producer and, in another process with a store of its own, the ledger that acknowledges to it.
struct World {
    there: Folder,
    here: Folder,
}

impl World {
    const GROUPS: &str = "[consumers.ledger]\nbroker = \"main\"\ntopics = [\"order-events\"]\n\
        acknowledge = { timeout = \"1s\", check_every = \"200ms\", max_redeliveries = 100 }\n";

    fn new(producer: &str) -> Self {
        Self { there: Folder::with(&format!("{producer}{}", Self::GROUPS)), here: Folder::new() }
    }

    /// Starts the ledger, which acknowledges as `consumer` says. Each time that the work is done leaves a line.
    fn ledger(&self, consumer: &str) -> Server {
        let broker = self.there.path().join("postrider-data/broker.db");
        let handler = "handler = { sql = \"INSERT INTO outbox_audit (at, actor, action, detail) VALUES (0, 'ledger', 'done', :payload)\" }";
        let settings = format!(
            "[brokers.main]\nurl = \"embedded://{}\"\n{consumer}{}{handler}\n",
            broker.display(),
            Self::GROUPS
        );
        self.here.write("postrider.toml", &settings);
        self.here.serve(&["--only", "consumer"])
    }

    /// Sends messages, and looks at how they and their acknowledgements end.
    fn end_well(&self, producer: &Server, ledger: &Server, way: &Way) {
        for number in 0..MESSAGES {
            let body =
                format!(r#"{{"topic": "order-events", "message": {number}, "key": "{}"}}"#, number % 10);
            let (status, answer) = producer.post(&format!("{}/api/messages/send", producer.producer), &body);
            assert_eq!(status, 202, "{answer}");
        }
        let counts = || producer.get(&format!("{}/api/counts", producer.producer)).1;
        let done = until(|| counts()["acknowledgedTotal"] == MESSAGES);
        assert!(done.is_ok(), "{}\n{}", counts(), ledger.said());
        let unacknowledged = format!("{}/api/messages/unacknowledged/ledger", producer.producer);
        producer.until(&unacknowledged, |page| page["items"].as_array().is_some_and(Vec::is_empty));
        assert_eq!(counts()["dead"], 0, "nothing is falsely Dead");
        let lines = rusqlite::Connection::open(self.here.path().join("postrider-data/postrider.db"))
            .and_then(|file| {
                let count = "SELECT count(*), count(DISTINCT detail) FROM outbox_audit WHERE action = 'done'";
                file.query_row(count, [], |row| Ok((row.get::<_, usize>(0)?, row.get::<_, usize>(1)?)))
            })
            .expect("the consumer's store can be read");
        assert_eq!(lines, (MESSAGES, MESSAGES), "each is done once");
        for (what, count) in [("lost", &way.lost), ("doubled", &way.doubled), ("late", &way.late)] {
            assert!(count.load(Ordering::Relaxed) > 0, "no acknowledgement was {what}");
        }
    }
}

#[test]
fn acknowledgements_that_are_lost_doubled_or_late_end_well_and_nothing_is_done_twice() {
    let world = World::new("");
    let producer = world.there.serve(&["--only", "producer,relay"]);
    let (address, way) = Way::open(&producer.producer);
    let ledger = world.ledger(&format!("[consumer]\nacknowledge_to = \"{address}\"\n"));
    world.end_well(&producer, &ledger, &way);
}

#[test]
fn acknowledgements_in_a_topic_that_are_lost_doubled_or_late_end_well_and_nothing_is_done_twice() {
    let brokers = tempfile::tempdir().expect("a folder for the brokers");
    let [said, heard] = ["said.db", "heard.db"].map(|name| brokers.path().join(name));
    let world = World::new(&format!(
        "[producer]\nacknowledgements = {{ topic = \"done\", broker = \"heard\" }}\n\
         [brokers.main]\nurl = \"embedded://\"\n[brokers.heard]\nurl = \"embedded://{}\"\n\
         [routes.default]\ntopics = [\"*\"]\nbroker = \"main\"\n",
        heard.display()
    ));
    let producer = world.there.serve(&["--only", "producer,relay"]);
    let [from, to] = [&said, &heard].map(|path| Broker::open(Config::new(path)).expect("a broker"));
    let way = Arc::new(Way::default());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime = runtime.expect("a runtime");
    let bridge = runtime.spawn(Arc::clone(&way).bridge(from, to));
    let ledger = world.ledger(&format!(
        "[brokers.said]\nurl = \"embedded://{}\"\n[consumer]\nacknowledge_to = {{ topic = \"done\", broker = \"said\" }}\n\
         [routes.default]\ntopics = [\"*\"]\nbroker = \"main\"\n",
        said.display()
    ));
    world.end_well(&producer, &ledger, &way);
    assert!(!bridge.is_finished(), "the bridge fell");
}
