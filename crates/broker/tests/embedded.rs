//! The embedded broker's own: its file, its leases, its retention. What every broker keeps true is in
//! `conformance.rs`.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

use broker::embedded::{Broker, Config};
use broker::{Delivery, Outcome, Outgoing, Position, Publisher, Subscriber, Subscription};
use message::Message;
use tempfile::TempDir;

const LEASE: Duration = Duration::from_millis(200);

fn config(folder: &Path) -> Config {
    Config { partitions: 4, lease: LEASE, ..Config::new(folder.join("broker.db")) }
}

fn open(folder: &TempDir) -> Broker {
    Broker::open(config(folder.path())).unwrap()
}

fn outgoing(topic: &str, key: &str, seq: i64) -> Outgoing {
    Outgoing::new(Message::new(topic, format!("{seq}")).key(key), seq)
}

/// `count` messages over `keys` keys, in order.
async fn publish(broker: &Broker, topic: &str, keys: i64, from: i64, count: i64) {
    let batch =
        (from..from + count).map(|seq| outgoing(topic, &format!("key-{}", seq % keys), seq)).collect();
    let outcomes = broker.publish(batch).await;
    assert!(outcomes.iter().all(|outcome| *outcome == Outcome::Confirmed), "{outcomes:?}");
}

async fn subscribe(broker: &Broker, group: &str) -> Box<dyn Subscription> {
    broker.subscribe(group, &["orders".to_owned()]).await.unwrap()
}

async fn receive(subscription: &mut Box<dyn Subscription>, max: usize) -> Vec<Delivery> {
    tokio::time::timeout(Duration::from_secs(20), subscription.receive(max))
        .await
        .expect("something to receive within 20 seconds")
        .unwrap()
}

/// Receives until `count` have come.
async fn receive_all(subscription: &mut Box<dyn Subscription>, count: usize) -> Vec<Delivery> {
    let mut deliveries = Vec::new();
    while deliveries.len() < count {
        deliveries.extend(receive(subscription, count - deliveries.len()).await);
    }
    deliveries
}

/// Whether nothing comes although everything that is stored was looked at once.
async fn nothing_comes(subscription: &mut Box<dyn Subscription>) -> bool {
    tokio::time::timeout(Duration::from_millis(50), subscription.receive(10)).await.is_err()
}

fn positions(deliveries: &[Delivery]) -> Vec<Position> {
    deliveries.iter().map(|delivery| delivery.position).collect()
}

fn seqs(deliveries: &[Delivery]) -> BTreeSet<i64> {
    deliveries.iter().map(|delivery| delivery.seq.unwrap()).collect()
}

fn assert_each_key_in_order(deliveries: &[Delivery]) {
    let mut last: BTreeMap<&str, i64> = BTreeMap::new();
    for delivery in deliveries {
        let (key, seq) = (delivery.message.key.as_deref().unwrap(), delivery.seq.unwrap());
        let before = last.insert(key, seq);
        assert!(before.is_none_or(|before| before < seq), "{key}: {before:?} came before {seq}");
    }
}

#[tokio::test]
async fn every_part_of_a_message_arrives_as_it_was_sent() {
    let folder = TempDir::new().unwrap();
    let broker = open(&folder);
    let full = Message {
        content_type: "text/plain".to_owned(),
        occurred_at: chrono::DateTime::from_timestamp(-9_000_000_000, 123_456_789).unwrap(),
        ..Message::new("orders", vec![0, 255, 10]).key("k\u{0}ö").kind("Placed").header("a", "\"ü\"")
    };
    let bare = Message::new("orders", "");
    let sent = [Outgoing { delivery: 7, ..Outgoing::new(full, i64::MAX) }, Outgoing::new(bare, -1)];
    assert_eq!(broker.publish(sent.to_vec()).await, [Outcome::Confirmed, Outcome::Confirmed]);
    let mut subscription = subscribe(&broker, "billing").await;
    let mut deliveries = receive_all(&mut subscription, 2).await;
    deliveries.sort_by_key(|delivery| -delivery.seq.unwrap());
    for (sent, came) in sent.iter().zip(&deliveries) {
        assert_eq!(came.message, *sent.message);
        assert_eq!((came.seq, came.delivery), (Some(sent.seq), sent.delivery));
    }
}

