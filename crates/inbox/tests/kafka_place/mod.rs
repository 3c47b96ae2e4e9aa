//! A corner of a shared Kafka, and what the tests of transforming groups look at it with.

#![allow(dead_code, reason = "each test file uses its part of it")]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use broker::kafka::{Broker, Config};
use broker::{Browse, Outcome, Outgoing, Publisher, Span, Subscriber};
use chrono::{DateTime, TimeDelta, Utc};
use inbox::{Maker, Running, Transform};
use message::{Message, RetryPolicy};
use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use uuid::Uuid;

pub(crate) const GROUP: &str = "billing";

/// Longer than anything here takes, however slow the machine.
const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) struct Place {
    pub(crate) broker: Broker,
    server: String,
    prefix: String,
}

impl Place {
    /// Topics with so many partitions.
    pub(crate) fn new(partitions: u16) -> Self {
        let (server, prefix) = (testkit::servers::url("kafka"), format!("t{}.", Uuid::new_v4().simple()));
        let url = format!("{server}?prefix={prefix}&partitions={partitions}");
        let config = Config::from_url(&url).expect("the URL is right");
        Self { broker: Broker::open(config).expect("librdkafka can be used"), server, prefix }
    }

    /// Makes a topic whose messages have so many bytes at most.
    pub(crate) async fn make_small(&self, topic: &str, bytes: usize) {
        let host = self.server.split("://").nth(1).expect("the URL names a server").trim_end_matches('/');
        let admin: AdminClient<DefaultClientContext> =
            ClientConfig::new().set("bootstrap.servers", host).create().expect("a client can be made");
        let (name, bytes) = (format!("{}{topic}", self.prefix), bytes.to_string());
        let topic = NewTopic::new(&name, 1, TopicReplication::Fixed(1)).set("max.message.bytes", &bytes);
        let made = admin.create_topics([&topic], &AdminOptions::new()).await;
        made.expect("Kafka answers")[0].as_ref().expect("the topic can be made");
    }

    /// Publishes one message as it is.
    pub(crate) async fn publish(&self, message: Message) {
        let outcomes = self.broker.publish(vec![Outgoing::new(message, 1)]).await;
        assert_eq!(outcomes, [Outcome::Confirmed]);
    }

    pub(crate) fn start(&self, maker: Maker) -> Running {
        self.start_trying(maker, 3)
    }

    /// A group that gives a message up after so many failures.
    pub(crate) fn start_trying(&self, maker: Maker, max_attempts: u32) -> Running {
        let (first, cap) = (Duration::from_millis(20), Duration::from_secs(1));
        let retry = RetryPolicy { first, cap, max_attempts, ..RetryPolicy::default() };
        let together = self.broker.together().expect("Kafka has transactions");
        Transform::new(GROUP, maker, retry).start(together, vec!["orders".to_owned()])
    }

    /// Orders with these numbers, of ten keys.
    pub(crate) async fn order(&self, numbers: std::ops::Range<i64>) {
        let key = |number: i64| format!("k{}", number % 10);
        let order =
            |number: i64| Outgoing::new(Message::new("orders", number.to_string()).key(key(number)), number);
        let outcomes = self.broker.publish(numbers.map(order).collect()).await;
        assert!(outcomes.iter().all(|outcome| *outcome == Outcome::Confirmed), "{outcomes:?}");
    }

    /// How many messages are committed in a topic.
    pub(crate) async fn count(&self, topic: &str) -> usize {
        let mut seen = 0;
        let all = Span { since: DateTime::UNIX_EPOCH, until: Utc::now() + TimeDelta::minutes(1) };
        self.broker.browse(topic, all, &mut |_| seen += 1).await.expect("it can be read");
        seen
    }

    /// Waits until so many messages are committed in a topic; answers all of them, in the order of each partition.
    pub(crate) async fn read(&self, topic: &str, count: usize) -> Vec<Message> {
        let group = Uuid::new_v4().simple().to_string();
        let reader = self.broker.subscribe(&group, &[topic.to_owned()]).await;
        let mut reader = reader.expect("the group can be joined");
        let mut came = Vec::new();
        while came.len() < count {
            let more = tokio::time::timeout(PATIENCE, reader.receive(count - came.len())).await;
            let more = more.unwrap_or_else(|_| panic!("{} of {count} came", came.len()));
            came.extend(more.expect("messages can be received").into_iter().map(|delivery| delivery.message));
        }
        reader.close().await;
        came
    }

    /// Each order has one bill, and those of a key are in order.
    pub(crate) async fn check(&self, orders: i64) {
        let mut of_key: BTreeMap<String, Vec<i64>> = BTreeMap::new();
        for bill in self.read("bills", orders as usize).await {
            of_key.entry(bill.key.clone().unwrap_or_default()).or_default().push(number(&bill));
        }
        for (key, numbers) in &of_key {
            let first: i64 = key[1..].parse().expect("k and a number");
            let expected: Vec<i64> = (first..orders).step_by(10).collect();
            assert_eq!(*numbers, expected, "{key}");
        }
        assert_eq!(self.count("bills").await, orders as usize, "there are more bills than orders");
    }
}

pub(crate) fn number(message: &Message) -> i64 {
    String::from_utf8_lossy(&message.payload).parse().expect("a number")
}

/// The bill of an order.
pub(crate) fn bill(order: &Message) -> Message {
    Message::new("bills", order.payload.clone()).key(order.key.clone().unwrap_or_default())
}

/// Makes a bill of each order.
pub(crate) fn billing() -> Maker {
    Maker::closure(|order: Message| async move { Ok::<_, String>(vec![bill(&order)]) })
}

/// Shares the work of a test with its handler.
pub(crate) fn shared<T: Default>() -> (Arc<T>, Arc<T>) {
    let one = Arc::new(T::default());
    (Arc::clone(&one), one)
}
