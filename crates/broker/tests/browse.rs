//! Reading a broker beside its groups, on every broker that can be read, against real servers: all is seen, and nobody
//! notices.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use async_nats::jetstream;
use broker::{
    Browse, Delivery, Format, Outcome, Outgoing, Position, Publisher, Seen, Span, Subscriber, Subscription,
};
use chrono::{DateTime, TimeDelta, Utc};
use message::{Message, MessageId};
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::{ClientConfig, Offset, TopicPartitionList};
use testkit::servers::url;
use uuid::Uuid;

const PATIENCE: Duration = Duration::from_secs(30);

/// More than one look of any reader.
const COUNT: i64 = 2_500;

fn outgoing(seq: i64) -> Outgoing {
    let source: Arc<str> = "/shop".into();
    let format = match seq % 3 {
        0 => Format::Native,
        1 => Format::CloudEvents { source },
        _ => Format::CloudEventsStructured { source },
    };
    let message = Message::new("orders", format!("\"{seq}\"")).key(format!("key-{}", seq % 50));
    Outgoing { format, ..Outgoing::new(message, seq) }
}

async fn publish(broker: &impl Publisher, batch: &[Outgoing]) {
    for part in batch.chunks(500) {
        let outcomes = broker.publish(part.to_vec()).await;
        assert!(outcomes.iter().all(|outcome| *outcome == Outcome::Confirmed), "{outcomes:?}");
    }
}

fn around(now: DateTime<Utc>) -> Span {
    Span { since: now - TimeDelta::minutes(5), until: now + TimeDelta::minutes(5) }
}

async fn browse(broker: &impl Browse, topic: &str, span: Span) -> (Vec<Seen>, Option<DateTime<Utc>>) {
    let mut all = Vec::new();
    let kept = broker.browse(topic, span, &mut |seen| all.push(seen)).await.expect("it can be read");
    (all, kept)
}

async fn receive(subscription: &mut Box<dyn Subscription>, count: usize) -> Vec<Delivery> {
    let mut deliveries = Vec::new();
    while deliveries.len() < count {
        let more = tokio::time::timeout(PATIENCE, subscription.receive(count - deliveries.len())).await;
        let more = more.unwrap_or_else(|_| panic!("{} of {count} came", deliveries.len()));
        deliveries.extend(more.expect("messages can be received"));
    }
    deliveries
}

async fn finish(subscription: &mut Box<dyn Subscription>, deliveries: &[Delivery]) {
    let positions: Vec<Position> = deliveries.iter().map(|delivery| delivery.position).collect();
    subscription.acknowledge(&positions).await.expect("an acknowledgement is taken");
}