#[tokio::test]
async fn an_oversized_message_is_rejected_alone_and_holds_only_its_key() {
    let folder = TempDir::new().unwrap();
    let broker = Broker::open(Config { max_payload: 10, ..config(folder.path()) }).unwrap();
    let large = |key: &str| Outgoing::new(Message::new("orders", vec![b'x'; 11]).key(key), 99);
    let batch = vec![
        outgoing("orders", "a", 1),
        large("a"),
        outgoing("orders", "a", 2),
        outgoing("orders", "b", 3),
        outgoing("refunds", "a", 4),
        outgoing("no topic", "c", 5),
        Outgoing::new(Message::new("orders", "1"), 6),
    ];
    let outcomes = broker.publish(batch).await;
    let rejected = |at: usize, why: &str| match &outcomes[at] {
        Outcome::Rejected { error } => assert!(error.contains(why), "{error}"),
        other => panic!("{other:?}"),
    };
    rejected(1, "11 bytes and the limit is 10");
    rejected(5, "cannot be a topic");
    assert_eq!(outcomes[2], Outcome::Held);
    for at in [0, 3, 4, 6] {
        assert_eq!(outcomes[at], Outcome::Confirmed);
    }
    let mut subscription = subscribe(&broker, "billing").await;
    assert_eq!(seqs(&receive_all(&mut subscription, 3).await), BTreeSet::from([1, 3, 6]));
    assert_eq!(broker.publish(vec![large("a")]).await.len(), 1);
    assert_eq!(broker.publish(vec![]).await, []);
}

#[tokio::test]
async fn a_restart_keeps_everything_and_waits_for_no_lease() {
    let folder = TempDir::new().unwrap();
    let long = Config { lease: Duration::from_secs(3_600), ..config(folder.path()) };
    {
        let broker = Broker::open(long.clone()).unwrap();
        publish(&broker, "orders", 5, 0, 50).await;
        let mut subscription = subscribe(&broker, "billing").await;
        let deliveries = receive_all(&mut subscription, 50).await;
        subscription.acknowledge(&positions(&deliveries[..20])).await.unwrap();
    }
    // The partitions number other than the one at creation changes nothing for a topic that exists.
    let broker = Broker::open(Config { partitions: 9, ..long }).unwrap();
    publish(&broker, "orders", 5, 50, 10).await;
    let view = &broker.topics().await.unwrap()[0];
    assert_eq!((view.partitions, view.messages), (4, 60));
    let lag = usize::try_from(view.groups[0].lag).unwrap();
    let mut subscription = subscribe(&broker, "billing").await;
    let rest = receive_all(&mut subscription, lag).await;
    assert_each_key_in_order(&rest);
    assert!(rest.len() >= 40 && seqs(&rest).contains(&59));
}

#[tokio::test]
async fn a_dead_members_partitions_move_and_its_late_acknowledgement_changes_nothing() {
    let folder = TempDir::new().unwrap();
    let broker = open(&folder);
    publish(&broker, "orders", 16, 0, 160).await;

    // With so long a lease it next renews in twenty minutes: until then it is a process that hangs.
    let hung = Broker::open(Config { lease: Duration::from_secs(3_600), ..config(folder.path()) }).unwrap();
    let mut first = subscribe(&hung, "billing").await;
    let early = receive_all(&mut first, 160).await;
    end_leases(folder.path());
    let mut second = subscribe(&broker, "billing").await;
    let taken_over = receive_all(&mut second, 160).await;
    assert_eq!(seqs(&early), seqs(&taken_over));

    first.acknowledge(&positions(&early)).await.unwrap();
    assert_eq!(broker.topics().await.unwrap()[0].groups[0].lag, 160);
    second.acknowledge(&positions(&taken_over)).await.unwrap();
    assert_eq!(broker.topics().await.unwrap()[0].groups[0].lag, 0);
}

/// Ends the leases of all members now, as time would.
fn end_leases(folder: &Path) {
    let connection = rusqlite::Connection::open(folder.join("broker.db")).unwrap();
    connection.busy_timeout(Duration::from_secs(10)).unwrap();
    connection.execute("UPDATE broker_members SET locked_until = 0", []).unwrap();
}

