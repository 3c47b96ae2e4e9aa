//! How a consumer joins its group again after its subscription failed.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod world;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use broker::embedded::Broker;
use broker::{Delivery, Position, ReceiveError, Subscriber, Subscription};
use inbox::{Consumer, Handler};
use world::{TOPIC, World, messages};

/// The real broker, whose first acknowledgement is lost on the way; notes who comes and goes.
#[derive(Clone)]
struct Unreliable {
    broker: Arc<Broker>,
    failed: Arc<AtomicBool>,
    seen: Arc<Mutex<Vec<&'static str>>>,
}

struct Member {
    subscription: Box<dyn Subscription>,
    broker: Unreliable,
}

#[async_trait]
impl Subscriber for Unreliable {
    async fn subscribe(&self, group: &str, topics: &[String]) -> Result<Box<dyn Subscription>, ReceiveError> {
        let subscription = self.broker.subscribe(group, topics).await?;
        self.seen.lock().unwrap().push("joined");
        Ok(Box::new(Member { subscription, broker: self.clone() }))
    }
}

#[async_trait]
impl Subscription for Member {
    async fn receive(&mut self, max: usize) -> Result<Vec<Delivery>, ReceiveError> {
        self.subscription.receive(max).await
    }

    async fn acknowledge(&mut self, positions: &[Position]) -> Result<(), ReceiveError> {
        if !self.broker.failed.swap(true, Ordering::SeqCst) {
            return Err(ReceiveError::Unreachable("cut off".to_owned()));
        }
        self.subscription.acknowledge(positions).await
    }

    async fn give_back(&mut self, positions: &[Position]) -> Result<(), ReceiveError> {
        self.subscription.give_back(positions).await
    }

    async fn close(self: Box<Self>) {
        self.subscription.close().await;
        self.broker.seen.lock().unwrap().push("left");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_subscription_that_failed_is_closed_before_the_next_one() {
    let world = World::new();
    let broker =
        Unreliable { broker: Arc::clone(&world.broker), failed: Arc::default(), seen: Arc::default() };
    world.publish(&messages(4, 5)).await;
    let group = Arc::new(world.group(Handler::Log));
    let running = Consumer::new(group, Arc::new(broker.clone()), vec![TOPIC.to_owned()]).start();
    world.processed(20).await;
    world::until(|| async { broker.seen.lock().unwrap().len() >= 3 }).await;
    running.drain().await;
    assert_eq!(*broker.seen.lock().unwrap(), ["joined", "left", "joined", "left"]);
}
