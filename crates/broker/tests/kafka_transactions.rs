//! Kafka's transactions: a batch and its note are there together or not at all, and who takes a lane is the only one that
//! can send of it.

#[allow(dead_code, reason = "this is the world of the other tests too")]
mod kafka_world;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use broker::kafka::Broker;
use broker::{Line, Outcome, Outgoing, Publisher, SendTogether};
use kafka_world::World;
use message::Message;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::KafkaError;
use rdkafka::message::Message as _;
use rdkafka::producer::{BaseProducer, BaseRecord, Producer};
use rdkafka::{ClientConfig, Offset, TopicPartitionList};

/// Long enough for anything that happens at all.
const PATIENCE: Duration = Duration::from_secs(30);

fn line() -> Line {
    Line { store: "shop".to_owned(), broker: "kafka".to_owned() }
}

fn batch(seqs: std::ops::Range<i64>) -> Vec<Outgoing> {
    seqs.map(|seq| Outgoing::new(Message::new("orders", seq.to_string()).key(format!("key {seq}")), seq))
        .collect()
}

async fn sender(broker: &Broker) -> Arc<dyn SendTogether> {
    let transactions = broker.transactions().expect("Kafka has them");
    transactions.sender(&line()).await.unwrap_or_else(|outcome| panic!("{outcome:?}"))
}

/// A new sender that has these lanes, and the notes of those who had them.
async fn take(broker: &Broker, lanes: &[u16]) -> (Arc<dyn SendTogether>, Vec<String>) {
    let sender = sender(broker).await;
    let notes = notes(&*sender, lanes).await;
    (sender, notes)
}

async fn notes(sender: &dyn SendTogether, lanes: &[u16]) -> Vec<String> {
    let notes = sender.take(lanes).await.unwrap_or_else(|outcome| panic!("{outcome:?}"));
    let mut texts: Vec<String> =
        notes.iter().map(|note| String::from_utf8_lossy(note).into_owned()).collect();
    texts.sort();
    texts
}

async fn send(sender: &dyn SendTogether, batch: Vec<Outgoing>, note: &str) -> Vec<Outcome> {
    sender.publish(batch, &|_| note.as_bytes().to_vec()).await
}

/// What a reader of what is committed sees: these many, and no more.
async fn committed(world: &World, count: usize) -> Vec<i64> {
    world.numbers(&world.broker(""), "orders", count).await
}

#[tokio::test]
async fn the_note_of_the_last_transaction_is_found_by_who_takes_the_lanes() {
    let world = World::new();
    let broker = world.broker("");
    let (first, found) = take(&broker, &[3, 4]).await;
    assert!(found.is_empty(), "nothing was ever sent");
    for (round, text) in ["one", "two", "three"].into_iter().enumerate() {
        let from = round as i64 * 10;
        assert_eq!(send(&*first, batch(from..from + 10), text).await, vec![Outcome::Confirmed; 10]);
        assert!(first.is_good());
    }
    let (other, found) = take(&broker, &[5]).await;
    assert!(found.is_empty(), "these lanes were nobody's: {found:?}");
    assert_eq!(send(&*other, batch(30..31), "other").await, [Outcome::Confirmed]);
    assert!(first.is_good(), "it has lost nothing");
    assert_eq!(send(&*first, batch(31..32), "four").await, [Outcome::Confirmed]);
    let (_, found) = take(&world.broker(""), &[3, 5]).await;
    assert_eq!(found, ["four", "other", "three"], "the last of both halves of the first");
    assert_eq!(committed(&world, 32).await, (0..32).collect::<Vec<_>>());
}