#[tokio::test]
async fn a_closed_member_leaves_at_once() {
    let folder = TempDir::new().unwrap();
    let broker = Broker::open(Config { lease: Duration::from_secs(3_600), ..config(folder.path()) }).unwrap();
    publish(&broker, "orders", 16, 0, 16).await;
    let first = subscribe(&broker, "billing").await;
    let mut second = subscribe(&broker, "billing").await;
    first.close().await;
    assert_eq!(receive_all(&mut second, 16).await.len(), 16);
    second.close().await;
    assert_eq!(broker.topics().await.unwrap()[0].groups[0].members, 0);
}

#[tokio::test]
async fn members_with_different_topics_leave_no_partition_without_an_owner() {
    let folder = TempDir::new().unwrap();
    let (here, there) = (open(&folder), open(&folder));
    let topics = ["orders".to_owned(), "refunds".to_owned()];
    let mut both = here.subscribe("billing", &topics).await.unwrap();
    let mut only_orders = subscribe(&there, "billing").await;
    publish(&here, "orders", 64, 0, 64).await;
    publish(&here, "refunds", 64, 64, 64).await;
    let mut seen = BTreeSet::new();
    while seen.len() < 128 {
        let (side, deliveries) = tokio::select! {
            deliveries = both.receive(64) => (&mut both, deliveries.unwrap()),
            deliveries = only_orders.receive(64) => (&mut only_orders, deliveries.unwrap()),
        };
        side.acknowledge(&positions(&deliveries)).await.unwrap();
        for seq in seqs(&deliveries) {
            assert!(seen.insert(seq), "{seq} came twice");
        }
    }
}

#[tokio::test]
async fn a_topic_that_appears_later_is_found() {
    let folder = TempDir::new().unwrap();
    let (here, there) = (open(&folder), open(&folder));
    let topics = ["orders".to_owned(), "refunds".to_owned()];
    let mut subscription = here.subscribe("billing", &topics).await.unwrap();
    assert!(nothing_comes(&mut subscription).await);
    publish(&here, "orders", 8, 0, 8).await;
    assert_eq!(seqs(&receive_all(&mut subscription, 8).await), (0..8).collect());
    publish(&there, "refunds", 8, 8, 8).await;
    publish(&there, "unrelated", 8, 16, 8).await;
    assert_eq!(seqs(&receive_all(&mut subscription, 8).await), (8..16).collect());
}

#[tokio::test]
async fn groups_do_not_disturb_each_other() {
    let folder = TempDir::new().unwrap();
    let broker = open(&folder);
    publish(&broker, "orders", 8, 0, 80).await;
    let mut billing = subscribe(&broker, "billing").await;
    let deliveries = receive_all(&mut billing, 80).await;
    billing.acknowledge(&positions(&deliveries)).await.unwrap();
    let mut shipping = subscribe(&broker, "shipping").await;
    assert_eq!(seqs(&receive_all(&mut shipping, 80).await), (0..80).collect());
    let lags: Vec<_> = broker.topics().await.unwrap()[0]
        .groups
        .iter()
        .map(|group| (group.group.clone(), group.lag))
        .collect();
    assert_eq!(lags, [("billing".to_owned(), 0), ("shipping".to_owned(), 80)]);
}

#[tokio::test]
async fn several_handles_on_one_file_publish_without_losing_or_repeating_an_offset() {
    let folder = TempDir::new().unwrap();
    let handles: Vec<_> = (0..4).map(|_| open(&folder)).collect();
    let writers = handles.iter().enumerate().map(|(number, handle)| {
        let (handle, base) = (handle.clone(), number as i64 * 1_000);
        tokio::spawn(async move {
            for batch in 0..20 {
                publish(&handle, "orders", 10, base + batch * 50, 50).await;
            }
        })
    });
    for writer in writers.collect::<Vec<_>>() {
        writer.await.unwrap();
    }
    let mut subscription = subscribe(&handles[0], "billing").await;
    let deliveries = receive_all(&mut subscription, 4_000).await;
    assert_eq!(seqs(&deliveries).len(), 4_000);
    let mut next: BTreeMap<u64, i64> = BTreeMap::new();
    for Position { partition, offset } in positions(&deliveries) {
        let expected = next.entry(partition).or_default();
        assert_eq!(offset, *expected, "partition {partition}");
        *expected += 1;
    }
}

