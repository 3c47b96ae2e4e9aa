//! Subscription: receiving messages.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use broker::ReceiveError;

use super::{
    PAUSE, assert_each_key_in_order, drain, nothing_comes, numbers, patiently, positions, publish, receive,
    sorted, subscribe,
};
use crate::broker::World;
use crate::rejection::patience;

/// Long enough for a group to share its partitions anew, unless its broker is slow to notice anything.
const AT_ONCE: Duration = Duration::from_secs(8);

fn up_to(count: i64) -> Vec<i64> {
    (0..count).collect()
}

/// Subscription 1: groups do not take from each other.
pub async fn each_group_gets_each_message(world: World) {
    if !world.claimed(|broker| broker.groups).await {
        return;
    }
    let broker = world.open().await;
    publish(&broker, 8, 0, 40).await;
    let mut billing = subscribe(&broker, "billing").await;
    let deliveries = receive(&mut billing, 40).await;
    assert_eq!(numbers(&deliveries), up_to(40));
    billing.acknowledge(&positions(&deliveries)).await.expect("an acknowledgement is taken");
    let mut shipping = subscribe(&broker, "shipping").await;
    assert_eq!(numbers(&receive(&mut shipping, 40).await), up_to(40));
    assert!(nothing_comes(&mut billing).await, "what was acknowledged does not come again");
}

/// Subscription 1: delivered is not done.
pub async fn what_was_not_acknowledged_comes_again_after_a_crash(world: World) {
    let broker = world.open().await;
    publish(&broker, 1, 0, 10).await;
    let mut first = subscribe(&broker, "billing").await;
    let deliveries = sorted(receive(&mut first, 10).await);
    first.acknowledge(&positions(&deliveries[..4])).await.expect("an acknowledgement is taken");
    // Dropped without a farewell, as by a crash.
    drop(first);
    let mut second = subscribe(&broker, "billing").await;
    let again = sorted(receive(&mut second, 6).await);
    assert_eq!(numbers(&again), [4, 5, 6, 7, 8, 9]);
    assert_eq!(again[0].message.id, deliveries[4].message.id, "it is the same message");
}

/// Subscription 2: the order of storing, and one place for each key.
pub async fn messages_of_a_key_arrive_in_order_from_one_partition(world: World) {
    if !world.claimed(|broker| broker.key_order).await {
        return;
    }
    let broker = world.open().await;
    publish(&broker, 7, 0, 210).await;
    let mut subscription = subscribe(&broker, "billing").await;
    let deliveries = drain(&mut subscription, 210).await;
    assert_each_key_in_order(&deliveries);
    let mut partitions: BTreeMap<_, BTreeSet<u64>> = BTreeMap::new();
    let mut last: BTreeMap<u64, i64> = BTreeMap::new();
    for delivery in &deliveries {
        partitions.entry(delivery.message.key.clone()).or_default().insert(delivery.position.partition);
        let before = last.insert(delivery.position.partition, delivery.position.offset);
        assert!(before.is_none_or(|before| before < delivery.position.offset), "{:?}", delivery.position);
    }
    assert!(partitions.values().all(|partitions| partitions.len() == 1), "{partitions:?}");
}

/// Subscription 3: members share the work; nobody does what another does.
pub async fn members_of_a_group_never_get_the_same_message(world: World) {
    let (here, there) = (world.open().await, world.open().await);
    let mut one = subscribe(&here, "billing").await;
    let mut two = subscribe(&there, "billing").await;
    let (mut of_one, mut of_two) = (Vec::new(), Vec::new());
    let mut sent = 0;
    // The first gives up a part once it hears of the second; from then on both get some of each round.
    for _ in 0..200 {
        publish(&here, 64, sent, 64).await;
        sent += 64;
        let before = (of_one.len(), of_two.len());
        while (of_one.len() + of_two.len()) < usize::try_from(sent).expect("a small number") {
            let more = patiently(async {
                tokio::select! {
                    deliveries = one.receive(64) => (&mut one, &mut of_one, deliveries),
                    deliveries = two.receive(64) => (&mut two, &mut of_two, deliveries),
                }
            });
            let (member, received, deliveries) = more.await.expect("no message is missing");
            let deliveries = deliveries.expect("messages can be received");
            member.acknowledge(&positions(&deliveries)).await.expect("an acknowledgement is taken");
            received.extend(deliveries);
        }
        if of_one.len() > before.0 && of_two.len() > before.1 {
            break;
        }
    }
    assert!(!of_one.is_empty() && !of_two.is_empty(), "both have a part");
    assert_each_key_in_order(&of_one);
    assert_each_key_in_order(&of_two);
    of_one.extend(of_two);
    assert_eq!(numbers(&of_one), up_to(sent), "each message came once");
}

