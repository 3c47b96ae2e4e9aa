//! A producer and a consumer on a store of their own, called without a network.

use std::sync::Arc;
use std::time::Duration;

use admin::{ConsumerView, Contract, Desk, Part, RouteView, Topology};
use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{HeaderMap, Method, Request, StatusCode, header};
use inbox::{Group, Handler};
use message::{Limits, OnDead, Order, RetryPolicy, Semantics, TopicPattern};
use serde_json::Value;
use server::{Component, Consumer, FlowView, Hosts, Overdue, Producer, TransactionsView, consumer, producer};
use store::sqlite::SqliteStore;
use store::{
    Batch, Beat, Claim, ClaimOrder, InboxRules, Instance, Lanes, Lease, Settlement, TopicRule, Verdict,
};
use tempfile::TempDir;
use tower::ServiceExt;
use uuid::Uuid;

pub(crate) struct Service {
    pub(crate) store: SqliteStore,
    pub(crate) producer: Router,
    pub(crate) consumer: Router,
    relay: Uuid,
    _folder: TempDir,
}

pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) text: String,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {}", self.text))
    }

    /// The code of the problem, which must be a complete one.
    pub(crate) fn problem(&self) -> String {
        assert_eq!(self.headers[header::CONTENT_TYPE], "application/problem+json", "{}", self.text);
        let problem = self.json();
        assert_eq!(problem["status"], self.status.as_u16());
        let code = problem["code"].as_str().expect("a code").to_owned();
        assert_eq!(problem["type"], format!("urn:postrider:problem:{code}"));
        for field in ["title", "detail"] {
            assert!(problem[field].as_str().is_some_and(|text| !text.is_empty()), "{field} in {problem}");
        }
        code
    }

    pub(crate) fn detail(&self) -> String {
        self.json()["detail"].as_str().expect("a detail").to_owned()
    }
}

pub(crate) const BODY_LIMIT: usize = 1 << 20;

impl Service {
    pub(crate) fn start() -> Self {
        Self::with(vec![Component { name: "relay".into(), ok: true, detail: "holds 16 lanes".into() }])
    }

    pub(crate) fn with(parts: Vec<Component>) -> Self {
        Self::of(parts, |desk| desk)
    }

    /// With another desk than the usual.
    pub(crate) fn at(change: impl FnOnce(Desk) -> Desk) -> Self {
        Self::of(Vec::new(), change)
    }

    fn of(parts: Vec<Component>, change: impl FnOnce(Desk) -> Desk) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let store = SqliteStore::open(folder.path().join("postrider.db")).expect("a store");
        let desk = Desk::new(Arc::new(store.clone()), Arc::new(topology()), Limits::default());
        let desk = Arc::new(change(desk));
        let health: server::Health = Arc::new(move || parts.clone());
        let group =
            |name: &str, handler| Arc::new(Group::new(name, Arc::new(store.clone()), handler, rules()));
        let late = Overdue { group: "analytics".to_owned(), overdue: 7, given_up: 2, redelivered: 9 };
        let mut took = store::Latency::default();
        took.note(Duration::from_millis(20));
        let ended =
            TransactionsView { broker: "kafka".to_owned(), committed: 5, rolled_back: 1, took: took.into() };
        let groups = vec![
            group("default-consumer-group", Handler::Log),
            group("analytics-group", Handler::Sql("INSERT INTO no_such_table VALUES (:id)".into())),
        ];
        Self {
            producer: producer(Producer {
                desk: Arc::clone(&desk),
                health: Arc::clone(&health),
                lost: Arc::new(|| vec![("fleeting".to_owned(), 3)]),
                flows: Arc::new(|| vec![flow("orders", None, true), flow("users", None, false)]),
                overdue: Arc::new(move || vec![late.clone()]),
                transactions: Arc::new(move || vec![ended.clone()]),
                contract: Arc::new(contract()),
                body_limit: BODY_LIMIT,
                hosts: Hosts::default(),
            }),
            consumer: consumer(Consumer {
                desk,
                groups,
                health,
                lost: Arc::new(Vec::new),
                dead_letters: Arc::new(|| vec![("billing".to_owned(), 2)]),
                flows: Arc::new(|| vec![flow("orders", Some("billing"), true)]),
                body_limit: BODY_LIMIT,
                hosts: Hosts::default(),
            }),
            store,
            relay: Uuid::now_v7(),
            _folder: folder,
        }
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        call(&self.producer, request(Method::GET, path, Body::empty())).await
    }

    pub(crate) async fn post(&self, path: &str, body: impl Into<Body>) -> Answer {
        call(&self.producer, json(Method::POST, path, body)).await
    }

    pub(crate) async fn put(&self, path: &str, body: impl Into<Body>) -> Answer {
        call(&self.producer, json(Method::PUT, path, body)).await
    }

    pub(crate) async fn delete(&self, path: &str) -> Answer {
        call(&self.producer, request(Method::DELETE, path, Body::empty())).await
    }

    pub(crate) async fn send(&self, body: &str) -> Answer {
        self.post("/api/messages/send", body.to_owned()).await
    }

    pub(crate) async fn send_once(&self, key: &str, body: &str) -> Answer {
        let mut request = json(Method::POST, "/api/messages/send", body.to_owned());
        request.headers_mut().insert("idempotency-key", key.parse().expect("a header value"));
        call(&self.producer, request).await
    }

    /// Sends a message and answers its id.
    pub(crate) async fn sent(&self, body: &str) -> String {
        let answer = self.send(body).await;
        assert_eq!(answer.status, StatusCode::ACCEPTED, "{}", answer.text);
        answer.json()["messageId"].as_str().expect("an id").to_owned()
    }

    /// Takes everything that can be taken, as a relay would, and keeps it.
    pub(crate) async fn claim(&self) -> Vec<Batch> {
        self.take().await.1
    }

    async fn take(&self) -> (Vec<Lease>, Vec<Batch>) {
        let rule = Arc::new(|_: &str| TopicRule {
            channel: 0,
            take: usize::MAX,
            hold_failed: true,
            hold_dead: true,
        });
        let beat = Beat {
            instance: Instance { id: self.relay, name: "relay-of-the-test".into() },
            lease: Duration::from_secs(60),
            held: vec![],
            take: true,
            rule: rule.clone(),
        };
        let leases = self.store.beat(&beat).await.expect("a beat").held;
        assert!(!leases.is_empty(), "another relay holds the lanes");
        let order = ClaimOrder { leases: leases.clone(), limit: 10_000, bytes: 64 << 20, rule };
        let turn = self.store.turn(vec![], Some(order)).await.expect("a turn");
        (leases, turn.batches)
    }

    /// Claims everything, and settles each message with what `verdict` says.
    pub(crate) async fn settle(&self, verdict: impl Fn(&str) -> Verdict) {
        let (leases, batches) = self.take().await;
        let settlements = batches
            .into_iter()
            .map(|batch| Settlement {
                batch: batch.id,
                lease: batch.lease,
                verdicts: batch
                    .messages
                    .iter()
                    .map(|claimed| (claimed.seq, verdict(&claimed.message.topic)))
                    .collect(),
                beside: Vec::new(),
            })
            .collect();
        let turn = self.store.turn(settlements, None).await.expect("a settlement");
        assert!(turn.fenced.is_empty(), "{turn:?}");
        self.store.release(&leases, store::Left::Untouched).await.expect("a release");
    }

    /// Sends everything that waits, as a relay would.
    pub(crate) async fn deliver(&self) {
        self.settle(|_| Verdict::Sent { ack_groups: vec!["default-consumer-group".into()] }).await;
    }

    /// A message that is Dead.
    pub(crate) async fn dead(&self, body: &str) -> String {
        let id = self.sent(body).await;
        self.settle(|_| Verdict::Dead {
            reason: "MaxAttempts(10) exceeded".into(),
            error: "the topic does not exist".into(),
            attempted: true,
            hold: true,
        })
        .await;
        id
    }
}

