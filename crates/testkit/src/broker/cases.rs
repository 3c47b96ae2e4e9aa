//! The cases: each a sentence that is true of every broker.

pub mod publish;
pub mod receive;
pub mod transact;

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use broker::{Delivery, Outcome, Outgoing, Position, Subscription};
use message::Message;

use super::Broker;
use crate::rejection::patience;

/// Between two tries of something that must come in the end.
const PAUSE: Duration = Duration::from_millis(50);

/// Long enough to notice what must not come.
const NOTICE: Duration = Duration::from_millis(100);

fn outgoing(key: &str, seq: i64) -> Outgoing {
    Outgoing::new(Message::new("orders", seq.to_string()).key(key), seq)
}

/// Publishes messages numbered from `from`, spread over `keys` keys, one call for each round of keys so that
/// no broker need store several of a key in one call.
async fn publish(broker: &Arc<dyn Broker>, keys: i64, from: i64, count: i64) {
    let all: Vec<i64> = (from..from + count).collect();
    for round in all.chunks(usize::try_from(keys).expect("a few keys")) {
        let batch = round.iter().map(|seq| outgoing(&format!("key-{}", seq % keys), *seq)).collect();
        let outcomes = broker.publish(batch).await;
        assert!(outcomes.iter().all(|outcome| *outcome == Outcome::Confirmed), "{outcomes:?}");
    }
}

async fn subscribe(broker: &Arc<dyn Broker>, group: &str) -> Box<dyn Subscription> {
    broker.subscribe(group, &["orders".to_owned()]).await.expect("the group can be joined")
}

/// What comes of it, or nothing if that takes longer than anything that happens at all.
async fn patiently<T>(future: impl Future<Output = T>) -> Option<T> {
    let begun = Instant::now();
    let mut future = pin!(future);
    while begun.elapsed() < patience() {
        if let Ok(done) = tokio::time::timeout(PAUSE, &mut future).await {
            return Some(done);
        }
    }
    None
}

/// Receives until `count` have come.
async fn receive(subscription: &mut Box<dyn Subscription>, count: usize) -> Vec<Delivery> {
    let mut deliveries = Vec::new();
    while deliveries.len() < count {
        let more = patiently(subscription.receive(count - deliveries.len())).await;
        let more = more.unwrap_or_else(|| panic!("{} of {count} came", deliveries.len()));
        deliveries.extend(more.expect("messages can be received"));
    }
    deliveries
}

/// Receives until `count` have come and finishes them as they come: some brokers give no more of a key before what came
/// of it is done.
///
/// # Panics
/// When they do not come, or an acknowledgement is not taken.
pub async fn drain(subscription: &mut Box<dyn Subscription>, count: usize) -> Vec<Delivery> {
    let mut deliveries = Vec::new();
    while deliveries.len() < count {
        let more = patiently(subscription.receive(count - deliveries.len())).await;
        let more = more.unwrap_or_else(|| panic!("{} of {count} came", deliveries.len()));
        let more = more.expect("messages can be received");
        subscription.acknowledge(&positions(&more)).await.expect("an acknowledgement is taken");
        deliveries.extend(more);
    }
    deliveries
}

async fn nothing_comes(subscription: &mut Box<dyn Subscription>) -> bool {
    tokio::time::timeout(NOTICE, subscription.receive(10)).await.is_err()
}

/// Where deliveries are.
pub fn positions(deliveries: &[Delivery]) -> Vec<Position> {
    deliveries.iter().map(|delivery| delivery.position).collect()
}

/// The deliveries of one key as they were numbered: without order in the broker they come in any.
fn sorted(mut deliveries: Vec<Delivery>) -> Vec<Delivery> {
    deliveries.sort_by_key(number);
    deliveries
}

/// The numbers that came, sorted; a number that came twice is there twice.
fn numbers(deliveries: &[Delivery]) -> Vec<i64> {
    let mut numbers: Vec<i64> = deliveries.iter().map(number).collect();
    numbers.sort_unstable();
    numbers
}

/// Brokers that do not carry the sequence number carry the payload.
fn number(delivery: &Delivery) -> i64 {
    let text = std::str::from_utf8(&delivery.message.payload).expect("the payload is a number");
    text.parse().expect("the payload is a number")
}

fn assert_each_key_in_order(deliveries: &[Delivery]) {
    let mut last: BTreeMap<&str, i64> = BTreeMap::new();
    for delivery in deliveries {
        let key = delivery.message.key.as_deref().expect("every message has a key");
        let before = last.insert(key, number(delivery));
        assert!(before.is_none_or(|before| before < number(delivery)), "{key}: {before:?} came too early");
    }
}
