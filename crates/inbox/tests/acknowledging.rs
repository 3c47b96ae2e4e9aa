//! How the producer hears that a message is done.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod world;

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use async_trait::async_trait;
use axum::http::StatusCode;
use inbox::{Acknowledge, Condition, Handler};
use message::{Message, MessageId};
use store::sqlite::SqliteStore;
use store::{
    Acknowledged, Amend, Append, Beat, Claim, ClaimOrder, Edit, Error, Inspect, Instance, Lanes, Receipt,
    Retention, TopicRule,
};
use uuid::Uuid;
use world::{Endpoint, GROUP, TOPIC, World, arrival, messages, ok, until};

fn acknowledge_to(producer: &Endpoint) -> Acknowledge {
    Acknowledge::http(format!("http://{}", producer.address)).expect("a URL")
}

#[tokio::test(flavor = "multi_thread")]
async fn the_producer_is_told_until_it_answers_and_only_then_the_broker() {
    let world = World::new();
    let (open, closed) = std::sync::mpsc::channel::<()>();
    let closed = std::sync::Mutex::new(closed);
    let is_open = std::sync::atomic::AtomicBool::new(false);
    let producer = Endpoint::new(move |_, _| {
        if closed.lock().unwrap().try_recv().is_ok() {
            is_open.store(true, SeqCst);
        }
        if is_open.load(SeqCst) { ok() } else { (StatusCode::SERVICE_UNAVAILABLE, String::new()) }
    })
    .await;
    // Of one key, so that they come in one batch.
    let all = messages(1, 4);
    world.publish(&all).await;
    let running = world.start(world.group(Handler::Log).acknowledge(acknowledge_to(&producer)));

    until(|| async { producer.requests().len() >= 4 }).await;
    until(|| async { matches!(running.status().condition, Condition::Paused { .. }) }).await;
    assert_eq!(world.counts().await.processed, 4, "the work is done meanwhile");
    // Asked to stop now, it leaves the messages with the broker, which delivers them again.
    running.drain().await;
    let running = world.start(world.group(Handler::Log).acknowledge(acknowledge_to(&producer)));
    until(|| async { running.status().duplicates >= 1 }).await;

    open.send(()).unwrap();
    until(|| async { running.status().condition == Condition::Running && running.status().duplicates == 4 })
        .await;
    running.drain().await;
    for message in &all {
        let body = format!(r#"{{"consumerGroup":"{GROUP}","messageId":"{}"}}"#, message.id);
        assert!(producer.requests().iter().any(|request| request.text() == body), "{body}");
    }
    assert_eq!(world.counts().await.processed, 4, "nothing is done twice");
}

#[tokio::test]
async fn a_producer_that_no_longer_knows_the_message_is_not_asked_again() {
    let world = World::new();
    for status in [StatusCode::NOT_FOUND, StatusCode::CONFLICT, StatusCode::GONE] {
        let producer = Endpoint::new(move |_, _| (status, String::new())).await;
        let group = world.group(Handler::Log).acknowledge(acknowledge_to(&producer));
        let receipts = group.process(vec![arrival(Message::new(TOPIC, "{}"))]).await.unwrap();
        assert_eq!(receipts, [Receipt::Done]);
        assert_eq!(producer.requests().len(), 1);
    }
}

#[tokio::test]
async fn a_duplicate_is_acknowledged_again() {
    let world = World::new();
    let producer = Endpoint::new(|_, _| ok()).await;
    let group = world.group(Handler::Log).acknowledge(acknowledge_to(&producer));
    let message = arrival(Message::new(TOPIC, "{}"));
    assert_eq!(group.process(vec![message.clone()]).await.unwrap(), [Receipt::Done]);
    assert_eq!(group.process(vec![message]).await.unwrap(), [Receipt::Duplicate]);
    assert_eq!(producer.requests().len(), 2);
}

#[tokio::test]
async fn a_store_that_is_the_producers_hears_it_with_the_mark() {
    let world = World::new();
    let message = Message::new(TOPIC, "{}");
    world.store.append(vec![message.clone().into()]).await.unwrap();
    claim_all(&world).await;
    let group = world.group(Handler::Log).acknowledge(Acknowledge::InStore);
    let id = message.id;
    assert_eq!(group.process(vec![arrival(message)]).await.unwrap(), [Receipt::Done]);
    let record = world.store.record(id).await.unwrap().expect("it was written");
    assert_eq!(record.acknowledgements.iter().map(|by| by.group.as_str()).collect::<Vec<_>>(), [GROUP]);
}

/// The producer's store, which is away for the first calls.
struct Returning {
    store: Arc<SqliteStore>,
    away: AtomicUsize,
}

#[async_trait]
impl Amend for Returning {
    async fn acknowledge(&self, done: Vec<(MessageId, String)>) -> Result<Vec<Acknowledged>, Error> {
        let back = self.away.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1)).is_err();
        if back { self.store.acknowledge(done).await } else { Err(away()) }
    }

    async fn requeue(&self, _: MessageId, _: &str) -> Result<(), Error> {
        Err(away())
    }

    async fn edit(&self, _: MessageId, _: &Edit, _: &str) -> Result<(), Error> {
        Err(away())
    }

    async fn discard(&self, _: MessageId, _: &str) -> Result<(), Error> {
        Err(away())
    }

    async fn delete(&self, _: MessageId, _: &str) -> Result<(), Error> {
        Err(away())
    }

    async fn redeliver(&self, _: MessageId, _: &str, _: &str) -> Result<bool, Error> {
        Err(away())
    }

    async fn clean(&self, _: &Retention) -> Result<u64, Error> {
        Err(away())
    }
}

