//! Lanes: who may work on what.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use message::{State, Status};
use store::{Lease, Left, TopicRule};
use uuid::Uuid;

use super::{ALL, PATIENCE, ids_of, record, state, write};
use crate::store::{Relay, World, free, holding, sent};
use crate::{eventually, within};

/// Short enough to see it end, long enough not to end while a case looks.
const SOON: Duration = Duration::from_millis(400);

fn lanes_of(leases: &[Lease]) -> BTreeSet<u16> {
    leases.iter().map(|lease| lease.lane).collect()
}

/// Lanes 1: what one has, nobody else gets.
pub async fn a_lane_has_one_owner(world: World) {
    let mut relays = Vec::new();
    for _ in 0..4 {
        relays.push(Relay::new(world.open().await));
    }
    for _ in 0..6 {
        for relay in &mut relays {
            let beaten = relay.beat().await;
            assert!(beaten.held.len() <= 1_024);
            // Gives back what it was told to, so that lanes go around.
            let surplus = beaten.held.len() - beaten.surplus.min(beaten.held.len());
            let back = relay.held.split_off(surplus);
            relay.store.release(&back, Left::Untouched).await.expect("lanes can be released");
        }
        let mut owned = BTreeSet::new();
        for relay in &relays {
            for lane in lanes_of(&relay.held) {
                assert!(owned.insert(lane), "lane {lane} has two owners");
            }
        }
    }
    let total = relays[0].store.lanes().await.expect("lanes can be seen").len();
    let held: usize = relays.iter().map(|relay| relay.held.len()).sum();
    assert_eq!(held, total, "in the end every lane has an owner");
}

/// Lanes 2: epochs rise, whichever way a lane changes hands.
pub async fn every_change_of_hands_raises_the_epoch(world: World) {
    let store = world.open().await;
    let mut last: BTreeMap<u16, i64> = BTreeMap::new();
    let mut leases = BTreeSet::new();
    for round in 0..4 {
        let mut relay = Relay::new(store.clone());
        relay.beat().await;
        assert!(!relay.held.is_empty());
        for lease in &relay.held {
            let before = last.insert(lease.lane, lease.epoch);
            assert!(before.is_none_or(|before| before < lease.epoch), "lane {}: {before:?}", lease.lane);
            assert!(leases.insert(lease.id), "a lease id is never used twice");
        }
        if round % 2 == 0 {
            relay.leave().await;
        } else {
            store.release(&relay.held, Left::Untouched).await.expect("lanes can be released");
            // The instance still counts; it must not keep others from their share.
            relay.leave().await;
        }
    }
}

/// Lanes 3: a lease that was lost, or was never given, is not renewed, and its holder hears so.
pub async fn a_lease_is_renewed_only_for_its_own_epoch_and_id(world: World) {
    let mut relay = Relay::with_all_lanes(world.open().await).await;
    let ours = relay.held.clone();
    relay.held.push(Lease { id: Uuid::new_v4(), ..ours[0] });
    relay.held.push(Lease { epoch: ours[0].epoch + 1, ..ours[0] });
    assert_eq!(relay.renew().await.held, ours, "only what was given is renewed");

    relay.leave().await;
    let next = Relay::with_all_lanes(world.open().await).await;
    assert_eq!(lanes_of(&next.held), lanes_of(&ours));
    assert_eq!(relay.renew().await.held, [], "what somebody else has is lost");
    let mut next = next;
    let held = next.held.clone();
    assert_eq!(next.renew().await.held, held, "and the loser's try did no harm");
}

/// Lanes 4: what a dead relay had is sendable again, as it was, with one crash more.
pub async fn taking_a_lane_makes_what_its_owner_left_sendable_with_one_crash_more(world: World) {
    let first = Relay::with_all_lanes(world.open().await).await;
    let written = write(&first.store, "orders", &["a", "b", "c"]).await;
    let batches = first.claim(10).await;
    assert_eq!(ids_of(&batches).len(), 3);
    first.leave().await;

    let mut second = Relay::new(world.open().await);
    let beaten = second.beat().await;
    assert_eq!((beaten.orphans, beaten.dead), (3, 0));
    for id in &written {
        assert_eq!(state(&second.store, *id).await, State { crashes: 1, ..State::NEW });
    }
    let mut again = ids_of(&second.claim(10).await);
    again.sort();
    let mut expected = written;
    expected.sort();
    assert_eq!(again, expected);
}

fn by_topic(topic: &str) -> TopicRule {
    TopicRule { channel: usize::from(topic == "refunds"), ..free(topic) }
}