#[tokio::test]
async fn who_lost_a_lane_sends_nothing_any_more() {
    let world = World::new();
    let broker = world.broker("");
    let (old, _) = take(&broker, &[0, 1]).await;
    assert_eq!(send(&*old, batch(0..5), "old").await, vec![Outcome::Confirmed; 5]);
    let (new, found) = take(&world.broker(""), &[0]).await;
    assert_eq!(found, ["old"]);
    let late = send(&*old, batch(5..10), "late").await;
    assert_eq!(late, vec![Outcome::Held; 5], "it is nobody's fault");
    assert!(!old.is_good(), "another has to take its lanes");
    assert_eq!(send(&*new, batch(10..15), "new").await, vec![Outcome::Confirmed; 5]);
    let expected: Vec<i64> = (0..5).chain(10..15).collect();
    assert_eq!(committed(&world, 10).await, expected);
    let (_, found) = take(&broker, &[0, 1]).await;
    assert_eq!(found, ["new", "old"]);
}

#[tokio::test]
async fn of_all_who_had_a_lane_and_died_nobody_is_forgotten() {
    let world = World::new();
    let broker = world.broker("");
    let mut dead = Vec::new();
    for text in ["a", "b", "c"] {
        // Each dies before it settled what it found.
        let (sender, _) = take(&broker, &[7]).await;
        assert_eq!(send(&*sender, batch(0..1), text).await, [Outcome::Confirmed]);
        dead.push(sender);
    }
    // One that dies before it sends anything.
    dead.push(take(&broker, &[7]).await.0);
    let (_, found) = take(&world.broker(""), &[7]).await;
    assert_eq!(found, ["a", "b", "c"]);
}

#[tokio::test]
async fn a_lane_that_was_given_back_is_taken_without_stopping_anybody() {
    let world = World::new();
    let broker = world.broker("");
    let (first, _) = take(&broker, &[0, 1]).await;
    assert_eq!(send(&*first, batch(0..3), "settled").await, vec![Outcome::Confirmed; 3]);
    first.give_back(&[1]).await;
    let (second, found) = take(&world.broker(""), &[1]).await;
    assert!(found.is_empty(), "{found:?}");
    assert_eq!(send(&*first, batch(3..4), "first").await, [Outcome::Confirmed]);
    assert_eq!(send(&*second, batch(4..5), "second").await, [Outcome::Confirmed]);
    second.give_back(&[1]).await;
    assert!(notes(&*first, &[1]).await.is_empty(), "and back again");
    assert_eq!(send(&*first, batch(5..6), "again").await, [Outcome::Confirmed]);
    assert_eq!(committed(&world, 6).await, (0..6).collect::<Vec<_>>());
}

#[tokio::test]
async fn what_is_resolved_is_not_read_again_and_leaves_nothing_behind() {
    let world = World::new();
    let broker = world.broker("");
    let (first, _) = take(&broker, &[0, 1]).await;
    assert_eq!(send(&*first, batch(0..3), "first").await, vec![Outcome::Confirmed; 3]);
    let (second, found) = take(&broker, &[0, 1]).await;
    assert_eq!(found, ["first"]);
    second.resolve(&[0]);
    second.resolve(&[1]);
    testkit::until("the end of the claims and of the note", async || live(&world).len() == 2).await;
    assert_eq!(send(&*second, batch(3..4), "second").await, [Outcome::Confirmed]);
    let (_, found) = take(&world.broker(""), &[0, 1]).await;
    assert_eq!(found, ["second"]);
}

/// The keys of the topic of notes that compaction would leave.
fn live(world: &World) -> BTreeSet<String> {
    let mut client: ClientConfig = world.client();
    client.set("group.id", "looker").set("enable.partition.eof", "true").set("auto.offset.reset", "earliest");
    let consumer: BaseConsumer = client.create().expect("a consumer can be made");
    let topic = world.name("postrider-notes");
    let metadata = consumer.fetch_metadata(Some(&topic), PATIENCE).expect("Kafka answers");
    let partitions = metadata.topics()[0].partitions().len();
    let mut all = TopicPartitionList::new();
    for partition in 0..partitions {
        all.add_partition_offset(&topic, partition as i32, Offset::Beginning).expect("it is a partition");
    }
    consumer.assign(&all).expect("it can be read");
    let (mut live, mut ended) = (BTreeSet::new(), 0);
    while ended < partitions {
        match consumer.poll(PATIENCE).expect("Kafka answers") {
            Ok(record) => {
                let key = String::from_utf8_lossy(record.key().unwrap_or_default()).into_owned();
                match record.payload() {
                    Some(_) => live.insert(key),
                    None => live.remove(&key),
                };
            }
            Err(KafkaError::PartitionEOF(_)) => ended += 1,
            Err(failed) => panic!("{failed}"),
        }
    }
    live
}

