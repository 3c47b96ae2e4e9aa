//! Claim: taking messages and saying what became of them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use message::{Message, State, Status};
use store::{ClaimOrder, Settlement, TopicRule, Verdict};

use super::{HOUR, PATIENCE, ids, ids_of, record, state, write};
use crate::store::{Relay, World, failed, free, holding, released, sent};
use crate::within;

const KEYS: [&str; 12] = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l"];

/// Claim 1: however many relays look at the same time, a message is in one batch.
pub async fn a_message_is_in_one_open_batch_at_most(world: World) {
    let mut relays = [Relay::new(world.open().await), Relay::new(world.open().await)];
    // Both live before either takes, so that each gets half.
    relays[1].renew().await;
    relays[0].beat().await;
    relays[1].beat().await;
    assert!(relays.iter().all(|relay| !relay.held.is_empty()));
    for _ in 0..10 {
        write(&relays[0].store, "orders", &KEYS).await;
    }
    let mut taken = BTreeSet::new();
    for _ in 0..4 {
        let looks = futures::future::join_all(relays.iter().map(|relay| relay.claim(20))).await;
        for id in looks.iter().flat_map(|batches| ids_of(batches)) {
            assert!(taken.insert(id), "{id} is in two batches");
        }
    }
    assert!(!taken.is_empty());
    let in_flight = relays[0].store.counts().await.expect("counts").in_flight;
    assert_eq!(in_flight, taken.len() as u64);
}

/// Claim 1: only the lane's owner takes from it.
pub async fn a_claim_under_a_lost_lease_takes_nothing(world: World) {
    let first = Relay::with_all_lanes(world.open().await).await;
    first.leave().await;
    let second = Relay::with_all_lanes(world.open().await).await;
    write(&first.store, "orders", &KEYS).await;
    assert_eq!(ids_of(&first.claim(100).await), []);
    assert_eq!(ids_of(&second.claim(100).await).len(), KEYS.len());
}

/// Claim 2: a relay that lost its lane changes nothing and hears so.
pub async fn a_second_relay_cannot_settle_a_lost_lane(world: World) {
    let first = Relay::with_all_lanes(world.open().await).await;
    let written = write(&first.store, "orders", &["a"]).await;
    let late = first.claim(10).await;
    first.leave().await;
    let second = Relay::with_all_lanes(world.open().await).await;

    assert_eq!(first.settle(&late[0], |_| sent()).await.fenced, [late[0].id]);
    assert_eq!(state(&second.store, written[0]).await.status, Status::Pending);
    let batches = second.claim(10).await;
    assert_eq!(first.settle(&late[0], |_| sent()).await.fenced, [late[0].id]);
    // Not with a batch of the new owner's either.
    let stolen = store::Batch { lease: late[0].lease, ..batches[0].clone() };
    assert_eq!(first.settle(&stolen, |_| sent()).await.fenced, [stolen.id]);
    assert_eq!(state(&second.store, written[0]).await.status, Status::InFlight);
    assert!(second.settle(&batches[0], |_| sent()).await.fenced.is_empty());
    assert_eq!(state(&second.store, written[0]).await.status, Status::Sent);
}

/// Claim 2: what was settled is settled.
pub async fn a_batch_is_settled_once(world: World) {
    let relay = Relay::with_all_lanes(world.open().await).await;
    let written = write(&relay.store, "orders", &["a"]).await;
    let batches = relay.claim(10).await;
    assert!(relay.settle(&batches[0], |_| released()).await.fenced.is_empty());
    assert_eq!(relay.settle(&batches[0], |_| sent()).await.fenced, [batches[0].id]);
    assert_eq!(state(&relay.store, written[0]).await, State::NEW);
    assert_eq!(relay.store.counts().await.expect("counts").publish_success_total, 0);
}

/// Claim 2: a settlement is written whole or not at all.
pub async fn a_settlement_that_does_not_name_its_whole_batch_changes_nothing(world: World) {
    let relay = Relay::with_all_lanes(world.open().await).await;
    let written = write(&relay.store, "orders", &["a", "a", "a"]).await;
    let batches = relay.claim(10).await;
    let batch = &batches[0];
    assert_eq!(ids(&batch.messages), written);
    let verdicts = |seqs: &[i64]| Settlement {
        batch: batch.id,
        lease: batch.lease,
        verdicts: seqs.iter().map(|seq| (*seq, sent())).collect(),
        beside: Vec::new(),
    };
    let seqs: Vec<i64> = batch.messages.iter().map(|claimed| claimed.seq).collect();
    for wrong in [&seqs[..2], &[], &[seqs[0], seqs[1], seqs[2], seqs[2] + 1]] {
        let answer = relay.store.turn(vec![verdicts(wrong)], None).await;
        let refused = answer.as_ref().map_or(true, |turn| turn.fenced == [batch.id]);
        assert!(refused, "{answer:?}");
        for id in &written {
            assert_eq!(state(&relay.store, *id).await.status, Status::InFlight);
        }
    }
    assert!(relay.settle(batch, |_| sent()).await.fenced.is_empty(), "the batch is still open");
}

