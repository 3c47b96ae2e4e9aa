//! RabbitMQ's own traps, each on a real server. What every broker keeps true is in `rabbitmq_conformance.rs`.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use broker::rabbitmq::{Broker, Config};
use broker::{
    Delivery, Examine, Health, Outcome, Outgoing, Plan, Position, Publisher, ReceiveError, Subscriber,
    Subscription,
};
use lapin::options::{
    BasicConsumeOptions, BasicRejectOptions, ExchangeDeleteOptions, QueueBindOptions, QueueDeclareOptions,
    QueueDeleteOptions,
};
use lapin::types::FieldTable;
use lapin::{Channel, Connection, ConnectionProperties};
use message::Message;
use testkit::eventually;
use testkit::servers::{Own, url};

#[path = "rabbitmq_server/management.rs"]
mod management;

use futures::StreamExt;
use management::Management;

/// Long enough for anything that happens at all.
const PATIENCE: Duration = Duration::from_secs(30);

/// Names of a test's own at a server.
struct Names {
    url: String,
    prefix: String,
}

impl Names {
    fn at(url: impl Into<String>) -> Self {
        Self { url: url.into(), prefix: format!("test-{}", uuid::Uuid::new_v4().simple()) }
    }

    /// With two queues for each group, unless the settings say otherwise.
    fn config(&self, settings: &str) -> Config {
        let url = format!("{}?prefix={}&partitions=2&timeout=10s&{settings}", self.url, self.prefix);
        Config::from_url(&url).unwrap()
    }

    fn open(&self, settings: &str) -> Broker {
        Broker::open(self.config(settings)).unwrap()
    }

    fn queue(&self, group: &str, partition: u16) -> String {
        format!("{}:{group}:orders:{partition}", self.prefix)
    }

    /// Somebody else's client.
    async fn somebody(&self) -> (Connection, Channel) {
        let url = format!("{}/%2f", self.url);
        let connection = Connection::connect(&url, ConnectionProperties::default()).await.unwrap();
        let channel = connection.create_channel().await.unwrap();
        (connection, channel)
    }

    /// Removes what a test made.
    async fn done(&self, groups: &[&str]) {
        let broker = self.open("");
        for group in groups {
            broker.forget(group, &["orders".to_owned()]).await.unwrap();
        }
        let (_connection, channel) = self.somebody().await;
        let exchange = self.prefix.as_str().into();
        channel.exchange_delete(exchange, ExchangeDeleteOptions::default()).await.unwrap();
    }
}

fn outgoing(seq: i64) -> Outgoing {
    Outgoing::new(Message::new("orders", seq.to_string()).key(format!("key-{seq}")), seq)
}

async fn one(broker: &Broker, seq: i64) -> Outcome {
    broker.publish(vec![outgoing(seq)]).await.remove(0)
}

/// As a consumer does: a server that has just come back may not have its queues ready, and is asked again.
async fn subscribe(broker: &Broker, group: &str) -> Box<dyn Subscription> {
    let begun = Instant::now();
    loop {
        match broker.subscribe(group, &["orders".to_owned()]).await {
            Err(ReceiveError::Unreachable(_)) if begun.elapsed() < PATIENCE => {}
            subscribed => return subscribed.unwrap(),
        }
    }
}

async fn receive(subscription: &mut Box<dyn Subscription>, count: usize) -> Vec<Delivery> {
    let mut deliveries = Vec::new();
    while deliveries.len() < count {
        let more = tokio::time::timeout(PATIENCE, subscription.receive(count - deliveries.len())).await;
        deliveries.extend(more.unwrap_or_else(|_| panic!("{} of {count} came", deliveries.len())).unwrap());
    }
    deliveries
}

/// Everything that is there, until `all` have been seen.
async fn numbers(broker: &Broker, group: &str, all: &BTreeSet<i64>) -> BTreeSet<i64> {
    let mut subscription = subscribe(broker, group).await;
    let mut seen = BTreeSet::new();
    let begun = Instant::now();
    while !all.is_subset(&seen) && begun.elapsed() < PATIENCE {
        let more = tokio::time::timeout(PATIENCE, subscription.receive(1000)).await;
        let Ok(more) = more else { break };
        let more = more.unwrap();
        let positions: Vec<Position> = more.iter().map(|delivery| delivery.position).collect();
        seen.extend(more.iter().filter_map(|delivery| delivery.seq));
        subscription.acknowledge(&positions).await.unwrap();
    }
    subscription.close().await;
    seen
}