fn away() -> Error {
    Error::Unavailable { reason: "away".to_owned(), retry_after: Duration::ZERO }
}

/// A group that remembers in another place than its producer writes.
#[tokio::test]
async fn a_producers_store_elsewhere_is_told_after_the_mark_until_it_answers_and_once() {
    let (here, there) = (World::new(), World::new());
    let message = Message::new(TOPIC, "{}");
    there.store.append(vec![message.clone().into()]).await.unwrap();
    claim_all(&there).await;
    let producer = Arc::new(Returning { store: Arc::clone(&there.store), away: AtomicUsize::new(2) });
    let group = here.group(Handler::Log).acknowledge(Acknowledge::Store(producer));
    let id = message.id;
    assert_eq!(group.process(vec![arrival(message.clone())]).await.unwrap(), [Receipt::Done]);
    assert_eq!(group.process(vec![arrival(message)]).await.unwrap(), [Receipt::Duplicate]);
    let record = there.store.record(id).await.unwrap().expect("it was written");
    assert_eq!(record.acknowledgements.iter().map(|by| by.group.as_str()).collect::<Vec<_>>(), [GROUP]);
    assert!(here.store.record(id).await.unwrap().is_none());
    // One that the producer does not keep stops nobody.
    let stranger = arrival(Message::new(TOPIC, "{}"));
    assert_eq!(group.process(vec![stranger]).await.unwrap(), [Receipt::Done]);
}

/// A message that nobody has taken cannot have reached a consumer: it must be in a relay's hands first.
async fn claim_all(world: &World) {
    let rule = Arc::new(|_: &str| TopicRule { channel: 0, take: 10, hold_failed: true, hold_dead: true });
    let instance = Instance { id: Uuid::now_v7(), name: "test".to_owned() };
    let lease = Duration::from_secs(30);
    let beat = Beat { instance, lease, held: Vec::new(), take: true, rule: rule.clone() };
    let leases = world.store.beat(&beat).await.unwrap().held;
    let order = ClaimOrder { leases, limit: 10, bytes: 1 << 20, rule };
    let turn = world.store.turn(Vec::new(), Some(order)).await.unwrap();
    assert!(!turn.batches.is_empty());
}