/// Claim 11: what a settlement carries is there as soon as it is settled, and once.
pub async fn what_a_settlement_carries_is_written_with_it(world: World) {
    let relay = Relay::with_all_lanes(world.open().await).await;
    let original = Message::new("alarms", "{\"gate\": 3}").key("a").kind("Raised").header("a", "b");
    let copy = original.copy_to("record");
    let stored = relay.store.append(vec![original.clone().into()]).await.expect("an append");
    assert!(stored.iter().all(Result::is_ok), "{stored:?}");
    let batches = relay.claim(10).await;
    // Twice in one settlement is once.
    let beside = vec![copy.clone(), Message::new("record", "2"), copy.clone()];
    assert!(relay.settle_beside(&batches[0], |_| sent(), beside).await.fenced.is_empty());
    let other = world.open().await;
    assert_eq!(state(&other, original.id).await.status, Status::Sent);
    let written = record(&other, copy.id).await;
    assert_eq!((written.state.status, written.message.headers), (Status::Pending, copy.headers.clone()));

    // One that is there already stays as it is, and stops nobody.
    write(&relay.store, "alarms", &["b"]).await;
    let batches =
        relay.claim_by(|topic| TopicRule { take: usize::from(topic == "alarms"), ..free(topic) }, 10).await;
    let again = Message { payload: "another".into(), ..copy.clone() };
    let beside = vec![again, Message::new("record", "3")];
    assert!(relay.settle_beside(&batches[0], |_| sent(), beside).await.fenced.is_empty());
    let mut payloads: Vec<_> =
        relay.drain(10, &sent()).await.iter().map(|claimed| claimed.message.payload.clone()).collect();
    payloads.sort_unstable();
    assert_eq!(payloads, ["2", "3", "{\"gate\": 3}"], "and all are sent like others");
}

/// Claim 11: what comes too late leaves nothing behind.
pub async fn what_a_late_settlement_carries_is_not_written(world: World) {
    let first = Relay::with_all_lanes(world.open().await).await;
    let written = write(&first.store, "alarms", &["a"]).await;
    let late = first.claim(10).await;
    first.leave().await;
    let second = Relay::with_all_lanes(world.open().await).await;
    let lost = Message::new("record", "1");
    assert_eq!(first.settle_beside(&late[0], |_| sent(), vec![lost.clone()]).await.fenced, [late[0].id]);
    let batches = second.claim(10).await;
    assert!(second.settle_beside(&batches[0], |_| sent(), Vec::new()).await.fenced.is_empty());
    // Nor does what is said a second time.
    assert_eq!(
        second.settle_beside(&batches[0], |_| sent(), vec![lost.clone()]).await.fenced,
        [batches[0].id]
    );
    assert_eq!(state(&second.store, written[0]).await.status, Status::Sent);
    assert!(second.store.record(lost.id).await.expect("a look").is_none());
    assert_eq!(second.store.counts().await.expect("counts").pending, 0);
}

/// Claim 3: each lane in the order of `seq`, over all topics, whatever the limits cut off.
pub async fn a_lane_is_claimed_in_the_order_of_writing(world: World) {
    let relay = Relay::with_all_lanes(world.open().await).await;
    for round in 0..10 {
        write(&relay.store, ["orders", "refunds"][round % 2], &KEYS).await;
    }
    let mut last: BTreeMap<u16, i64> = BTreeMap::new();
    let mut taken = 0;
    while taken < 10 * KEYS.len() {
        let batches = relay.claim(17).await;
        assert!(!batches.is_empty(), "{taken} were taken and nothing more comes");
        for batch in &batches {
            for claimed in &batch.messages {
                let before = last.insert(batch.lease.lane, claimed.seq);
                assert!(
                    before.is_none_or(|before| before < claimed.seq),
                    "{before:?} before {}",
                    claimed.seq
                );
                assert_eq!(claimed.state.status, Status::InFlight);
                taken += 1;
            }
        }
        relay.settle_all(&batches, &sent()).await;
    }
}

