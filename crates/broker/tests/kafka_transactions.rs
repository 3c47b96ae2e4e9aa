//! Kafka's transactions: a batch and its note are there together or not at all, and who takes a line over is the only one
//! that can send on it.

#[allow(dead_code, reason = "this is the world of the other tests too")]
mod kafka_world;

use std::time::Duration;

use broker::kafka::Broker;
use broker::{Line, Outcome, Outgoing, Publisher, SendTogether, TakenOver};
use kafka_world::World;
use message::Message;
use rdkafka::ClientConfig;
use rdkafka::producer::{BaseProducer, BaseRecord, Producer};

/// Long enough for anything that happens at all.
const PATIENCE: Duration = Duration::from_secs(30);

fn line(lane: u16) -> Line {
    Line { store: "shop".to_owned(), broker: "kafka".to_owned(), lane }
}

fn batch(seqs: std::ops::Range<i64>) -> Vec<Outgoing> {
    seqs.map(|seq| Outgoing::new(Message::new("orders", seq.to_string()).key(format!("key {seq}")), seq))
        .collect()
}

async fn take(broker: &Broker, lane: u16) -> TakenOver {
    let transactions = broker.transactions().expect("Kafka has them");
    transactions.take_over(&line(lane)).await.unwrap_or_else(|outcome| panic!("{outcome:?}"))
}

async fn send(sender: &mut dyn SendTogether, batch: Vec<Outgoing>, note: &str) -> Vec<Outcome> {
    sender.publish(batch, &|_| note.as_bytes().to_vec()).await
}

/// What a reader of what is committed sees.
async fn committed(world: &World, count: usize) -> Vec<String> {
    let came = world.receive(&world.broker(""), "orders", count).await;
    let mut texts: Vec<String> =
        came.iter().map(|delivery| String::from_utf8_lossy(&delivery.message.payload).into_owned()).collect();
    texts.sort_by_key(|text| text.parse::<i64>().unwrap_or_default());
    texts
}

#[tokio::test]
async fn the_note_of_the_last_transaction_of_a_line_is_found_by_who_takes_it_over() {
    let world = World::new();
    let broker = world.broker("");
    let TakenOver { mut sender, note } = take(&broker, 3).await;
    assert_eq!(note, None, "nothing was ever sent");
    for (round, text) in ["one", "two", "three"].into_iter().enumerate() {
        let from = round as i64 * 10;
        let outcomes = send(&mut *sender, batch(from..from + 10), text).await;
        assert_eq!(outcomes, vec![Outcome::Confirmed; 10]);
        assert!(sender.is_good());
    }
    // Another line, in a partition of its own or not, says nothing of this one.
    let mut other = take(&broker, 67).await;
    assert_eq!(other.note, None);
    assert_eq!(send(&mut *other.sender, batch(30..31), "other").await, [Outcome::Confirmed]);
    let after = take(&world.broker(""), 3).await;
    assert_eq!(after.note.as_deref(), Some(&b"three"[..]));
    assert_eq!(committed(&world, 31).await.len(), 31);
}

#[tokio::test]
async fn who_lost_its_line_sends_nothing_any_more() {
    let world = World::new();
    let broker = world.broker("");
    let mut old = take(&broker, 0).await;
    assert_eq!(send(&mut *old.sender, batch(0..5), "old").await, vec![Outcome::Confirmed; 5]);
    let mut new = take(&world.broker(""), 0).await;
    assert_eq!(new.note.as_deref(), Some(&b"old"[..]));
    let late = send(&mut *old.sender, batch(5..10), "late").await;
    assert!(!late.contains(&Outcome::Confirmed), "{late:?}");
    assert!(!old.sender.is_good(), "the line has to be taken over again");
    assert_eq!(send(&mut *new.sender, batch(10..15), "new").await, vec![Outcome::Confirmed; 5]);
    let expected: Vec<String> = (0..5).chain(10..15).map(|seq| seq.to_string()).collect();
    assert_eq!(committed(&world, 10).await, expected);
    assert_eq!(take(&broker, 0).await.note.as_deref(), Some(&b"new"[..]));
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
async fn what_was_open_when_a_line_is_taken_over_is_never_seen() {
    let world = World::new();
    world.make("orders", 1, &[]).await;
    let id = format!("postrider.{}shop.kafka.5", world.name(""));
    let dead = left_open(&world, &id);
    let mut taken = take(&world.broker(""), 5).await;
    assert_eq!(taken.note, None);
    assert!(dead.commit_transaction(PATIENCE).is_err(), "it was fenced");
    assert_eq!(send(&mut *taken.sender, batch(1..3), "mine").await, vec![Outcome::Confirmed; 2]);
    assert_eq!(committed(&world, 2).await, ["1", "2"]);
}

#[tokio::test]
async fn what_cannot_be_sent_is_not_in_the_note_and_the_rest_is_committed() {
    let world = World::new();
    // Less than a batch of a few dozen messages has.
    world.make("orders", 1, &[("max.message.bytes", "20000")]).await;
    let broker = world.broker("");
    let message = |seq: i64| {
        let size = if seq == 50 { 25_000 } else { 350 };
        Outgoing::new(Message::new("orders", vec![b'x'; size]).key(format!("key {seq}")), seq)
    };
    let places = std::sync::Mutex::new(Vec::new());
    let note = |sent: &[usize]| {
        sent.clone_into(&mut places.lock().expect("no panic"));
        b"some".to_vec()
    };
    let mut taken = take(&broker, 1).await;
    let mut outcomes = taken.sender.publish((0..100).map(message).collect(), &note).await;
    if !taken.sender.is_good() {
        // It had made batches that are too large for this topic, which nobody had looked at before.
        assert!(!outcomes.contains(&Outcome::Confirmed), "{outcomes:?}");
        taken = take(&broker, 1).await;
        outcomes = taken.sender.publish((0..100).map(message).collect(), &note).await;
    }
    assert!(matches!(outcomes[50], Outcome::Rejected { .. }), "{:?}", outcomes[50]);
    assert_eq!(outcomes.iter().filter(|outcome| **outcome == Outcome::Confirmed).count(), 99, "{outcomes:?}");
    let sent = places.lock().expect("no panic").clone();
    assert_eq!(sent, (0..100).filter(|place| *place != 50).collect::<Vec<_>>());
    assert_eq!(committed(&world, 99).await.len(), 99);
}