/// Lanes 4: a lane may have several batches; none of them is left behind.
pub async fn taking_a_lane_resolves_every_batch_that_its_owner_left(world: World) {
    let first = Relay::with_all_lanes(world.open().await).await.by(by_topic);
    let mut written = write(&first.store, "orders", &["a", "a"]).await;
    written.extend(write(&first.store, "refunds", &["a", "a"]).await);
    let late = first.claim(10).await;
    assert_eq!((late.len(), ids_of(&late).len()), (2, 4), "a key has a lane, and each topic a channel");
    first.leave().await;

    let mut second = Relay::new(world.open().await).by(by_topic);
    assert_eq!(second.beat().await.orphans, 4);
    for id in &written {
        assert_eq!(state(&second.store, *id).await, State { crashes: 1, ..State::NEW });
    }
    for batch in &late {
        assert_eq!(first.settle(batch, |_| sent()).await.fenced, [batch.id]);
    }
    assert_eq!(ids_of(&second.claim(10).await).len(), 4);
}

/// Lanes 4: at the limit it is Dead, says why, and holds its key where the rule says so.
pub async fn a_message_that_was_left_too_often_is_dead(world: World) {
    let store = world.open().await;
    let written = write(&store, "orders", &["a", "a"]).await;
    for crash in 1..=State::CRASHES_BEFORE_DEAD {
        let relay = Relay::with_all_lanes(store.clone()).await.by(holding);
        let batches = relay.claim(1).await;
        assert_eq!(ids_of(&batches), [written[0]], "crash {crash}");
        relay.leave().await;
        let mut next = Relay::new(store.clone()).by(holding);
        let beaten = next.beat().await;
        let dead = crash == State::CRASHES_BEFORE_DEAD;
        assert_eq!((beaten.orphans, beaten.dead), (1, usize::from(dead)));
        let record = record(&store, written[0]).await;
        assert_eq!((record.state.crashes, record.state.attempts), (crash, 0));
        assert_eq!(record.state.status == Status::Dead, dead);
        assert_eq!(record.dead_reason.is_some(), dead);
        next.leave().await;
    }
    let relay = Relay::with_all_lanes(store.clone()).await.by(holding);
    assert_eq!(ids_of(&relay.claim(10).await), [], "its follower waits");
    let counts = store.counts().await.expect("counts");
    assert_eq!((counts.dead, counts.pending, counts.dead_total), (1, 1, 1));
}

/// Lanes 5: a newcomer gets what is free and nothing else.
pub async fn nothing_is_taken_from_a_living_owner(world: World) {
    let mut first = Relay::with_all_lanes(world.open().await).await;
    let all = first.held.clone();
    let mut second = Relay::new(world.open().await);
    for _ in 0..3 {
        let beaten = second.beat().await;
        assert_eq!(beaten.held, []);
        assert_eq!(beaten.instances, 2);
        assert!(beaten.wanting > 0);
        assert_eq!(first.renew().await.held, all);
    }
}

/// Lanes 5: shares are ⌈lanes / instances⌉, and who has more hears how many.
pub async fn who_holds_more_than_its_share_is_told_the_surplus(world: World) {
    let mut first = Relay::with_all_lanes(world.open().await).await;
    let lanes = first.held.len();
    let mut second = Relay::new(world.open().await);
    let mut third = Relay::new(world.open().await);
    second.beat().await;
    assert_eq!(first.renew().await.surplus, lanes - lanes.div_ceil(2));
    third.beat().await;
    let surplus = first.renew().await.surplus;
    assert_eq!(surplus, lanes - lanes.div_ceil(3));
    let back = first.held.split_off(lanes - surplus);
    first.store.release(&back, Left::Untouched).await.expect("lanes can be released");
    assert_eq!(first.beat().await.surplus, 0);
    assert_eq!(second.beat().await.held.len(), lanes.div_ceil(3).min(surplus));
    assert_eq!(third.beat().await.held.len(), surplus - second.held.len());
}

/// Lanes 6: released means free, for the next beat of anybody.
pub async fn a_released_lane_is_free_at_once(world: World) {
    let first = Relay::with_all_lanes(world.open().await).await;
    let mut second = Relay::new(world.open().await);
    second.beat().await;
    // A lease that is not held is ignored.
    let foreign = Lease { id: Uuid::new_v4(), ..first.held[0] };
    second.store.release(&[foreign], Left::Untouched).await.expect("releasing what is not held does nothing");
    assert_eq!(second.beat().await.held, []);
    first.store.release(&first.held[..1], Left::Untouched).await.expect("lanes can be released");
    assert_eq!(lanes_of(&second.beat().await.held), BTreeSet::from([first.held[0].lane]));
    let seen = first.store.lanes().await.expect("lanes can be seen");
    let owner = seen.iter().find(|view| view.lane == first.held[0].lane).and_then(|view| view.owner.clone());
    assert_eq!(owner, Some(second.instance.name.clone()));
}