/// Claim 3: nobody overtakes an earlier message of its topic and key.
pub async fn a_later_message_of_a_key_waits_until_the_earlier_one_is_settled(world: World) {
    let relay = Relay::with_all_lanes(world.open().await).await;
    let written = write(&relay.store, "orders", &["a", "a"]).await;
    let first = relay.claim(1).await;
    assert_eq!(ids_of(&first), [written[0]]);
    assert_eq!(ids_of(&relay.claim(10).await), []);
    relay.settle_all(&first, &released()).await;
    let again = relay.claim(1).await;
    assert_eq!(ids_of(&again), [written[0]], "what was given back comes first again");
    relay.settle_all(&again, &sent()).await;
    assert_eq!(ids_of(&relay.claim(10).await), [written[1]]);
}

/// Claim 5: not before its time; it counts as no attempt, and later ones of its key go on.
pub async fn a_postponed_message_is_not_claimed_before_its_time_and_nobody_waits_for_it(world: World) {
    const WAIT: Duration = Duration::from_millis(150);
    let relay = Relay::with_all_lanes(world.open().await).await.by(holding);
    let written = write(&relay.store, "orders", &["a", "a", "b"]).await;
    let before = record(&relay.store, written[0]).await;
    let first = relay.claim(1).await;
    assert_eq!(ids_of(&first), [written[0]]);
    relay.settle_all(&first, &Verdict::Postponed { wait: HOUR }).await;
    let postponed = record(&relay.store, written[0]).await;
    assert_eq!((postponed.state, postponed.last_error), (before.state, None), "it is what it was");
    assert!(postponed.next_attempt_at.is_some());
    assert!(relay.store.attempts(written[0]).await.expect("the history").is_empty());
    let counts = relay.store.counts().await.expect("counts");
    assert_eq!((counts.pending, counts.in_flight, counts.publish_failure_total), (3, 0, 0));
    let others = relay.claim(10).await;
    let taken: BTreeSet<_> = ids_of(&others).into_iter().collect();
    assert_eq!(
        taken,
        written[1..].iter().copied().collect(),
        "it waits, and the later one of its key does not"
    );
    let settled = Instant::now();
    relay.settle_all(&others, &Verdict::Postponed { wait: WAIT }).await;
    let mut again = BTreeSet::new();
    while again.len() < 2 {
        let batches = within(PATIENCE, "the postponed messages", || async {
            let turn = relay.look(10).await;
            (!turn.batches.is_empty()).then_some(turn.batches)
        });
        again.extend(ids_of(&batches.await));
    }
    // Two milliseconds for the store's rounding.
    assert!(settled.elapsed() + Duration::from_millis(2) >= WAIT, "after {:?}", settled.elapsed());
    assert_eq!(again, written[1..].iter().copied().collect(), "not the one that has an hour to wait");
}

/// Claim 5: not before its wait is over; then again.
pub async fn a_failed_message_is_not_claimed_before_its_wait_is_over(world: World) {
    const WAIT: Duration = Duration::from_millis(150);
    let relay = Relay::with_all_lanes(world.open().await).await;
    let written = write(&relay.store, "orders", &["a", "b"]).await;
    let batches = relay.claim(10).await;
    let settled = Instant::now();
    for batch in &batches {
        let verdict = |claimed: &store::Claimed| {
            failed(if claimed.message.id == written[0] { WAIT } else { HOUR }, false)
        };
        relay.settle(batch, verdict).await;
    }
    let record = record(&relay.store, written[0]).await;
    assert_eq!((record.state.status, record.state.attempts), (Status::Failed, 1));
    assert_eq!(record.last_error.as_deref(), Some("no luck"));
    assert!(record.next_attempt_at.is_some());
    let again = within(PATIENCE, "the failed message", || async {
        let turn = relay.look(10).await;
        if turn.batches.is_empty() {
            assert!(turn.next_due.is_some_and(|wait| wait <= WAIT), "{:?}", turn.next_due);
        }
        (!turn.batches.is_empty()).then_some(turn.batches)
    })
    .await;
    // Two milliseconds for the store's rounding.
    assert!(settled.elapsed() + Duration::from_millis(2) >= WAIT, "after {:?}", settled.elapsed());
    assert_eq!(ids_of(&again), [written[0]]);
    assert_eq!(again[0].messages[0].state.rest, Status::Failed);
    let next_due = relay.look(10).await.next_due.expect("the other one waits");
    assert!(next_due > HOUR / 2, "{next_due:?}");
}

fn down_is_closed(topic: &str) -> TopicRule {
    TopicRule { take: if topic == "down" { 0 } else { usize::MAX }, ..free(topic) }
}