#[tokio::test(flavor = "multi_thread")]
async fn what_no_queue_wants_is_misconfigured_although_rabbitmq_acknowledges_it() {
    let names = Names::at(url("rabbitmq"));
    let broker = names.open("");
    let outcome = one(&broker, 1).await;
    let Outcome::Misconfigured { error } = &outcome else { panic!("{outcome:?}") };
    assert!(error.contains("`orders`") && error.contains("groups="), "{error}");
    let mut subscription = subscribe(&broker, "billing").await;
    assert_eq!(one(&broker, 2).await, Outcome::Confirmed);
    assert_eq!(receive(&mut subscription, 1).await[0].seq, Some(2));
    names.done(&["billing"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_confirmed_and_nowhere_when_the_binding_goes_while_messages_flow() {
    let names = Names::at(url("rabbitmq"));
    assert_eq!(one(&names.open("groups=billing"), 0).await, Outcome::Confirmed);
    // One that does not mend what somebody removes.
    let broker = names.open("create=false");
    let (_connection, channel) = names.somebody().await;
    let exchange = || names.prefix.as_str().into();
    let mischief = async {
        for round in 0..30_u64 {
            for partition in 0..2 {
                let (queue, key) = (names.queue("billing", partition), format!("orders.@{partition}"));
                let (queue, key) = (queue.as_str().into(), key.as_str().into());
                if round % 2 == 0 {
                    channel.queue_unbind(queue, exchange(), key, FieldTable::default()).await.unwrap();
                } else {
                    let options = QueueBindOptions::default();
                    channel.queue_bind(queue, exchange(), key, options, FieldTable::default()).await.unwrap();
                }
            }
            // Not to wait for anything: so that some batches are cut in the middle, and some are not.
            tokio::time::sleep(Duration::from_millis(5 + round % 7)).await;
        }
    };
    let publish = async {
        let (mut confirmed, mut returned, mut next) = (BTreeSet::from([0]), 0, 1);
        while next < 20_001 {
            let batch: Vec<_> = (next..next + 500).map(outgoing).collect();
            for (seq, outcome) in (next..).zip(broker.publish(batch).await) {
                match outcome {
                    Outcome::Confirmed => assert!(confirmed.insert(seq)),
                    Outcome::Misconfigured { .. } => returned += 1,
                    other => panic!("{other:?}"),
                }
            }
            next += 500;
        }
        (confirmed, returned)
    };
    let (_, (confirmed, returned)) = tokio::join!(mischief, publish);
    assert!(returned > 0 && confirmed.len() > 1, "{returned} came back, {} were confirmed", confirmed.len());
    let stored = numbers(&names.open(""), "billing", &confirmed).await;
    let lost: Vec<_> = confirmed.difference(&stored).collect();
    assert!(lost.is_empty(), "confirmed and nowhere: {lost:?}");
    names.done(&["billing"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_that_is_deleted_is_missed_and_made_again() {
    let names = Names::at(url("rabbitmq"));
    let broker = names.open("groups=billing");
    let (_connection, channel) = names.somebody().await;
    for round in 0..5 {
        assert_eq!(one(&broker, round).await, Outcome::Confirmed);
        for partition in 0..2 {
            let queue = names.queue("billing", partition);
            channel.queue_delete(queue.as_str().into(), QueueDeleteOptions::default()).await.unwrap();
        }
        let outcome = one(&broker, round).await;
        assert!(matches!(outcome, Outcome::Misconfigured { .. }), "{outcome:?}");
    }
    assert_eq!(one(&broker, 9).await, Outcome::Confirmed);
    assert_eq!(numbers(&broker, "billing", &BTreeSet::from([9])).await, BTreeSet::from([9]));
    names.done(&["billing"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_exchange_that_is_deleted_costs_a_confirmation_and_no_message() {
    let names = Names::at(url("rabbitmq"));
    let broker = names.open("groups=billing");
    assert_eq!(one(&broker, 0).await, Outcome::Confirmed);
    let strict = names.open("create=false");
    assert_eq!(one(&strict, 1).await, Outcome::Confirmed);
    let (_connection, channel) = names.somebody().await;
    for round in 1..=5 {
        let exchange = names.prefix.as_str().into();
        channel.exchange_delete(exchange, ExchangeDeleteOptions::default()).await.unwrap();
        // The channel breaks with everything that is on it.
        let batch: Vec<_> = (0..50).map(|n| outgoing(round * 100 + n)).collect();
        let outcomes = broker.publish(batch.clone()).await;
        let doubtful = |outcome: &Outcome| matches!(outcome, Outcome::Unconfirmed { .. });
        assert!(outcomes.iter().all(doubtful), "{outcomes:?}");
        if round == 1 {
            assert!(doubtful(&one(&strict, 2).await));
            let outcome = one(&strict, 2).await;
            assert!(matches!(outcome, Outcome::Misconfigured { .. }), "{outcome:?}");
        }
        let outcomes = broker.publish(batch).await;
        assert!(outcomes.iter().all(|outcome| *outcome == Outcome::Confirmed), "{outcomes:?}");
    }
    let all: BTreeSet<i64> = (1..=5).flat_map(|round| round * 100..round * 100 + 50).collect();
    assert!(all.is_subset(&numbers(&broker, "billing", &all).await));
    names.done(&["billing"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_short_of_memory_is_unreachable_until_it_is_not() {
    let own = Own::start("rabbitmq");
    let management = Management::of(own.url());
    let names = Names::at(own.url());
    let broker = names.open("groups=billing");
    assert_eq!(one(&broker, 0).await, Outcome::Confirmed);
    management.ctl(&["set_vm_memory_high_watermark", "0"]);
    // The first that is published is what RabbitMQ blocks the connection for.
    let begun = Instant::now();
    let outcome = one(&broker, 1).await;
    assert!(matches!(outcome, Outcome::Unconfirmed { .. } | Outcome::Unreachable { .. }), "{outcome:?}");
    for seq in 2..20 {
        let outcome = one(&broker, seq).await;
        assert!(matches!(outcome, Outcome::Unreachable { .. }), "{outcome:?}");
    }
    assert!(begun.elapsed() < Duration::from_secs(8), "nobody waits for a time limit: {:?}", begun.elapsed());
    management.ctl(&["set_vm_memory_high_watermark", "0.4"]);
    assert!(eventually(PATIENCE, || async { one(&broker, 1).await == Outcome::Confirmed }).await);
    let all = BTreeSet::from([0, 1]);
    assert_eq!(numbers(&broker, "billing", &all).await, all);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_confirmed_is_there_after_a_crash_of_the_server() {
    let own = Own::start("rabbitmq");
    let names = Names::at(own.url());
    let broker = names.open("groups=billing");
    let mut confirmed = BTreeSet::new();
    for round in 0..3 {
        let (begun, mut next) = (Instant::now(), round * 100_000);
        let mut crashing = false;
        loop {
            // The crash is asked for by a program that takes its time to start: no more than it needs is written meanwhile.
            let size = if crashing { 5 } else { 100 };
            let outcomes = broker.publish((next..next + size).map(outgoing).collect()).await;
            let said = (next..).zip(&outcomes);
            confirmed.extend(said.filter(|(_, said)| **said == Outcome::Confirmed).map(|(seq, _)| seq));
            if outcomes.iter().any(|said| *said != Outcome::Confirmed) {
                break;
            }
            next += size;
            if !crashing && next % 100_000 == 600 {
                crashing = true;
                let management = Management::of(own.url());
                std::thread::spawn(move || management.crash());
            }
            assert!(begun.elapsed() < 3 * PATIENCE, "it does not crash");
        }
        own.stop();
        own.resume();
    }
    assert!(confirmed.len() > 1_000, "{}", confirmed.len());
    let stored = numbers(&broker, "billing", &confirmed).await;
    let lost: Vec<_> = confirmed.difference(&stored).collect();
    assert!(lost.is_empty(), "confirmed and lost: {} of {}", lost.len(), confirmed.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_larger_than_the_servers_own_limit_is_rejected_alone() {
    let own = Own::start("rabbitmq");
    let names = Names::at(own.url());
    let limit =
        "application:set_env(rabbit, max_message_size, 1000), persistent_term:put(max_message_size, 1000).";
    Management::of(own.url()).ctl(&["eval", limit]);
    let broker = names.open("groups=billing");
    let batch = || {
        let large = Outgoing::new(Message::new("orders", vec![b'x'; 1_001]).key("large"), 9);
        vec![outgoing(1), large, outgoing(2)]
    };
    // It breaks the channel of the first call, which teaches us the limit.
    let outcomes = broker.publish(batch()).await;
    assert!(matches!(outcomes[1], Outcome::Rejected { .. }), "{outcomes:?}");
    let outcomes = broker.publish(batch()).await;
    assert_eq!([&outcomes[0], &outcomes[2]], [&Outcome::Confirmed; 2], "{outcomes:?}");
    assert!(matches!(outcomes[1], Outcome::Rejected { .. }), "{outcomes:?}");
    assert_eq!(broker.guarantees().max_payload, Some(1_000));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_of_another_kind_is_refused_and_the_doctor_says_why() {
    let names = Names::at(url("rabbitmq"));
    let (_connection, channel) = names.somebody().await;
    let queue = names.queue("billing", 0);
    let durable = QueueDeclareOptions::durable();
    channel.queue_declare(queue.as_str().into(), durable, FieldTable::default()).await.unwrap();
    let broker = names.open("groups=billing");
    let plan = Plan {
        topics: vec!["orders".to_owned()],
        groups: vec![("shipping".to_owned(), vec!["orders".to_owned()])],
        max_payload: 64 << 20,
        ..Plan::default()
    };
    let findings = broker.examine(&plan).await;
    let about = |what: &str| findings.iter().find(|finding| finding.about.contains(what)).unwrap();
    assert_eq!(about("server").health, Health::Good, "{findings:?}");
    // Not there yet, and nothing is made by looking.
    assert_eq!(about("exchange").health, Health::Doubtful, "{findings:?}");
    assert_eq!(about("group shipping").health, Health::Doubtful, "{findings:?}");
    assert_eq!(about("payloads").health, Health::Broken, "{findings:?}");
    let billing = about("group billing");
    assert!(
        billing.health == Health::Broken && billing.fix.as_ref().unwrap().contains(&queue),
        "{billing:?}"
    );
    assert!(matches!(one(&broker, 1).await, Outcome::Misconfigured { .. }));
    let refused = broker.subscribe("billing", &["orders".to_owned()]).await;
    assert!(matches!(refused, Err(ReceiveError::Misconfigured(_))));
    names.done(&["billing", "shipping"]).await;
    // As it should be.
    assert_eq!(one(&broker, 1).await, Outcome::Confirmed);
    let findings = broker.examine(&Plan { groups: Vec::new(), max_payload: 0, ..plan }).await;
    assert!(findings.iter().all(|finding| finding.health == Health::Good), "{findings:?}");
    names.done(&["billing"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_password_is_misconfigured_and_never_shown() {
    let names = Names::at(url("rabbitmq").replace("guest:guest@", "guest:hush-hush@"));
    let broker = names.open("");
    let outcome = one(&broker, 1).await;
    let Outcome::Misconfigured { error } = &outcome else { panic!("{outcome:?}") };
    assert!(!error.contains("hush-hush") && !format!("{broker:?}").contains("hush-hush"), "{error}");
    let findings = broker.examine(&Plan::default()).await;
    assert!(
        findings[0].health == Health::Broken && !format!("{findings:?}").contains("hush-hush"),
        "{findings:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_away_is_connected_to_when_it_comes() {
    let own = Own::start("rabbitmq");
    own.stop();
    let broker = Names::at(own.url()).open("groups=billing");
    assert!(matches!(one(&broker, 1).await, Outcome::Unreachable { .. }));
    let away = broker.subscribe("billing", &["orders".to_owned()]).await;
    assert!(matches!(away, Err(ReceiveError::Unreachable(_))));
    own.resume();
    assert!(eventually(PATIENCE, || async { one(&broker, 1).await == Outcome::Confirmed }).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn groups_that_are_named_ahead_miss_nothing_and_get_their_topics_only() {
    let names = Names::at(url("rabbitmq"));
    let broker = names.open("groups=billing,shipping:ref*");
    assert_eq!(one(&broker, 1).await, Outcome::Confirmed);
    let (_connection, channel) = names.somebody().await;
    let shipping = names.queue("shipping", 0);
    let passive = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
    let looked = channel.queue_declare(shipping.as_str().into(), passive, FieldTable::default()).await;
    assert!(looked.is_err(), "it does not listen to orders");
    assert_eq!(numbers(&broker, "billing", &BTreeSet::from([1])).await, BTreeSet::from([1]));
    names.done(&["billing"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_somebody_rejects_goes_to_the_dead_letters() {
    let names = Names::at(url("rabbitmq"));
    let graves = format!("{}-graves", names.prefix);
    let broker = names.open(&format!("groups=billing&dead_letter={graves}&partitions=1"));
    assert_eq!(one(&broker, 1).await, Outcome::Confirmed);
    let (_connection, channel) = names.somebody().await;
    let consume = async |queue: &str| {
        let options = BasicConsumeOptions::default();
        let consumer = channel.basic_consume(queue.into(), "".into(), options, FieldTable::default());
        let mut consumer = consumer.await.unwrap();
        tokio::time::timeout(PATIENCE, consumer.next()).await.expect("it comes").unwrap().unwrap()
    };
    let delivered = consume(&names.queue("billing", 0)).await;
    delivered.reject(BasicRejectOptions { requeue: false }).await.unwrap();
    assert_eq!(consume(&graves).await.data, b"1");
    names.done(&["billing"]).await;
    channel.queue_delete(graves.as_str().into(), QueueDeleteOptions::default()).await.unwrap();
    channel.exchange_delete(graves.as_str().into(), ExchangeDeleteOptions::default()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn rabbitmqadmin_reads_our_messages_and_we_read_its() {
    let names = Names::at(url("rabbitmq"));
    let admin = Management::of(&names.url).admin();
    let broker = names.open("");
    let mut subscription = subscribe(&broker, "billing").await;
    // A queue of their own: RabbitMQ lets nobody look into one with a single active consumer.
    let (theirs, exchange) = (format!("{}-theirs", names.prefix), names.prefix.as_str());
    admin.run(&["declare", "queue", &format!("name={theirs}"), "durable=true"]);
    let (source, destination) = (format!("source={exchange}"), format!("destination={theirs}"));
    admin.run(&["declare", "binding", &source, &destination, "routing_key=orders.*"]);

    let message = Message::new("orders", "{\"total\":42}").key("customer-7").kind("OrderPlaced");
    let message = message.header("traceparent", "00-1-2-01");
    let id = message.id.to_string();
    assert_eq!(broker.publish(vec![Outgoing::new(message, 7)]).await, [Outcome::Confirmed]);
    let said = admin.run(&["get", &format!("queue={theirs}"), "ackmode=ack_requeue_false"]);
    let said: serde_json::Value = serde_json::from_str(&said).unwrap();
    let (properties, headers) = (&said[0]["properties"], &said[0]["properties"]["headers"]);
    assert_eq!(said[0]["payload"], "{\"total\":42}");
    assert!(said[0]["routing_key"].as_str().unwrap().starts_with("orders.@"), "{said}");
    assert_eq!(properties["message_id"], id.as_str());
    assert_eq!(properties["type"], "OrderPlaced");
    assert_eq!(properties["content_type"], "application/json");
    assert_eq!(properties["delivery_mode"], 2);
    assert_eq!([&headers["postrider-key"], &headers["postrider-seq"]], ["customer-7", "7"]);
    assert_eq!(headers["traceparent"], "00-1-2-01");
    let ours = receive(&mut subscription, 1).await.remove(0);
    subscription.acknowledge(&[ours.position]).await.unwrap();

    let exchange = format!("exchange={exchange}");
    let paid = r#"properties={"message_id":"A-1","type":"Paid","headers":{"tenant":"x","tries":3}}"#;
    admin.run(&["publish", &exchange, "routing_key=orders", "payload=theirs", paid]);
    let came = receive(&mut subscription, 1).await.remove(0).message;
    assert_eq!((&came.payload[..], came.kind.as_deref()), (&b"theirs"[..], Some("Paid")));
    assert_eq!([&came.headers["tenant"], &came.headers["tries"]], ["x", "3"]);
    // Nobody has finished it: it comes again, and is the same.
    drop(subscription);
    let mut subscription = subscribe(&broker, "billing").await;
    assert_eq!(receive(&mut subscription, 1).await[0].message.id, came.id);
    admin.run(&["delete", "queue", &format!("name={theirs}")]);
    names.done(&["billing"]).await;
}