/// A flow that is watched, or one that is only counted.
fn flow(route: &str, group: Option<&str>, watched: bool) -> FlowView {
    FlowView {
        route: route.to_owned(),
        group: group.map(str::to_owned),
        total: 40,
        now: watched.then_some(2.5),
        usual: watched.then_some(8.0),
        dropped: watched.then_some(true),
    }
}

pub(crate) async fn call(router: &Router, request: Request<Body>) -> Answer {
    let response = router.clone().oneshot(request).await.expect("a router always answers");
    let (parts, body) = response.into_parts();
    let bytes = to_bytes(body, usize::MAX).await.expect("a whole answer");
    Answer {
        status: parts.status,
        headers: parts.headers,
        text: String::from_utf8(bytes.to_vec()).expect("text"),
    }
}

pub(crate) fn request(method: Method, path: &str, body: impl Into<Body>) -> Request<Body> {
    Request::builder()
        .method(method)
        .uri(path)
        .header(header::HOST, "localhost:5299")
        .body(body.into())
        .expect("a request")
}

pub(crate) fn json(method: Method, path: &str, body: impl Into<Body>) -> Request<Body> {
    let mut request = request(method, path, body);
    request.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
    request
}

fn contract() -> Contract {
    let route = Part {
        name: "default".into(),
        semantics: Some(Semantics::EffectivelyOnce),
        promises: vec!["a message stays in the store until `main` has confirmed it.".into()],
        ..Part::default()
    };
    Contract { routes: vec![route], ..Contract::default() }
}

fn route(name: &str, topics: &str, semantics: Semantics) -> RouteView {
    RouteView {
        name: name.into(),
        topics: vec![TopicPattern::new(topics)],
        broker: "main".into(),
        semantics,
        order: Order::Key,
        on_dead: OnDead::Hold,
        retry: RetryPolicy::default(),
        why: Some("orders must not be lost".into()),
    }
}

fn topology() -> Topology {
    let consumer = |group: &str, topics: &[&str]| ConsumerView {
        group: group.into(),
        topics: topics.iter().map(|topic| (*topic).into()).collect(),
        broker: "main".into(),
        semantics: Semantics::EffectivelyOnce,
        handler: "log".into(),
        dedup: "sql".into(),
        keep_ids: std::time::Duration::from_secs(7 * 24 * 60 * 60),
    };
    Topology {
        routes: vec![
            route("default", "*-events", Semantics::EffectivelyOnce),
            route("fleeting", "clicks", Semantics::BestEffort),
        ],
        consumers: vec![
            consumer("default-consumer-group", &["user-events", "order-events"]),
            consumer("analytics-group", &["analytics-events"]),
        ],
    }
}

fn rules() -> InboxRules {
    InboxRules { retry: RetryPolicy::default(), ordered: true, hold_dead: true, acknowledge: true }
}
