//! A real store, a real broker and real endpoints, made anew for each test.

#![allow(dead_code, reason = "each test file uses its part of it")]

use std::future::Future;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::http::{HeaderMap, StatusCode};
use broker::embedded::{Broker, Config};
use broker::{Outcome, Outgoing, Publisher};
use inbox::{Consumer, Group, Handler, Running};
use message::{Message, RetryPolicy};
use store::sqlite::SqliteStore;
use store::{Arrival, Forgetful, Inbox, InboxCounts, InboxRules};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

pub(crate) const GROUP: &str = "billing";
pub(crate) const TOPIC: &str = "orders";

/// Longer than anything here takes, however slow the machine.
const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) struct World {
    _folder: tempfile::TempDir,
    pub(crate) store: Arc<SqliteStore>,
    pub(crate) broker: Arc<Broker>,
}

impl World {
    pub(crate) fn new() -> Self {
        Self::with_partitions(Config::new("").partitions)
    }

    pub(crate) fn with_partitions(partitions: u16) -> Self {
        let folder = tempfile::tempdir().expect("a folder for the test");
        let store = SqliteStore::open(folder.path().join("store.db")).expect("a store");
        // A member that dies is missed soon, so that tests need not wait for it.
        let lease = Duration::from_secs(1);
        let config = Config { lease, partitions, ..Config::new(folder.path().join("broker.db")) };
        let broker = Broker::open(config).expect("a broker");
        Self { _folder: folder, store: Arc::new(store), broker: Arc::new(broker) }
    }

    pub(crate) fn group(&self, handler: Handler) -> Group {
        Group::new(GROUP, Arc::clone(&self.store) as Arc<dyn Inbox>, handler, rules())
    }

    /// A group that does not try again what failed, and remembers nothing.
    pub(crate) fn fleeting_group(&self, handler: Handler) -> Group {
        Group::new(GROUP, Arc::new(Forgetful::default()), handler, rules())
    }

    pub(crate) fn start(&self, group: Group) -> Running {
        let broker = Arc::clone(&self.broker);
        Consumer::new(Arc::new(group), broker, vec![TOPIC.to_owned()]).start()
    }

    pub(crate) async fn publish(&self, messages: &[Message]) {
        let outgoing = messages.iter().zip(1..).map(|(message, seq)| Outgoing::new(message.clone(), seq));
        let outcomes = self.broker.publish(outgoing.collect()).await;
        assert!(outcomes.iter().all(|outcome| *outcome == Outcome::Confirmed), "{outcomes:?}");
    }

    pub(crate) async fn counts(&self) -> InboxCounts {
        self.store.inbox_counts(GROUP).await.expect("counts")
    }

    pub(crate) async fn processed(&self, count: u64) {
        until(|| async { self.counts().await.processed == count }).await;
    }
}

pub(crate) fn rules() -> InboxRules {
    let retry = RetryPolicy { first: Duration::from_millis(20), max_attempts: 5, ..RetryPolicy::default() };
    InboxRules { retry, ordered: true, hold_dead: true, acknowledge: false }
}

pub(crate) fn arrival(message: Message) -> Arrival {
    Arrival { message, seq: Some(1), delivery: 0 }
}

/// `count` messages of each of `keys` keys, in turns; the payload is the number within the key.
pub(crate) fn messages(keys: usize, count: usize) -> Vec<Message> {
    let pairs = (0..count).flat_map(|number| (0..keys).map(move |key| (key, number)));
    pairs.map(|(key, number)| Message::new(TOPIC, number.to_string()).key(format!("k{key}"))).collect()
}

/// Looks again and again until it is so.
pub(crate) async fn until<F: Future<Output = bool>>(is_so: impl Fn() -> F) {
    let look = async {
        while !is_so().await {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(PATIENCE, look).await.expect("it should have become so by now");
}

/// A request that an endpoint got.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl Request {
    pub(crate) fn header(&self, name: &str) -> String {
        self.headers[name].to_str().expect("visible ASCII").to_owned()
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.body.to_vec()).expect("text")
    }
}

type Answer = dyn Fn(usize, &Request) -> (StatusCode, String) + Send + Sync;

/// A server that remembers what it was asked. `answer` gets the number of the request, from 0.
pub(crate) struct Endpoint {
    pub(crate) address: SocketAddr,
    requests: Arc<Mutex<Vec<Request>>>,
    server: JoinHandle<()>,
}

impl Endpoint {
    pub(crate) async fn new(
        answer: impl Fn(usize, &Request) -> (StatusCode, String) + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        Self::on(listener, Arc::new(answer))
    }

    pub(crate) fn on(listener: TcpListener, answer: Arc<Answer>) -> Self {
        let address = listener.local_addr().expect("it is bound");
        let requests: Arc<Mutex<Vec<Request>>> = Arc::default();
        let seen = Arc::clone(&requests);
        let app = Router::new().fallback(move |headers: HeaderMap, body: Bytes| async move {
            let request = Request { headers, body };
            let number = {
                let mut seen = seen.lock().expect("no panic");
                seen.push(request.clone());
                seen.len() - 1
            };
            answer(number, &request)
        });
        let server = tokio::spawn(async move { axum::serve(listener, app).await.expect("a server") });
        Self { address, requests, server }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}/in", self.address)
    }

    pub(crate) fn requests(&self) -> Vec<Request> {
        self.requests.lock().expect("no panic").clone()
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.server.abort();
    }
}

pub(crate) fn ok() -> (StatusCode, String) {
    (StatusCode::NO_CONTENT, String::new())
}
