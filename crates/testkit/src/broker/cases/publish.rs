//! Publisher: sending messages.

use std::time::{Duration, Instant};

use broker::{Outcome, Outgoing};
use chrono::DateTime;
use message::Message;

use super::{PAUSE, drain, nothing_comes, number, numbers, outgoing, publish, receive, subscribe};
use crate::broker::{Broker, World};
use crate::rejection::patience;

/// One that no broker of the suite takes.
fn impossible(broker: &dyn Broker, key: &str) -> Outgoing {
    let limit = broker.guarantees().max_payload.expect("the suite's brokers have a limit");
    Outgoing::new(Message::new("orders", vec![b'x'; limit + 1]).key(key), 99)
}

fn is_rejected(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Rejected { .. })
}

/// Publisher 1: as many outcomes as messages, each in the place of its message.
pub async fn every_message_has_one_outcome_in_its_place(world: World) {
    let broker = world.open().await;
    let batch = vec![outgoing("a", 1), outgoing("b", 2), impossible(&*broker, "c")];
    let outcomes = broker.publish(batch).await;
    assert_eq!(outcomes.len(), 3);
    assert_eq!(outcomes[..2], [Outcome::Confirmed, Outcome::Confirmed]);
    assert!(is_rejected(&outcomes[2]), "{outcomes:?}");
    assert_eq!(broker.publish(Vec::new()).await, []);
}

/// Publisher 2: the broker keeps what it confirmed.
pub async fn what_was_confirmed_is_there_after_everybody_has_gone(world: World) {
    let broker = world.open().await;
    publish(&broker, 5, 0, 20).await;
    drop(broker);
    let broker = world.open().await;
    let mut subscription = subscribe(&broker, "billing").await;
    assert_eq!(numbers(&drain(&mut subscription, 20).await), (0..20).collect::<Vec<_>>());
}

/// Publisher 3: with `ordered_batches`, the order of a call is the order of its keys.
pub async fn messages_of_a_key_are_stored_in_the_order_given(world: World) {
    if !world.claimed(|broker| broker.key_order && broker.ordered_batches).await {
        return;
    }
    let broker = world.open().await;
    for round in 0..3 {
        let batch: Vec<_> = (0..10).map(|n| outgoing("key", round * 10 + n)).collect();
        let outcomes = broker.publish(batch).await;
        assert!(outcomes.iter().all(|outcome| *outcome == Outcome::Confirmed), "{outcomes:?}");
    }
    let mut subscription = subscribe(&broker, "billing").await;
    let deliveries = drain(&mut subscription, 30).await;
    super::assert_each_key_in_order(&deliveries);
    assert_eq!(numbers(&deliveries), (0..30).collect::<Vec<_>>());
}

/// Publisher 3: nobody of its key overtakes one that was not confirmed; other keys do not mind.
pub async fn after_one_that_was_not_confirmed_none_of_its_key_is_stored(world: World) {
    let broker = world.open().await;
    if !world.claimed(|broker| broker.ordered_batches).await {
        // Then nothing is ever held.
        let outcomes = broker.publish(vec![impossible(&*broker, "a"), outgoing("b", 1)]).await;
        assert!(!outcomes.contains(&Outcome::Held), "{outcomes:?}");
        return;
    }
    let refund = Outgoing::new(Message::new("refunds", "4").key("a"), 4);
    let batch = vec![
        outgoing("a", 1),
        impossible(&*broker, "a"),
        outgoing("a", 2),
        outgoing("b", 3),
        refund,
        outgoing("a", 5),
    ];
    let outcomes = broker.publish(batch).await;
    assert!(is_rejected(&outcomes[1]), "{outcomes:?}");
    assert_eq!([&outcomes[2], &outcomes[5]], [&Outcome::Held, &Outcome::Held]);
    assert_eq!([&outcomes[0], &outcomes[3], &outcomes[4]], [&Outcome::Confirmed; 3]);
    let mut subscription = subscribe(&broker, "billing").await;
    assert_eq!(numbers(&drain(&mut subscription, 2).await), [1, 3]);
    // What was held, if it is stored, comes before others of its key.
    let later = broker.publish(vec![outgoing("a", 6), outgoing("b", 7)]).await;
    assert_eq!(later, [Outcome::Confirmed, Outcome::Confirmed]);
    assert_eq!(numbers(&drain(&mut subscription, 2).await), [6, 7], "what was held is not stored");
}

/// Publisher 4: a message that can never be stored harms no other.
pub async fn an_impossible_message_is_rejected_alone(world: World) {
    let broker = world.open().await;
    let batch = vec![outgoing("a", 1), impossible(&*broker, "b"), outgoing("c", 2)];
    let outcomes = broker.publish(batch).await;
    assert_eq!([&outcomes[0], &outcomes[2]], [&Outcome::Confirmed; 2]);
    let Outcome::Rejected { error } = &outcomes[1] else { panic!("{outcomes:?}") };
    assert!(!error.is_empty(), "the rejection says why");
    let mut subscription = subscribe(&broker, "billing").await;
    assert_eq!(numbers(&receive(&mut subscription, 2).await), [1, 2]);
    // Not stored once, not stored ever: it is the message, not the moment.
    assert!(is_rejected(&broker.publish(vec![impossible(&*broker, "b")]).await[0]));
    assert!(nothing_comes(&mut subscription).await);
}