/// What every reader keeps true.
async fn all_is_seen_and_nobody_notices(broker: &(impl Publisher + Subscriber + Browse)) {
    let now = Utc::now();
    assert_eq!(browse(broker, "orders", around(now)).await, (vec![], None), "the topic is not there");

    let mut sent: Vec<Outgoing> = (0..COUNT).map(outgoing).collect();
    publish(broker, &sent).await;
    // Sent again on purpose: the same message, another delivery.
    let again = Outgoing { delivery: 1, ..sent[7].clone() };
    publish(broker, std::slice::from_ref(&again)).await;
    sent.push(again);

    // A group in the middle of its work.
    let topics = ["orders".to_owned()];
    let mut billing = broker.subscribe("billing", &topics).await.expect("the group can be joined");
    let done = receive(&mut billing, 500).await;
    finish(&mut billing, &done).await;

    let (seen, kept) = browse(broker, "orders", around(now)).await;
    assert_eq!(kept, None, "nothing was removed");
    let key = |id: MessageId, seq: i64, delivery: u32| (id, seq, delivery);
    let found: BTreeSet<_> = seen.iter().map(|one| key(one.id, one.seq.unwrap(), one.delivery)).collect();
    let expected: BTreeSet<_> = sent.iter().map(|one| key(one.message.id, one.seq, one.delivery)).collect();
    assert_eq!(found, expected);
    assert_eq!(seen.len(), sent.len(), "each as often as it lies there");
    let minute = TimeDelta::minutes(1);
    assert!(seen.iter().all(|one| (one.stored_at - now).abs() < minute), "times are those of storing");

    let later = Span { since: now + minute * 2, until: now + minute * 4 };
    let earlier = Span { since: now - minute * 4, until: now - minute * 2 };
    for span in [earlier, later] {
        assert_eq!(browse(broker, "orders", span).await.0, [], "{span:?}");
    }
    let latest = seen.iter().map(|one| one.stored_at).max().unwrap();
    let (some, _) = browse(broker, "orders", Span { since: around(now).since, until: latest }).await;
    let expected = seen.iter().filter(|one| one.stored_at < latest).count();
    assert_eq!(some.len(), expected, "what was stored at the end of the span is not in it");

    // The group goes on where it was, and a new one begins at the beginning.
    let rest = receive(&mut billing, sent.len() - done.len()).await;
    finish(&mut billing, &rest).await;
    let all: BTreeSet<_> = done.iter().chain(&rest).map(|one| (one.message.id, one.delivery)).collect();
    assert_eq!(all.len(), sent.len(), "each came once");
    let mut audit = broker.subscribe("audit", &topics).await.expect("the group can be joined");
    assert_eq!(receive(&mut audit, sent.len()).await.len(), sent.len());
    assert_eq!(browse(broker, "orders", around(now)).await.0.len(), sent.len(), "what was read stays");
    audit.close().await;
    billing.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_embedded_broker_is_read_beside_its_groups() {
    let folder = tempfile::tempdir().unwrap();
    let config = broker::embedded::Config::new(folder.path().join("broker.db"));
    let broker = broker::embedded::Broker::open(config).unwrap();
    all_is_seen_and_nobody_notices(&broker).await;
    let groups: Vec<_> = broker.topics().await.unwrap().remove(0).groups;
    let names: Vec<&str> = groups.iter().map(|group| group.group.as_str()).collect();
    assert_eq!(names, ["audit", "billing"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_embedded_broker_says_since_when_it_keeps_everything() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = broker::embedded::Config::new(folder.path().join("broker.db"));
    (config.retain, config.partitions) = (Duration::ZERO, 2);
    let broker = broker::embedded::Broker::open(config).unwrap();
    let mut billing = broker.subscribe("billing", &["orders".to_owned()]).await.unwrap();
    publish(&broker, &(0..100).map(outgoing).collect::<Vec<_>>()).await;
    let before = Utc::now();
    let done = receive(&mut billing, 100).await;
    finish(&mut billing, &done).await;
    assert_eq!(broker.trim().await.unwrap(), 100);
    publish(&broker, &(100..200).map(outgoing).collect::<Vec<_>>()).await;
    let (seen, kept) = browse(&broker, "orders", around(before)).await;
    assert_eq!(seen.len(), 100);
    let kept = kept.expect("something was removed");
    let oldest = seen.iter().map(|one| one.stored_at).min().unwrap();
    assert!(kept >= oldest, "{kept} {oldest}");
    assert!(kept <= Utc::now(), "{kept}");
}

fn redis(
    prefix: &str,
    change: impl FnOnce(&mut broker::redis_streams::Config),
) -> broker::redis_streams::Broker {
    let mut config = broker::redis_streams::Config::from_url(&url("redis")).unwrap();
    (config.prefix, config.partitions) = (prefix.to_owned(), 4);
    change(&mut config);
    broker::redis_streams::Broker::open(config).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn redis_streams_are_read_beside_their_groups() {
    let prefix = format!("t{}", Uuid::new_v4().simple());
    all_is_seen_and_nobody_notices(&redis(&prefix, |_| {})).await;
    let server = redis::Client::open(url("redis")).unwrap();
    let mut server = server.get_multiplexed_async_connection().await.unwrap();
    let stream = format!("{{{prefix}}}:stream:orders:0");
    let groups: Vec<redis::Value> =
        redis::cmd("XINFO").arg("GROUPS").arg(stream).query_async(&mut server).await.unwrap();
    assert_eq!(groups.len(), 2, "the reader is none of them: {groups:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn redis_streams_say_since_when_they_keep_everything() {
    let prefix = format!("t{}", Uuid::new_v4().simple());
    let broker = redis(&prefix, |config| (config.retain, config.partitions) = (Duration::ZERO, 1));
    let mut billing = broker.subscribe("billing", &["orders".to_owned()]).await.unwrap();
    publish(&broker, &(0..1_000).map(outgoing).collect::<Vec<_>>()).await;
    let now = Utc::now();
    assert_eq!(browse(&broker, "orders", around(now)).await.1, None, "nothing was removed yet");
    let done = receive(&mut billing, 1_000).await;
    finish(&mut billing, &done).await;
    broker.sweep().await.unwrap();
    let (seen, kept) = browse(&broker, "orders", around(now)).await;
    assert!(seen.len() < 1_000, "{}", seen.len());
    let kept = kept.expect("something was removed");
    assert!(seen.iter().map(|one| one.stored_at).min().is_none_or(|oldest| oldest < kept), "{kept}");
}

/// A corner of Kafka with a prefix that nobody else has.
struct Corner {
    prefix: String,
    client: ClientConfig,
}

impl Corner {
    fn new() -> Self {
        let mut client = ClientConfig::new();
        client.set("bootstrap.servers", url("kafka").trim_start_matches("kafka://"));
        Self { prefix: format!("t{}.", Uuid::new_v4().simple()), client }
    }

    fn broker(&self) -> broker::kafka::Broker {
        let url = format!("{}?prefix={}&partitions=4", url("kafka"), self.prefix);
        broker::kafka::Broker::open(broker::kafka::Config::from_url(&url).unwrap()).unwrap()
    }

    fn admin(&self) -> AdminClient<DefaultClientContext> {
        self.client.create().unwrap()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn kafka_is_read_beside_its_groups() {
    let corner = Corner::new();
    all_is_seen_and_nobody_notices(&corner.broker()).await;
    let looker: BaseConsumer = corner.client.create().unwrap();
    let groups = looker.fetch_group_list(None, PATIENCE).unwrap();
    let names: Vec<&str> = groups.groups().iter().map(|group| group.name()).collect();
    let ours = names.iter().filter(|name| name.starts_with(&corner.prefix)).count();
    assert_eq!(ours, 2, "the reader is none of them: {names:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn kafka_says_since_when_it_keeps_everything() {
    let corner = Corner::new();
    let (admin, name) = (corner.admin(), format!("{}orders", corner.prefix));
    // Its size decides, so its age promises nothing.
    let topic = NewTopic::new(&name, 1, TopicReplication::Fixed(1)).set("retention.bytes", "100000000");
    admin.create_topics([&topic], &AdminOptions::new()).await.unwrap()[0].as_ref().unwrap();
    let broker = corner.broker();
    publish(&broker, &(0..100).map(outgoing).collect::<Vec<_>>()).await;
    let now = Utc::now();
    let (seen, kept) = browse(&broker, "orders", around(now)).await;
    assert_eq!((seen.len(), kept), (100, None));
    let mut gone = TopicPartitionList::new();
    gone.add_partition_offset(&name, 0, Offset::Offset(40)).unwrap();
    admin.delete_records(&gone, &AdminOptions::new()).await.unwrap();
    let (seen, kept) = browse(&broker, "orders", around(now)).await;
    let left: BTreeSet<i64> = seen.iter().filter_map(|one| one.seq).collect();
    assert_eq!(left, (40..100).collect());
    let first = seen.iter().find(|one| one.seq == Some(40)).unwrap();
    assert_eq!(kept, Some(first.stored_at + TimeDelta::milliseconds(1)));
    let earlier = Span { since: now - TimeDelta::hours(1), until: now - TimeDelta::minutes(30) };
    assert!(browse(&broker, "orders", earlier).await.1.is_some_and(|kept| kept >= now), "all of it is gone");
}

#[tokio::test(flavor = "multi_thread")]
async fn kafka_promises_nothing_of_a_topic_that_keeps_only_the_last_of_each_key() {
    let corner = Corner::new();
    let (admin, broker) = (corner.admin(), corner.broker());
    for (topic, policy) in [("latest", "compact"), ("both", "compact,delete")] {
        let name = format!("{}{topic}", corner.prefix);
        let new = NewTopic::new(&name, 1, TopicReplication::Fixed(1)).set("cleanup.policy", policy);
        admin.create_topics([&new], &AdminOptions::new()).await.unwrap()[0].as_ref().unwrap();
        let now = Utc::now();
        publish(&broker, &[Outgoing::new(Message::new(topic, "1").key("a"), 1)]).await;
        let (seen, kept) = browse(&broker, topic, around(now)).await;
        assert_eq!(seen.len(), 1, "{policy}");
        assert!(kept.is_some_and(|kept| kept >= now), "{policy}: {kept:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn kafka_tells_what_a_group_made() {
    let corner = Corner::new();
    let broker = corner.broker();
    let now = Utc::now();
    let order = MessageId::new().to_string();
    let made = Message::new("bills", "1").key("a").header(Seen::MADE_OF, order);
    // A header of somebody's own that happens to have the name.
    let bread = Message::new("bills", "1").key("a").header(Seen::MADE_OF, "flour");
    let ids = [made.id, bread.id];
    publish(&broker, &[Outgoing::new(made, 1), Outgoing::new(bread, 2)]).await;
    let (seen, _) = browse(&broker, "bills", around(now)).await;
    let found: Vec<_> = seen.iter().map(|one| (one.id, one.made)).collect();
    assert_eq!(found, [(ids[0], true), (ids[1], false)]);
}

fn nats(prefix: &str, change: impl FnOnce(&mut broker::nats::Config)) -> broker::nats::Broker {
    let url = format!("{}?prefix={prefix}&partitions=4&timeout=5s&lease=5s", url("nats"));
    let mut config = broker::nats::Config::from_url(&url).unwrap();
    change(&mut config);
    broker::nats::Broker::open(config).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_jetstream_is_read_beside_its_groups() {
    let prefix = format!("t{}", Uuid::new_v4().simple());
    let broker = nats(&prefix, |_| {});
    all_is_seen_and_nobody_notices(&broker).await;
    let server = jetstream::new(async_nats::connect(url("nats")).await.unwrap());
    let stream = server.get_stream(&prefix).await.unwrap();
    // Two groups on four partitions, and nobody else.
    assert_eq!(stream.get_info().await.unwrap().state.consumer_count, 8);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_jetstream_says_since_when_it_keeps_everything() {
    let prefix = format!("t{}", Uuid::new_v4().simple());
    let broker = nats(&prefix, |config| config.retain = Duration::from_secs(2));
    let now = Utc::now();
    publish(&broker, &(0..100).map(outgoing).collect::<Vec<_>>()).await;
    let kept = testkit::within(PATIENCE, "the oldest are removed", || async {
        let (seen, kept) = browse(&broker, "orders", around(now)).await;
        kept.filter(|_| seen.is_empty())
    });
    let kept = kept.await;
    assert!(kept > now && kept < Utc::now(), "{kept}");
}
