//! Consume, transform, produce: what a member of a group received and what it made of it are there together or not at all.

#[allow(dead_code, reason = "this is the world of the other tests too")]
mod kafka_world;

use std::collections::BTreeSet;
use std::time::Duration;

use broker::kafka::Broker;
use broker::{
    Beside, Delivery, FinishTogether, Outcome, Outgoing, Position, Publisher, Subscriber, Unfinished,
};
use kafka_world::{World, confirmed};
use message::Message;

/// Long enough for anything that happens at all.
const PATIENCE: Duration = Duration::from_secs(60);

fn order(seq: i64) -> Outgoing {
    Outgoing::new(Message::new("orders", seq.to_string()).key(format!("key {seq}")), seq)
}

/// What is made of an order.
fn bill(delivery: &Delivery) -> Outgoing {
    let message = &delivery.message;
    let bill = Message::new("bills", message.payload.clone()).key(message.key.clone().unwrap_or_default());
    Outgoing::new(bill, delivery.seq.unwrap_or_default())
}

fn positions(deliveries: &[Delivery]) -> Vec<Position> {
    deliveries.iter().map(|delivery| delivery.position).collect()
}

async fn member(broker: &Broker) -> Box<dyn FinishTogether> {
    let together = broker.together().expect("Kafka has transactions");
    together.subscribe("billing", &["orders".to_owned()]).await.expect("the group can be joined")
}

async fn receive(member: &mut dyn FinishTogether, count: usize) -> Vec<Delivery> {
    let mut came = Vec::new();
    while came.len() < count {
        let more = tokio::time::timeout(PATIENCE, member.receive(count - came.len())).await;
        let more = more.unwrap_or_else(|_| panic!("{} of {count} came", came.len()));
        came.extend(more.expect("messages can be received"));
    }
    came
}