/// Publisher 5: nothing is lost or changed on the way.
pub async fn every_part_of_a_message_arrives_as_it_was_sent(world: World) {
    let broker = world.open().await;
    let full = Message {
        content_type: "text/plain".to_owned(),
        occurred_at: DateTime::from_timestamp(1_700_000_000, 123_000_000).expect("a time"),
        ..Message::new("orders", "1").key("k ö").kind("Placed").header("a", "\"ü\"").header("b", "")
    };
    let bare = Message { occurred_at: full.occurred_at, ..Message::new("orders", "2") };
    let sent = [Outgoing { delivery: 7, ..Outgoing::new(full, i64::MAX) }, Outgoing::new(bare, 2)];
    assert_eq!(broker.publish(sent.to_vec()).await, [Outcome::Confirmed, Outcome::Confirmed]);
    let mut subscription = subscribe(&broker, "billing").await;
    let mut deliveries = receive(&mut subscription, 2).await;
    deliveries.sort_by_key(number);
    for (sent, came) in sent.iter().zip(&deliveries) {
        assert_eq!(came.message, *sent.message);
        assert_eq!((came.seq, came.delivery), (Some(sent.seq), sent.delivery));
    }
}

/// Publisher 6: a broker that answers nothing does not hold the relay for longer than was agreed.
pub async fn publish_ends_within_its_time_limit(world: World) {
    let broker = world.open().await;
    publish(&broker, 1, 0, 1).await;
    let limit = world.fixture().time_limit();
    let stalled = world.fixture().stall().await;
    let asked = Instant::now();
    let outcomes = tokio::time::timeout(limit, broker.publish(vec![outgoing("a", 1)])).await;
    let outcomes = outcomes.unwrap_or_else(|_| panic!("no outcome after {:?}", asked.elapsed()));
    assert!(
        matches!(&outcomes[..], [Outcome::Unreachable { .. } | Outcome::Unconfirmed { .. }]),
        "{outcomes:?}"
    );
    drop(stalled);
    publish(&broker, 1, 2, 1).await;
}

/// Publisher 7: it is the destination that is wrong, and only that one.
pub async fn a_destination_that_is_missing_is_misconfigured_alone(world: World) {
    // Made by a client that may.
    publish(&world.open().await, 1, 0, 1).await;
    let Some(strict) = world.open_strict().await else { return };
    let lost = Outgoing::new(Message::new("no-such-topic", "1").key("a"), 1);
    let outcomes = strict.publish(vec![lost, outgoing("b", 2)]).await;
    let Outcome::Misconfigured { error } = &outcomes[0] else { panic!("{outcomes:?}") };
    assert!(error.contains("no-such-topic"), "it says which: {error}");
    assert_eq!(outcomes[1], Outcome::Confirmed);
}

/// Publisher 8: an operator restarts the broker, and nobody has to restart the relay.
pub async fn a_publisher_goes_on_after_the_broker_was_restarted(world: World) {
    let broker = world.open().await;
    publish(&broker, 4, 0, 20).await;
    world.fixture().restart().await;
    // The first words after it may meet a connection that is gone.
    let begun = Instant::now();
    loop {
        let outcomes = broker.publish(vec![outgoing("key-0", 20)]).await;
        if outcomes == [Outcome::Confirmed] {
            break;
        }
        let blameless = matches!(&outcomes[..], [Outcome::Unreachable { .. } | Outcome::Unconfirmed { .. }]);
        assert!(blameless, "no message is to blame: {outcomes:?}");
        assert!(begun.elapsed() < patience(), "it does not come back: {outcomes:?}");
        tokio::time::sleep(PAUSE).await;
    }
    let mut subscription = subscribe(&broker, "billing").await;
    let deliveries = drain(&mut subscription, 21).await;
    let mut numbers = numbers(&deliveries);
    // One that was not confirmed may have been stored all the same.
    numbers.dedup();
    assert_eq!(numbers, (0..21).collect::<Vec<_>>());
}

/// Publisher 10: what the broker says it recognises, it does; and it does not say so of a longer time than it promises.
pub async fn what_is_sent_twice_while_it_is_recognised_is_stored_once(world: World) {
    let broker = world.open().await;
    let Some(window) = broker.guarantees().deduplication else {
        assert!(!world.claimed(|broker| broker.deduplication.is_some()).await);
        let refused = broker.recognises(Duration::from_secs(1)).await;
        assert!(matches!(refused, Err(Outcome::Misconfigured { .. })), "{refused:?}");
        return;
    };
    assert_eq!(broker.recognises(window).await, Ok(()));
    let refused = broker.recognises(window + Duration::from_secs(1)).await;
    assert!(matches!(refused, Err(Outcome::Misconfigured { .. })), "{refused:?}");
    let twice = outgoing("a", 1);
    for _ in 0..3 {
        assert_eq!(broker.publish(vec![twice.clone()]).await, [Outcome::Confirmed]);
    }
    let later = world.open().await;
    assert_eq!(later.publish(vec![twice, outgoing("a", 2)]).await, [Outcome::Confirmed, Outcome::Confirmed]);
    let mut subscription = subscribe(&broker, "billing").await;
    assert_eq!(numbers(&drain(&mut subscription, 2).await), [1, 2]);
    assert!(nothing_comes(&mut subscription).await);
}