/// Claim 6: a destination that is down costs the others nothing.
pub async fn a_topic_that_may_not_be_taken_hides_nobody(world: World) {
    let relay = Relay::with_all_lanes(world.open().await).await.by(down_is_closed);
    for _ in 0..20 {
        write(&relay.store, "down", &KEYS).await;
    }
    let written = write(&relay.store, "up", &KEYS[..5]).await;
    let batches = relay.claim(5).await;
    assert_eq!(ids_of(&batches).into_iter().collect::<BTreeSet<_>>(), written.into_iter().collect());
    relay.settle_all(&batches, &sent()).await;
    assert_eq!(ids_of(&relay.claim(5).await), []);
}

fn one_of_down(topic: &str) -> TopicRule {
    TopicRule { take: if topic == "down" { 1 } else { usize::MAX }, ..free(topic) }
}

/// Claim 6: a probe is one message.
pub async fn no_more_of_a_topic_is_taken_than_its_rule_says(world: World) {
    let relay = Relay::with_all_lanes(world.open().await).await.by(one_of_down);
    write(&relay.store, "down", &KEYS).await;
    write(&relay.store, "up", &KEYS).await;
    let batches = relay.claim(100).await;
    let topics =
        batches.iter().flat_map(|batch| &batch.messages).map(|claimed| claimed.message.topic.as_str());
    assert_eq!(topics.filter(|topic| *topic == "down").count(), 1);
    assert_eq!(ids_of(&batches).len(), 1 + KEYS.len());
}

/// Claim 7: a message that relays died with is alone in its batch.
pub async fn a_message_that_brings_relays_down_travels_alone(world: World) {
    let store = world.open().await;
    let written = write(&store, "orders", &["a", "a", "a"]).await;
    for _ in 0..State::CRASHES_BEFORE_ALONE {
        let relay = Relay::with_all_lanes(store.clone()).await;
        assert_eq!(ids_of(&relay.claim(2).await), written[..2]);
        relay.leave().await;
    }
    let relay = Relay::with_all_lanes(store.clone()).await;
    for (id, crashes) in [(written[0], 2), (written[1], 2), (written[2], 0)] {
        let batches = relay.claim(10).await;
        assert_eq!(ids_of(&batches), [id]);
        assert_eq!(batches[0].messages[0].state.crashes, crashes);
        relay.settle_all(&batches, &sent()).await;
    }
}

/// Claim 8: nobody gets a batch that only its relay knows of.
pub async fn a_claim_is_known_to_every_process_before_it_is_answered(world: World) {
    let relay = Relay::with_all_lanes(world.open().await).await;
    let other = world.open().await;
    let written = write(&relay.store, "orders", &["a", "b"]).await;
    let batches = relay.claim(10).await;
    assert_eq!(ids_of(&batches).len(), 2);
    for id in written {
        let record = record(&other, id).await;
        assert_eq!(record.state.status, Status::InFlight);
        assert!(record.locked_until.is_some());
    }
    assert_eq!(other.counts().await.expect("counts").in_flight, 2);
}

/// Claim 9: every verdict that reports a try in vain is in the history, oldest first.
pub async fn every_try_in_vain_is_in_the_history(world: World) {
    let relay = Relay::with_all_lanes(world.open().await).await;
    let id = write(&relay.store, "orders", &["a"]).await[0];
    let text = |error: &str| error.to_owned();
    let verdicts = [
        Verdict::Failed { error: text("one"), retry_after: Duration::ZERO, hold: false },
        released(),
        Verdict::Released { error: Some(text("two")) },
        Verdict::Dead { reason: text("limit"), error: text("three"), attempted: true, hold: false },
    ];
    for verdict in &verdicts {
        let batches = within(PATIENCE, "the message", || async {
            let batches = relay.claim(10).await;
            (!batches.is_empty()).then_some(batches)
        })
        .await;
        relay.settle_all(&batches, verdict).await;
    }
    let attempts = relay.store.attempts(id).await.expect("attempts can be read");
    let told: Vec<(&str, &str)> =
        attempts.iter().map(|attempt| (attempt.outcome.as_str(), attempt.error.as_str())).collect();
    assert_eq!(told, [("failed", "one"), ("released", "two"), ("dead", "three")]);
    let record = record(&relay.store, id).await;
    assert_eq!((record.state.status, record.state.attempts), (Status::Dead, 2));
    assert_eq!(record.dead_reason.as_deref(), Some("limit"));
    assert_eq!(relay.store.counts().await.expect("counts").publish_failure_total, 3);
}