#[tokio::test]
async fn what_was_made_is_there_and_what_it_was_made_of_does_not_come_again() {
    let world = World::new();
    let broker = world.broker("&partitions=4");
    confirmed(&broker.publish((0..20).map(order).collect()).await);
    let mut first = member(&broker).await;
    for _ in 0..2 {
        let came = receive(&mut *first, 10).await;
        let made = came.iter().map(bill).collect();
        first.finish(&positions(&came), made).await.expect("it is committed");
    }
    first.close().await;
    confirmed(&broker.publish((20..25).map(order).collect()).await);
    let mut second = member(&broker).await;
    let came = receive(&mut *second, 5).await;
    assert!(came.iter().all(|delivery| delivery.seq >= Some(20)), "{came:?}");
    // Nothing need be made of a message.
    second.finish(&positions(&came), Vec::new()).await.expect("it is committed");
    second.close().await;
    assert_eq!(world.numbers(&broker, "bills", 20).await, (0..20).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_message_that_cannot_be_sent_leaves_everything_with_the_member() {
    let world = World::new();
    world.make("bills", 1, &[("max.message.bytes", "20000")]).await;
    let broker = world.broker("&partitions=1&create=false");
    world.make("orders", 1, &[]).await;
    confirmed(&broker.publish((0..3).map(order).collect()).await);
    let mut member = member(&broker).await;
    let came = receive(&mut *member, 3).await;
    let mut made: Vec<_> = came.iter().map(bill).collect();
    made.insert(1, Outgoing::new(Message::new("bills", vec![b'x'; 25_000]), 0));
    let nowhere = Outgoing::new(Message::new("nowhere", "1"), 0);
    let refused = member.finish(&positions(&came), [made.clone(), vec![nowhere]].concat()).await;
    let Err(Unfinished::Refused(outcomes)) = refused else { panic!("{refused:?}") };
    assert!(matches!(&outcomes[1], Outcome::Rejected { error } if error.contains("20000")), "{outcomes:?}");
    assert!(matches!(&outcomes[4], Outcome::Misconfigured { .. }), "{outcomes:?}");
    assert_eq!([&outcomes[0], &outcomes[2], &outcomes[3]], [&Outcome::Held; 3]);
    made.remove(1);
    member.finish(&positions(&came), made).await.expect("the rest is committed");
    member.close().await;
    assert_eq!(world.numbers(&broker, "bills", 3).await, [0, 1, 2]);
}

#[tokio::test]
async fn while_a_partition_is_held_the_others_go_on() {
    let world = World::new();
    let broker = world.broker("&partitions=4");
    confirmed(&broker.publish((0..40).map(order).collect()).await);
    let mut member = member(&broker).await;
    let first = receive(&mut *member, 1).await.remove(0);
    let held = BTreeSet::from([first.position.partition]);
    let mut others = 0;
    let all = world.read("orders", 40);
    let of_held = all.iter().filter(|(_, partition)| *partition as u64 == first.position.partition).count();
    while others < 40 - of_held {
        let heard = tokio::time::timeout(PATIENCE, member.receive_beside(&held, 5)).await.expect("in time");
        let Ok(Beside::Messages(came)) = heard else { panic!("{heard:?}") };
        assert!(came.iter().all(|delivery| !held.contains(&delivery.position.partition)), "{came:?}");
        others += came.len();
        let made = came.iter().map(bill).collect();
        member.finish(&positions(&came), made).await.expect("it is committed");
    }
    let mut late = vec![first];
    late.extend(receive(&mut *member, of_held - 1).await);
    let made = late.iter().map(bill).collect();
    member.finish(&positions(&late), made).await.expect("it is committed");
    member.close().await;
    assert_eq!(world.numbers(&broker, "bills", 40).await, (0..40).collect::<Vec<_>>());
}

#[tokio::test]
async fn what_the_group_wants_back_is_said_and_comes_to_the_other_member() {
    let world = World::new();
    let broker = world.broker("&partitions=2");
    world.make("orders", 2, &[]).await;
    world.send_in_transactions("orders", 0..40);
    let mut first = member(&broker).await;
    let mut came = receive(&mut *first, 40).await;
    // Between what is done and what is not lies the end of a transaction, which nobody receives.
    let mut seen = BTreeSet::new();
    let done: Vec<_> = came.extract_if(.., |delivery| seen.insert(delivery.position.partition)).collect();
    first.finish(&positions(&done), done.iter().map(bill).collect()).await.expect("it is committed");
    let held: BTreeSet<u64> = came.iter().map(|delivery| delivery.position.partition).collect();
    assert_eq!(held.len(), 2, "both partitions have messages");
    let mut second = member(&broker).await;
    let heard = tokio::time::timeout(PATIENCE, first.receive_beside(&held, 5)).await.expect("in time");
    let Ok(Beside::Wanted(wanted)) = heard else { panic!("{heard:?}") };
    let (back, kept): (Vec<_>, Vec<_>) =
        came.into_iter().partition(|delivery| wanted.contains(&delivery.position.partition));
    assert!(!back.is_empty() && !kept.is_empty(), "one of two is wanted: {wanted:?}");
    first.give_back(&positions(&back)).await.expect("it can be given back");
    let theirs = receive(&mut *second, back.len()).await;
    // Both at once, each its own.
    let (mine, others) = (kept.iter().map(bill).collect(), theirs.iter().map(bill).collect());
    let (kept, theirs) = (positions(&kept), positions(&theirs));
    let (mine, others) = tokio::join!(first.finish(&kept, mine), second.finish(&theirs, others));
    assert_eq!((mine, others), (Ok(()), Ok(())));
    first.close().await;
    second.close().await;
    assert_eq!(world.numbers(&broker, "bills", 40).await, (0..40).collect::<Vec<_>>());
}

#[tokio::test]
async fn what_is_not_the_members_any_more_is_not_sent() {
    let world = World::new();
    let broker = world.broker("&partitions=1");
    confirmed(&broker.publish((0..4).map(order).collect()).await);
    let mut member = member(&broker).await;
    let came = receive(&mut *member, 2).await;
    member.give_back(&positions(&came[1..])).await.expect("it can be given back");
    let late = member.finish(&positions(&came), came.iter().map(bill).collect()).await;
    assert!(matches!(late, Err(Unfinished::Over(_))), "{late:?}");
    let over = member.receive(1).await;
    assert!(over.is_err(), "{over:?}");
    member.close().await;
    let mut next = self::member(&broker).await;
    let came = receive(&mut *next, 4).await;
    next.finish(&positions(&came), came.iter().map(bill).collect()).await.expect("it is committed");
    next.close().await;
    assert_eq!(world.numbers(&broker, "bills", 4).await, [0, 1, 2, 3]);
}
