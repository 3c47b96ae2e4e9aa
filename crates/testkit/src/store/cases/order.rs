//! Claim 4: those behind a message that is in trouble, on topics where order matters.

use std::collections::BTreeSet;
use std::time::Duration;

use message::Status;

use super::{HOUR, PATIENCE, ids, ids_of, record, write};
use crate::store::{Relay, World, dead, failed, free, holding, released, sent};
use crate::within;

/// Claim 4: they wait until it is Sent; other keys and topics do not.
pub async fn followers_of_a_failed_message_wait_until_it_is_sent(world: World) {
    let relay = Relay::with_all_lanes(world.open().await).await.by(holding);
    let store = &relay.store;
    let written = write(store, "orders", &["a", "a", "b"]).await;
    let elsewhere = write(store, "refunds", &["a"]).await;
    relay.settle_all(&relay.claim(1).await, &failed(HOUR, true)).await;
    let passed: BTreeSet<_> = ids(&relay.drain(10, &sent()).await).into_iter().collect();
    assert_eq!(passed, BTreeSet::from([written[2], elsewhere[0]]), "only its own followers wait");
    assert!(record(store, written[1]).await.held);

    let written = write(store, "orders", &["c", "c"]).await;
    relay.settle_all(&relay.claim(1).await, &failed(Duration::ZERO, true)).await;
    let again = within(PATIENCE, "the failed message", || async {
        let batches = relay.claim(10).await;
        (!batches.is_empty()).then_some(batches)
    })
    .await;
    assert_eq!(ids_of(&again), [written[0]], "its follower waits although it is in a relay's hands");
    relay.settle_all(&again, &sent()).await;
    assert_eq!(ids(&relay.drain(10, &sent()).await), [written[1]]);
    assert_eq!(store.holds(10).await.expect("holds can be seen").len(), 1, "the first key is still held");
}

/// Claim 4: while it is Dead they wait, newer ones too, and people can see what for.
pub async fn followers_of_a_dead_message_wait_while_it_is_dead(world: World) {
    let relay = Relay::with_all_lanes(world.open().await).await.by(holding);
    let store = &relay.store;
    let written = write(store, "orders", &["a", "a", "a"]).await;
    relay.settle_all(&relay.claim(1).await, &dead(true)).await;
    let newer = write(store, "orders", &["a", "b"]).await;
    assert_eq!(ids(&relay.drain(10, &sent()).await), [newer[1]]);
    for id in [written[1], written[2], newer[0]] {
        let record = record(store, id).await;
        assert_eq!((record.state.status, record.held), (Status::Pending, true));
    }
    let holds = store.holds(10).await.expect("holds can be seen");
    assert_eq!(holds.len(), 1);
    assert_eq!((holds[0].topic.as_str(), holds[0].key.as_str()), ("orders", "a"));
    assert_eq!((holds[0].id, holds[0].status), (Some(written[0]), Some(Status::Dead)));
}

/// Claim 4: released, they come in order, before those that were written while they waited.
pub async fn followers_that_were_let_go_come_before_newer_ones(world: World) {
    let relay = Relay::with_all_lanes(world.open().await).await.by(holding);
    let store = &relay.store;
    let mut written = write(store, "orders", &["a"; 5]).await;
    relay.settle_all(&relay.claim(1).await, &failed(Duration::ZERO, true)).await;
    // Meets the followers, which are parked by it.
    let retry = within(PATIENCE, "the failed message", || async {
        let batches = relay.claim(10).await;
        (!batches.is_empty()).then_some(batches)
    })
    .await;
    assert_eq!(ids_of(&retry), [written[0]]);
    written.extend(write(store, "orders", &["a"; 5]).await);
    relay.settle_all(&retry, &sent()).await;
    let mut taken = vec![written[0]];
    taken.extend(ids(&relay.drain(2, &sent()).await));
    assert_eq!(taken, written);
}

/// Claim 4: when several of a key fail in one batch, the later ones wait for the earliest too.
pub async fn when_several_of_a_key_fail_together_the_earliest_goes_first(world: World) {
    let relay = Relay::with_all_lanes(world.open().await).await.by(holding);
    let store = &relay.store;
    let written = write(store, "orders", &["a", "a", "a", "a"]).await;
    let batches = relay.claim(3).await;
    let waits = [Duration::from_millis(150), Duration::ZERO, Duration::from_millis(10)];
    let place = |claimed: &store::Claimed| written.iter().position(|id| *id == claimed.message.id);
    let verdict = |claimed: &store::Claimed| failed(waits[place(claimed).expect("one of ours")], true);
    assert_eq!(ids_of(&batches), written[..3]);
    relay.settle(&batches[0], verdict).await;
    let mut taken = Vec::new();
    while taken.len() < written.len() {
        let batches = within(PATIENCE, "the next message", || async {
            let batches = relay.claim(10).await;
            (!batches.is_empty()).then_some(batches)
        })
        .await;
        relay.settle_all(&batches, &sent()).await;
        taken.extend(ids_of(&batches));
    }
    assert_eq!(taken, written);

    // The same when they die together and people send them again one by one, the last one first.
    let written = write(store, "orders", &["b", "b", "b"]).await;
    relay.settle_all(&relay.claim(2).await, &dead(true)).await;
    store.requeue(written[1], "test").await.expect("a Dead message can be requeued");
    assert_eq!(ids(&relay.drain(10, &sent()).await), [], "it waits behind the earlier one");
    store.requeue(written[0], "test").await.expect("a Dead message can be requeued");
    assert_eq!(ids(&relay.drain(10, &sent()).await), written);
}

/// Claim 4, the other way: where no hold is asked for, nobody waits.
pub async fn without_a_hold_followers_pass(world: World) {
    let relay = Relay::with_all_lanes(world.open().await).await.by(free);
    let store = &relay.store;
    let written = write(store, "orders", &["a", "a", "a", "a"]).await;
    relay.settle_all(&relay.claim(1).await, &failed(HOUR, false)).await;
    relay.settle_all(&relay.claim(1).await, &dead(false)).await;
    relay.settle_all(&relay.claim(1).await, &released()).await;
    assert_eq!(ids(&relay.drain(10, &sent()).await), written[2..]);
    assert!(store.holds(10).await.expect("holds can be seen").is_empty());
    assert!(!record(store, written[3]).await.held);
}