/// Subscription 4: one position speaks for all before it in its partition.
pub async fn acknowledging_finishes_all_before_it(world: World) {
    let broker = world.open().await;
    publish(&broker, 1, 0, 10).await;
    let mut first = subscribe(&broker, "billing").await;
    let deliveries = sorted(receive(&mut first, 10).await);
    first.acknowledge(&[deliveries[6].position]).await.expect("an acknowledgement is taken");
    // An earlier position, said later, takes nothing back.
    first.acknowledge(&[deliveries[2].position]).await.expect("an acknowledgement is taken");
    first.close().await;
    let mut second = subscribe(&broker, "billing").await;
    let left = match broker.guarantees().key_order {
        true => vec![7, 8, 9],
        // Each is a partition of its own, and none is before it.
        false => vec![0, 1, 3, 4, 5, 7, 8, 9],
    };
    assert_eq!(numbers(&receive(&mut second, left.len()).await), left);
    assert!(nothing_comes(&mut second).await);
}

/// Subscription 4: the late word of a member that was taken for dead counts for nothing.
pub async fn a_member_that_lost_its_partitions_acknowledges_nothing(world: World) {
    if !world.claimed(|broker| broker.fenced).await {
        return;
    }
    let broker = world.open().await;
    publish(&broker, 4, 0, 40).await;
    let silent = world.open_silent().await;
    let mut first = subscribe(&silent, "billing").await;
    let late = receive(&mut first, 40).await;
    world.fixture().expire().await;
    let mut second = subscribe(&broker, "billing").await;
    assert_eq!(numbers(&receive(&mut second, 40).await), up_to(40));
    first.acknowledge(&positions(&late)).await.expect("it is not an error to be late");
    // The first may have joined again when it heard; nobody may be left to hold anything.
    second.close().await;
    first.close().await;
    world.fixture().expire().await;
    let mut third = subscribe(&broker, "billing").await;
    assert_eq!(numbers(&receive(&mut third, 40).await), up_to(40));
}

/// Subscription 5: from there on everything comes again, and nothing before it.
pub async fn what_was_given_back_comes_again_with_all_after_it(world: World) {
    let broker = world.open().await;
    publish(&broker, 1, 0, 10).await;
    let mut subscription = subscribe(&broker, "billing").await;
    let deliveries = sorted(receive(&mut subscription, 10).await);
    assert!(nothing_comes(&mut subscription).await, "nothing comes twice by itself");
    subscription.acknowledge(&positions(&deliveries[..3])).await.expect("an acknowledgement is taken");
    subscription.give_back(&[deliveries[6].position]).await.expect("messages can be given back");
    // Without order each is a partition of its own, and none is after it.
    let ordered = broker.guarantees().key_order;
    let again = if ordered { vec![6, 7, 8, 9] } else { vec![6] };
    assert_eq!(numbers(&receive(&mut subscription, again.len()).await), again);
    // What is acknowledged stays so.
    subscription.give_back(&[deliveries[1].position]).await.expect("messages can be given back");
    let again = if ordered { vec![3, 4, 5, 6, 7, 8, 9] } else { Vec::new() };
    assert_eq!(numbers(&receive(&mut subscription, again.len()).await), again);
    assert!(nothing_comes(&mut subscription).await);
}

/// Subscription 6: who comes late has missed nothing that is kept.
pub async fn a_new_group_starts_at_the_oldest_message(world: World) {
    let broker = world.open().await;
    publish(&broker, 4, 0, 20).await;
    let mut late = subscribe(&broker, "late").await;
    assert_eq!(numbers(&drain(&mut late, 20).await), up_to(20));
    publish(&broker, 4, 20, 4).await;
    assert_eq!(numbers(&drain(&mut late, 4).await), [20, 21, 22, 23]);
}