/// Lanes 6: a claim of which its relay never heard is undone with the lease, and nobody's fault.
pub async fn what_a_releasing_owner_left_untouched_is_what_it_was(world: World) {
    let first = Relay::with_all_lanes(world.open().await).await.by(by_topic);
    let mut written = write(&first.store, "orders", &["a", "a"]).await;
    written.extend(write(&first.store, "refunds", &["a", "a"]).await);
    let unheard = first.claim(10).await;
    assert_eq!((unheard.len(), ids_of(&unheard).len()), (2, 4));
    // A lease that is not held closes nothing.
    let foreign: Vec<Lease> = first.held.iter().map(|lease| Lease { id: Uuid::new_v4(), ..*lease }).collect();
    first.store.release(&foreign, Left::Untouched).await.expect("releasing what is not held does nothing");
    for id in &written {
        assert_eq!(state(&first.store, *id).await.status, Status::InFlight);
    }

    first.store.release(&first.held, Left::Untouched).await.expect("lanes can be released");
    for id in &written {
        assert_eq!(state(&first.store, *id).await, State::NEW);
    }
    first.leave().await;
    let mut second = Relay::new(world.open().await).by(by_topic);
    assert_eq!(second.beat().await.orphans, 0);
    for batch in &unheard {
        assert_eq!(first.settle(batch, |_| sent()).await.fenced, [batch.id]);
    }
    assert_eq!(ids_of(&second.claim(10).await).len(), 4);
}

/// Lanes 6: what a releasing owner fell over is an orphan like any other.
pub async fn what_a_releasing_owner_fell_over_has_one_crash_more(world: World) {
    let first = Relay::with_all_lanes(world.open().await).await;
    let written = write(&first.store, "orders", &["a", "b"]).await;
    assert_eq!(ids_of(&first.claim(10).await).len(), 2);
    first.store.release(&first.held, Left::Unknown).await.expect("lanes can be released");
    first.leave().await;
    let mut second = Relay::new(world.open().await);
    assert_eq!(second.beat().await.orphans, 2);
    for id in &written {
        assert_eq!(state(&second.store, *id).await, State { crashes: 1, ..State::NEW });
    }
}

/// Lanes 6: a relay that falls silent keeps its lanes until its lease ends, and no longer.
pub async fn a_dead_owners_lanes_are_free_when_its_lease_runs_out(world: World) {
    let mut first = Relay::new(world.open().await).leasing(SOON);
    let asked = std::time::Instant::now();
    first.beat().await;
    let mut second = Relay::new(world.open().await);
    let lanes = first.held.len();
    while second.beat().await.held.len() < lanes.div_ceil(2) {
        assert!(asked.elapsed() < PATIENCE, "the lease should have run out");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    // One millisecond for the store's rounding.
    assert!(asked.elapsed() + Duration::from_millis(1) >= SOON, "not before its end");
    let second = tokio::sync::Mutex::new(second);
    let all = eventually(PATIENCE, || async { second.lock().await.beat().await.held.len() == lanes }).await;
    assert!(all, "the dead one no longer counts");
    assert_eq!(first.renew().await.held, []);
}

/// Lanes 7: another number of lanes waits until all are given back, and asks for them.
pub async fn the_number_of_lanes_changes_only_while_none_is_leased(world: World) {
    let store = world.open().await;
    for impossible in [0, 3, 2_048] {
        store.set_lanes(impossible).await.expect_err("only powers of two up to 1024 are possible");
    }
    assert!(store.set_lanes(8).await.expect("nobody holds any"));
    let mut relay = Relay::with_all_lanes(store.clone()).await;
    assert_eq!(relay.held.len(), 8);

    assert!(!store.set_lanes(4).await.expect("it is asked for"), "the relay must drain first");
    assert_eq!(store.lanes().await.expect("lanes can be seen").len(), 8);
    let beaten = relay.beat().await;
    assert_eq!((beaten.held.len(), beaten.surplus), (8, 8), "the holder is asked for all");
    store.release(&relay.held, Left::Untouched).await.expect("lanes can be released");
    relay.held.clear();
    assert_eq!(relay.beat().await.held.len(), 4);
    assert_eq!(store.lanes().await.expect("lanes can be seen").len(), 4);
    // The same number again is in force already.
    assert!(store.set_lanes(4).await.expect("nothing changes"));
}

/// Lanes 7: a batch that a dead relay left keeps the number until it is resolved, with its crash counted.
pub async fn an_open_batch_keeps_the_number_of_lanes(world: World) {
    let store = world.open().await;
    let first = Relay::with_all_lanes(store.clone()).await.by(free);
    let written = write(&store, "orders", &["a", "b", "c", "d", "e", "f"]).await;
    assert_eq!(ids_of(&first.claim(10).await).len(), 6);
    first.leave().await;
    assert!(!store.set_lanes(1).await.expect("it is asked for"), "a batch is open");

    let second = tokio::sync::Mutex::new(Relay::new(store.clone()));
    within(PATIENCE, "one lane", || async {
        let held = second.lock().await.beat().await.held;
        (held.len() == 1).then_some(())
    })
    .await;
    let second = second.into_inner();
    for id in &written {
        assert_eq!(state(&store, *id).await.crashes, 1);
    }
    assert_eq!(second.drain(100, &sent()).await.len(), 6, "all is on the one lane");
    assert_eq!(store.list(&Default::default(), ALL).await.expect("a list").items.len(), 6);
}