#[tokio::test]
async fn retention_removes_what_every_group_has_read_and_never_what_one_has_not() {
    let folder = TempDir::new().unwrap();
    let broker = Broker::open(Config { retain: Duration::ZERO, ..config(folder.path()) }).unwrap();
    let mut billing = subscribe(&broker, "billing").await;
    let mut shipping = subscribe(&broker, "shipping").await;
    // Known, but it has never looked at its messages.
    drop(broker.subscribe("audit", &["orders".to_owned()]).await.unwrap());
    for batch in 0..30 {
        publish(&broker, "orders", 1, batch * 100, 100).await;
    }
    let kept = || async { broker.topics().await.unwrap()[0].messages };

    let deliveries = receive_all(&mut billing, 3_000).await;
    billing.acknowledge(&positions(&deliveries)).await.unwrap();
    let deliveries = receive_all(&mut shipping, 3_000).await;
    shipping.acknowledge(&positions(&deliveries[..2_500])).await.unwrap();
    broker.trim().await.unwrap();
    assert_eq!(kept().await, 3_000, "audit has read nothing");

    assert!(broker.forget("billing").await.unwrap_err().to_string().contains("members at work"));
    forget(&broker, "audit").await;
    while kept().await > 500 {
        broker.trim().await.unwrap();
        tokio::task::yield_now().await;
    }
    assert_eq!(broker.trim().await.unwrap(), 0);
    assert_eq!(kept().await, 500, "shipping has not acknowledged these");
    assert!(broker.forget("nobody").await.unwrap_err().to_string().contains("no consumer group `nobody`"));

    // What is left is still delivered, and a new group starts at the oldest that is kept.
    shipping.give_back(&positions(&deliveries[2_500..])).await.unwrap();
    assert_eq!(seqs(&receive_all(&mut shipping, 500).await), (2_500..3_000).collect());
    let mut late = subscribe(&broker, "late").await;
    assert_eq!(seqs(&receive_all(&mut late, 500).await), (2_500..3_000).collect());
}

/// Forgets a group as soon as the lease of its last member has ended.
async fn forget(broker: &Broker, group: &str) {
    while broker.forget(group).await.is_err() {
        tokio::time::sleep(LEASE / 10).await;
    }
}

#[tokio::test]
async fn retention_keeps_what_is_young() {
    let folder = TempDir::new().unwrap();
    let broker = open(&folder);
    publish(&broker, "orders", 4, 0, 100).await;
    assert_eq!(broker.trim().await.unwrap(), 0);
    assert_eq!(broker.topics().await.unwrap()[0].messages, 100);
}

#[tokio::test]
async fn a_handler_that_blocks_its_runtime_does_not_cost_the_partition() {
    let folder = TempDir::new().unwrap();
    let broker = open(&folder);
    publish(&broker, "orders", 1, 0, 2).await;
    let mut first = subscribe(&broker, "billing").await;
    let deliveries = receive_all(&mut first, 2).await;
    // The handler itself: nothing of this runtime runs for several leases.
    std::thread::sleep(LEASE * 4);
    first.acknowledge(&positions(&deliveries)).await.unwrap();
    assert_eq!(broker.topics().await.unwrap()[0].groups[0].lag, 0);
}

#[tokio::test]
async fn a_subscription_without_a_proper_name_is_refused() {
    let folder = TempDir::new().unwrap();
    let broker = open(&folder);
    let refused = |group: &'static str, topics: Vec<String>| {
        let broker = broker.clone();
        async move { broker.subscribe(group, &topics).await.err().expect("refused").to_string() }
    };
    assert!(refused("a b", vec!["orders".to_owned()]).await.contains("consumer group"));
    assert!(refused("a", vec!["or ders".to_owned()]).await.contains("cannot be a topic"));
    assert!(refused("a", vec![]).await.contains("names no topic"));
}

#[tokio::test]
async fn a_file_that_is_no_broker_is_refused() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("broker.db");
    std::fs::write(&path, "something else entirely, and long enough".repeat(50)).unwrap();
    let error = Broker::open(Config::new(path)).unwrap_err().to_string();
    assert!(error.contains("not a database"), "{error}");
}