/// Dropping a `receive` that has not answered loses no message.
pub async fn a_receive_that_was_dropped_loses_nothing(world: World) {
    let broker = world.open().await;
    let mut subscription = subscribe(&broker, "billing").await;
    // Once something has come the member is in: from here on messages come while somebody waits for them.
    publish(&broker, 4, 0, 4).await;
    let mut deliveries = drain(&mut subscription, 4).await;
    for round in 1..20 {
        publish(&broker, 4, round * 4, 4).await;
        // Sometimes before the look, sometimes within it, sometimes after: however slow the broker is, one fits.
        let patience = Duration::from_millis(1 << (round / 2));
        if let Ok(more) = tokio::time::timeout(patience, subscription.receive(100)).await {
            let more = more.expect("messages can be received");
            subscription.acknowledge(&positions(&more)).await.expect("an acknowledgement is taken");
            deliveries.extend(more);
        }
    }
    let missing = 80 - deliveries.len();
    deliveries.extend(drain(&mut subscription, missing).await);
    assert_eq!(numbers(&deliveries), up_to(80));
    if broker.guarantees().key_order {
        assert_each_key_in_order(&deliveries);
    }
}

/// Closing gives everything to the others without waiting for a lease.
pub async fn a_closed_member_leaves_its_partitions_to_others(world: World) {
    let broker = world.open().await;
    publish(&broker, 16, 0, 16).await;
    let mut first = subscribe(&broker, "billing").await;
    // It is in once it has something. One that goes while it is still asking to be let in cannot say so to every broker.
    receive(&mut first, 4).await;
    let mut second = subscribe(&broker, "billing").await;
    first.close().await;
    // Before a lease ends that is long.
    let at_once = AT_ONCE.max(world.fixture().patience().mul_f64(0.8));
    let all = tokio::time::timeout(at_once, receive(&mut second, 16)).await;
    assert_eq!(numbers(&all.expect("nothing is waited for")), up_to(16));
}

/// Subscription 7: slow is not dead.
pub async fn what_a_slow_member_has_received_stays_with_it(world: World) {
    let (here, there) = (world.open().await, world.open().await);
    publish(&here, 12, 0, 12).await;
    let mut slow = subscribe(&here, "billing").await;
    let deliveries = receive(&mut slow, 12).await;
    let mut other = subscribe(&there, "billing").await;
    let work = world.fixture().patience().mul_f64(2.5);
    let came = tokio::time::timeout(work, other.receive(12)).await;
    assert!(came.is_err(), "another member got what the first is still working on");
    slow.acknowledge(&positions(&deliveries)).await.expect("an acknowledgement is taken");
    slow.close().await;
    assert!(nothing_comes(&mut other).await, "it was acknowledged in time");
}

/// Subscription 8: an operator restarts the broker, and whatever was not acknowledged comes again.
pub async fn nothing_is_lost_when_the_broker_is_restarted(world: World) {
    let broker = world.open().await;
    publish(&broker, 4, 0, 20).await;
    let mut subscription = subscribe(&broker, "billing").await;
    let mut came = receive(&mut subscription, 8).await;
    subscription.acknowledge(&positions(&came)).await.expect("an acknowledgement is taken");
    world.fixture().restart().await;
    let begun = Instant::now();
    while numbers(&came).into_iter().collect::<BTreeSet<_>>().len() < 20 {
        assert!(begun.elapsed() < patience(), "{:?} came", numbers(&came));
        match patiently(subscription.receive(20)).await {
            Some(Ok(more)) => {
                let done = subscription.acknowledge(&positions(&more)).await;
                came.extend(more);
                if done.is_ok() {
                    continue;
                }
            }
            Some(Err(ReceiveError::Unreachable(_))) => {}
            Some(Err(error)) => panic!("{error}"),
            None => panic!("neither messages nor an error: {:?} came", numbers(&came)),
        }
        // As a consumer does: leave, wait a little, join again.
        subscription.close().await;
        subscription = loop {
            assert!(begun.elapsed() < patience(), "it cannot be joined again");
            match broker.subscribe("billing", &["orders".to_owned()]).await {
                Ok(subscription) => break subscription,
                Err(ReceiveError::Unreachable(_)) => tokio::time::sleep(PAUSE).await,
                Err(error) => panic!("{error}"),
            }
        };
    }
}