/// A claim takes no more than was ordered; but one message always, or a large one would never leave.
pub async fn a_claim_keeps_to_its_limits(world: World) {
    let relay = Relay::with_all_lanes(world.open().await).await;
    let messages = (0..10).map(|_| Message::new("orders", vec![b'x'; 1_000]).key("a").into()).collect();
    relay.store.append(messages).await.expect("messages can be appended");
    let claim = async |limit: usize, bytes: usize| {
        let order = ClaimOrder { leases: relay.held.clone(), limit, bytes, rule: Arc::new(free) };
        let turn = relay.store.turn(Vec::new(), Some(order)).await.expect("a turn is answered");
        relay.settle_all(&turn.batches, &released()).await;
        (ids_of(&turn.batches).len(), turn.more)
    };
    assert_eq!(claim(3, usize::MAX).await, (3, true));
    assert_eq!(claim(100, 2_500).await, (2, true));
    assert_eq!(claim(100, 10).await, (1, true));
    assert_eq!(claim(100, usize::MAX).await, (10, false));
}

fn by_topic(topic: &str) -> TopicRule {
    TopicRule { channel: usize::from(topic == "refunds"), ..free(topic) }
}

fn only_orders(topic: &str) -> TopicRule {
    TopicRule { take: if topic == "orders" { usize::MAX } else { 0 }, ..by_topic(topic) }
}

fn only_refunds(topic: &str) -> TopicRule {
    TopicRule { take: if topic == "refunds" { usize::MAX } else { 0 }, ..by_topic(topic) }
}

fn orders_elsewhere(topic: &str) -> TopicRule {
    TopicRule { channel: 7, ..only_orders(topic) }
}

/// Claim 10: one turn takes for several channels, and each can be settled by itself.
pub async fn messages_of_different_channels_are_in_different_batches(world: World) {
    let relay = Relay::with_all_lanes(world.open().await).await.by(by_topic);
    let orders = write(&relay.store, "orders", &["a", "a"]).await;
    let refunds = write(&relay.store, "refunds", &["a", "a"]).await;
    let mut batches = relay.claim(10).await;
    batches.sort_by_key(|batch| batch.channel);
    let taken: Vec<_> = batches.iter().map(|batch| (batch.channel, ids(&batch.messages))).collect();
    assert_eq!(taken, [(0, orders.clone()), (1, refunds.clone())]);
    assert_eq!(batches[0].lease, batches[1].lease, "a key has one lane on all topics");

    relay.settle_all(&batches[1..], &sent()).await;
    assert_eq!(state(&relay.store, refunds[1]).await.status, Status::Sent);
    assert_eq!(state(&relay.store, orders[0]).await.status, Status::InFlight);
    relay.settle_all(&batches[..1], &sent()).await;
    assert_eq!(state(&relay.store, orders[1]).await.status, Status::Sent);
    assert_eq!(relay.store.counts().await.expect("counts").in_flight, 0);
}

/// Claim 10: while one channel is on its way, others go on, on the same lane and over and over.
pub async fn an_open_batch_keeps_back_its_own_topics_only(world: World) {
    let relay = Relay::with_all_lanes(world.open().await).await.by(by_topic);
    let orders = write(&relay.store, "orders", &["a", "a"]).await;
    let hung = relay.claim_by(only_orders, 1).await;
    assert_eq!(ids_of(&hung), orders[..1]);
    for _ in 0..3 {
        let refunds = write(&relay.store, "refunds", &["a", "a"]).await;
        let batches = relay.claim_by(only_refunds, 10).await;
        assert_eq!(ids_of(&batches), refunds);
        assert_eq!(batches[0].lease, hung[0].lease);
        let lanes = relay.store.lanes().await.expect("lanes can be seen");
        assert_eq!(lanes.iter().map(|lane| lane.in_flight).sum::<u64>(), 3, "of two batches");
        relay.settle_all(&batches, &sent()).await;
    }
    assert_eq!(ids_of(&relay.claim(10).await), [], "the order of the lane's topics is kept");
    relay.settle_all(&hung, &sent()).await;
    assert_eq!(ids_of(&relay.claim(10).await), orders[1..]);
}

/// Claim 3: whatever channel a topic goes by, nothing of it overtakes what is on its way.
pub async fn a_topic_that_changes_its_channel_is_not_claimed_past_its_open_batch(world: World) {
    let relay = Relay::with_all_lanes(world.open().await).await.by(only_orders);
    let orders = write(&relay.store, "orders", &["a", "a"]).await;
    let first = relay.claim(1).await;
    assert_eq!(ids_of(&relay.claim_by(orders_elsewhere, 10).await), []);
    relay.settle_all(&first, &released()).await;
    let again = relay.claim_by(orders_elsewhere, 10).await;
    assert_eq!((again[0].channel, ids_of(&again)), (7, orders));
}