/// Who has a claim on a lane.
fn claimants(world: &World, lane: u16) -> Vec<String> {
    let claim = format!("{}shop.kafka/{lane}/", world.name(""));
    let live = live(world);
    let claims = live.iter().filter_map(|key| key.strip_prefix(&claim)?.split_once('/'));
    claims.map(|(sender, _)| sender.to_owned()).collect()
}

/// As a relay that died between two steps leaves it.
fn left_open(world: &World, id: &str) -> BaseProducer {
    let mut client: ClientConfig = world.client();
    let producer: BaseProducer = client.set("transactional.id", id).create().expect("a producer can be made");
    producer.init_transactions(PATIENCE).expect("transactions can be used");
    producer.begin_transaction().expect("one can be begun");
    let topic = world.name("orders");
    producer.send(BaseRecord::to(&topic).key("a").payload("left")).expect("it is queued");
    producer.flush(PATIENCE).expect("it is sent");
    producer
}

#[tokio::test]
async fn what_was_open_when_a_lane_is_taken_is_never_seen() {
    let world = World::new();
    world.make("orders", 1, &[]).await;
    let broker = world.broker("");
    let (first, _) = take(&broker, &[5]).await;
    let id = claimants(&world, 5);
    assert_eq!(id.len(), 1);
    let dead = left_open(&world, &format!("postrider.{}shop.kafka.{}.0", world.name(""), id[0]));
    let (second, found) = take(&world.broker(""), &[5]).await;
    assert!(found.is_empty(), "{found:?}");
    assert!(dead.commit_transaction(PATIENCE).is_err(), "it was fenced");
    assert_eq!(send(&*first, batch(0..1), "late").await, [Outcome::Held]);
    assert_eq!(send(&*second, batch(1..3), "mine").await, vec![Outcome::Confirmed; 2]);
    assert_eq!(committed(&world, 2).await, [1, 2]);
}

#[tokio::test]
async fn what_cannot_be_sent_is_not_in_the_note_and_the_rest_is_committed() {
    let world = World::new();
    // Less than a batch of a few dozen messages has.
    world.make("orders", 1, &[("max.message.bytes", "20000")]).await;
    let broker = world.broker("");
    let message = |seq: i64| {
        let size = if seq == 50 { 25_000 } else { 350 };
        Outgoing::new(Message::new("orders", format!("{seq:0size$}")).key(format!("key {seq}")), seq)
    };
    let places = std::sync::Mutex::new(Vec::new());
    let note = |sent: &[usize]| {
        sent.clone_into(&mut places.lock().expect("no panic"));
        b"some".to_vec()
    };
    let (mut sender, _) = take(&broker, &[1]).await;
    let mut outcomes = sender.publish((0..100).map(message).collect(), &note).await;
    if !sender.is_good() {
        // It had made batches that are too large for this topic, which nobody had looked at before.
        assert!(!outcomes.contains(&Outcome::Confirmed), "{outcomes:?}");
        sender = take(&broker, &[1]).await.0;
        outcomes = sender.publish((0..100).map(message).collect(), &note).await;
    }
    assert!(matches!(outcomes[50], Outcome::Rejected { .. }), "{:?}", outcomes[50]);
    assert_eq!(outcomes.iter().filter(|outcome| **outcome == Outcome::Confirmed).count(), 99, "{outcomes:?}");
    let sent = places.lock().expect("no panic").clone();
    assert_eq!(sent, (0..100).filter(|place| *place != 50).collect::<Vec<_>>());
    let expected: Vec<i64> = (0..100).filter(|seq| *seq != 50).collect();
    assert_eq!(committed(&world, 99).await, expected);
}
