//! Inbox 4, and what people can do with messages that the inbox keeps.

use std::sync::Arc;

use chrono::DateTime;
use message::RetryPolicy;
use store::{Arrival, Handled, InboxCounts, InboxRules, Receipt, Reservation, Store, Work};
use uuid::Uuid;

use super::inbox::{arrival, block, counts, due, effect, has_effect, process, rules, unblock};
use super::{ALL, HOUR, PATIENCE};
use crate::store::World;
use crate::within;

fn ordered(max_attempts: u32, hold_dead: bool) -> InboxRules {
    let retry = RetryPolicy { max_attempts, ..rules().retry };
    InboxRules { ordered: true, hold_dead, retry, ..rules() }
}

/// Parks the first and lets the others arrive behind it.
async fn three(store: &Arc<dyn Store>, work: &Work, rules: &InboxRules) -> [Arrival; 3] {
    let arrivals = [arrival("a"), arrival("a"), arrival("a")];
    block(store, &arrivals[0]).await;
    process(store, &arrivals, work, rules).await;
    arrivals
}

/// Processes what is due until `count` messages are done; which ones, in order.
async fn done_in_order(
    store: &Arc<dyn Store>,
    work: &Work,
    rules: &InboxRules,
    count: usize,
) -> Vec<Arrival> {
    let mut done = Vec::new();
    while done.len() < count {
        let due = due(store).await;
        let receipts = process(store, &due, work, rules).await;
        done.extend(due.into_iter().zip(receipts).filter(|(_, r)| *r == Receipt::Done).map(|(a, _)| a));
    }
    done
}

/// Inbox 4: behind it, and after it, in order; other keys and topics do not wait.
pub async fn later_messages_of_a_parked_key_are_done_after_it_in_order(world: World) {
    let store = world.open().await;
    let (work, rules) = (world.work(), ordered(100, true));
    let arrivals = three(&store, &work, &rules).await;
    for follower in &arrivals[1..] {
        assert!(!has_effect(&store, follower).await, "a follower waits");
    }
    assert_eq!(counts(&store).await.parked, 3);
    let mut elsewhere = arrival("a");
    elsewhere.message.topic = "refunds".to_owned();
    let receipts = process(&store, &[arrival("b"), elsewhere], &work, &rules).await;
    assert_eq!(receipts, [Receipt::Done, Receipt::Done]);

    unblock(&store, &arrivals[0]).await;
    let newer = arrival("a");
    process(&store, std::slice::from_ref(&newer), &work, &rules).await;
    let done = done_in_order(&store, &work, &rules, 4).await;
    let ids = |arrivals: &[Arrival]| arrivals.iter().map(|a| a.message.id).collect::<Vec<_>>();
    assert_eq!(ids(&done), [&ids(&arrivals)[..], &[newer.message.id]].concat());
    assert_eq!(counts(&store).await, InboxCounts { processed: 6, ..InboxCounts::default() });
}

/// Inbox 4: also where a call is done in parts.
pub async fn what_follows_a_busy_message_of_its_key_is_busy(world: World) {
    let store = world.open().await;
    let (work, rules) = (world.work(), ordered(100, true));
    let (first, second, last) = (arrival("a"), arrival("a"), arrival("a"));
    let reserved = store.reserve("billing", vec![first.clone()], HOUR, &rules).await.expect("an answer");
    let [Reservation::Granted(token)] = reserved[..] else {
        panic!("it is free to be reserved: {reserved:?}")
    };
    let mut elsewhere = arrival("a");
    elsewhere.message.topic = "refunds".to_owned();
    let between = (0..120).map(|number| arrival(&number.to_string()));
    let mut call = vec![first.clone(), second.clone(), elsewhere];
    call.extend(between);
    call.push(last.clone());
    let receipts = process(&store, &call, &work, &rules).await;
    let busy: Vec<usize> = (0..call.len()).filter(|place| receipts[*place] == Receipt::Busy).collect();
    assert_eq!(busy, [0, 1, call.len() - 1], "{receipts:?}");
    assert_eq!(counts(&store).await, InboxCounts { processed: 121, ..InboxCounts::default() });
    let receipts = store.conclude("billing", vec![(first, token, Handled::Done)], &rules).await;
    assert_eq!(receipts.expect("an answer"), [Receipt::Done]);
    assert_eq!(process(&store, &[second, last], &work, &rules).await, [Receipt::Done, Receipt::Done]);
}

/// Inbox 3 and 4: a message that another program wrote has texts of any length, and its group goes on.
pub async fn a_message_is_kept_whatever_the_length_of_its_texts(world: World) {
    let store = world.open().await;
    let (work, rules) = (world.work(), ordered(100, true));
    // Nothing that could be compressed, and nothing that differs before its end.
    let long: String = (0..200).map(|_| Uuid::new_v4().simple().to_string() + "ü").collect();
    let of_others = |end: &str| {
        let mut arrival = arrival(&format!("{long}{end}"));
        arrival.message.kind = Some(long.clone());
        arrival.message.content_type = format!("text/{long}");
        arrival.message.headers.insert("long".to_owned(), long.clone());
        // As exact as any store keeps it.
        arrival.message.occurred_at = DateTime::UNIX_EPOCH;
        arrival
    };
    let (first, follower, other) = (of_others("a"), of_others("a"), of_others("b"));
    block(&store, &first).await;
    let receipts = process(&store, &[first.clone(), follower.clone(), other.clone()], &work, &rules).await;
    assert!(
        matches!(receipts[..], [Receipt::Parked { .. }, Receipt::Parked { .. }, Receipt::Done]),
        "{receipts:?}"
    );
    let kept = store.parked("billing", ALL).await.expect("a list").items;
    let kept: Vec<_> = kept.into_iter().map(|parked| parked.arrival.message).collect();
    assert!(kept == [first.message.clone(), follower.message.clone()], "{kept:?}");
    let done = store.processed("billing", ALL).await.expect("a list").items;
    assert!(done.len() == 1 && done[0].key == other.message.key, "{done:?}");

    let newer = of_others("a");
    let receipts = process(&store, std::slice::from_ref(&newer), &work, &rules).await;
    assert!(matches!(receipts[..], [Receipt::Parked { .. }]), "{receipts:?}");
    unblock(&store, &first).await;
    let done = done_in_order(&store, &work, &rules, 3).await;
    assert_eq!(done.iter().map(effect).collect::<Vec<_>>(), [&first, &follower, &newer].map(effect));
}

/// Inbox 4 and `hold_dead`: they wait for a Dead one, or they do not.
pub async fn followers_of_a_dead_message_wait_where_the_rules_say_so(world: World) {
    for hold_dead in [true, false] {
        let store = world.open().await;
        let (work, rules) = (world.work(), ordered(1, hold_dead));
        let arrivals = three(&store, &work, &rules).await;
        let done = [has_effect(&store, &arrivals[1]).await, has_effect(&store, &arrivals[2]).await];
        assert_eq!(done, [!hold_dead; 2], "hold_dead = {hold_dead}");
        if hold_dead {
            assert_eq!(store.due("billing", 10).await.expect("an answer"), []);
            // Dropping one that waits does not let the others pass the one they wait for.
            store.drop_parked("billing", arrivals[2].message.id, "ann").await.expect("it can be dropped");
            assert_eq!(store.due("billing", 10).await.expect("an answer"), []);
            store.drop_parked("billing", arrivals[1].message.id, "ann").await.expect("it can be dropped");
            store.drop_parked("billing", arrivals[0].message.id, "ann").await.expect("it can be dropped");
        }
    }
}

/// Without the one they waited for, the others go on.
pub async fn dropping_a_message_lets_its_followers_go(world: World) {
    let store = world.open().await;
    let (work, rules) = (world.work(), ordered(1, true));
    let arrivals = three(&store, &work, &rules).await;
    store.drop_parked("billing", arrivals[0].message.id, "ann").await.expect("it can be dropped");
    let done = done_in_order(&store, &work, &rules, 2).await;
    assert_eq!(done[0].message.id, arrivals[1].message.id);
    assert_eq!(done[1].message.id, arrivals[2].message.id);
    let audit = store.audit(ALL).await.expect("the audit can be read").items;
    let dropped =
        audit.iter().any(|entry| entry.message == Some(arrivals[0].message.id) && entry.actor == "ann");
    assert!(dropped, "{audit:?}");
    let gone = store.drop_parked("billing", arrivals[0].message.id, "ann").await;
    gone.expect_err("it is not kept any more");
}

/// A person gives it another chance: now, with all its attempts.
pub async fn a_message_unparked_has_a_fresh_start(world: World) {
    let store = world.open().await;
    let slow = RetryPolicy { first: HOUR, cap: HOUR, ..RetryPolicy::default() };
    let rules = InboxRules { retry: slow, ..ordered(1, true) };
    let work = world.work();
    for max_attempts in [1, 10] {
        let rules =
            InboxRules { retry: RetryPolicy { max_attempts, ..rules.retry.clone() }, ..rules.clone() };
        let one = arrival("a");
        block(&store, &one).await;
        process(&store, std::slice::from_ref(&one), &work, &rules).await;
        unblock(&store, &one).await;
        store.unpark("billing", one.message.id, "ann").await.expect("it can be unparked");
        let parked = store.parked("billing", ALL).await.expect("a list").items;
        assert_eq!((parked[0].dead, parked[0].attempts), (false, 0));
        let due = within(PATIENCE, "the message to be due", || async {
            let due = store.due("billing", 10).await.expect("an answer");
            (!due.is_empty()).then_some(due)
        })
        .await;
        assert_eq!(process(&store, &due, &work, &rules).await, [Receipt::Done]);
        assert_eq!((counts(&store).await.parked, counts(&store).await.dead), (0, 0));
    }
    let audit = store.audit(ALL).await.expect("the audit can be read").items;
    assert_eq!(audit.iter().filter(|entry| entry.actor == "ann").count(), 2);
    store.unpark("billing", arrival("a").message.id, "ann").await.expect_err("it is not kept");
}

/// Inbox 4: a fresh start is not a way past those before it.
pub async fn a_follower_unparked_waits_for_its_turn(world: World) {
    let store = world.open().await;
    let slow = RetryPolicy { first: HOUR, cap: HOUR, ..RetryPolicy::default() };
    let rules = InboxRules { retry: slow, ..ordered(10, true) };
    let work = world.work();
    let arrivals = three(&store, &work, &rules).await;
    store.unpark("billing", arrivals[1].message.id, "ann").await.expect("it can be unparked");
    assert_eq!(store.due("billing", 10).await.expect("an answer"), []);
    let receipts = process(&store, &arrivals[1..], &work, &rules).await;
    assert!(receipts.iter().all(|receipt| matches!(receipt, Receipt::Parked { .. })), "{receipts:?}");
    unblock(&store, &arrivals[0]).await;
    store.unpark("billing", arrivals[0].message.id, "ann").await.expect("it can be unparked");
    let done = done_in_order(&store, &work, &rules, 3).await;
    let ids = |arrivals: &[Arrival]| arrivals.iter().map(|a| a.message.id).collect::<Vec<_>>();
    assert_eq!(ids(&done), ids(&arrivals));
}

/// Inbox 4: two that were Dead and get a fresh start together keep their order.
pub async fn dead_messages_of_a_key_unparked_together_keep_their_order(world: World) {
    let store = world.open().await;
    let work = world.work();
    // Dead without holding their key, so that the second could die too.
    let arrivals = [arrival("a"), arrival("a")];
    for arrival in &arrivals {
        block(&store, arrival).await;
    }
    process(&store, &arrivals, &work, &ordered(1, false)).await;
    assert_eq!(counts(&store).await.dead, 2);
    unblock(&store, &arrivals[1]).await;
    for arrival in arrivals.iter().rev() {
        store.unpark("billing", arrival.message.id, "ann").await.expect("it can be unparked");
    }
    let due = due(&store).await;
    assert_eq!(due.len(), 2);
    let rules = ordered(100, true);
    process(&store, &due, &work, &rules).await;
    assert!(!has_effect(&store, &arrivals[1]).await, "the first failed again, so the second waits");
    unblock(&store, &arrivals[0]).await;
    let done = done_in_order(&store, &work, &rules, 2).await;
    assert_eq!(done[1].message.id, arrivals[1].message.id);
}

/// Inbox 8: the one that is kept stays as it is.
pub async fn other_content_under_a_parked_id_is_refused(world: World) {
    let store = world.open().await;
    let work = world.work();
    for max_attempts in [100, 1] {
        let rules = ordered(max_attempts, true);
        let one = arrival("a");
        block(&store, &one).await;
        process(&store, std::slice::from_ref(&one), &work, &rules).await;
        let before = counts(&store).await;
        let mut other = one.clone();
        other.message.payload = arrival("a").message.payload;
        for _ in 0..2 {
            let receipts = process(&store, std::slice::from_ref(&other), &work, &rules).await;
            assert!(
                matches!(&receipts[0], Receipt::Dead { error } if error.contains("other content")),
                "{receipts:?}"
            );
        }
        assert!(!has_effect(&store, &other).await);
        assert_eq!(counts(&store).await, before);
        let parked = store.parked("billing", ALL).await.expect("a list").items;
        assert_eq!(parked[0].arrival.message.payload, one.message.payload);
        assert_eq!(parked[0].dead, max_attempts == 1);
        unblock(&store, &one).await;
        store.unpark("billing", one.message.id, "ann").await.expect("it can be unparked");
        done_in_order(&store, &work, &rules, 1).await;
        assert!(has_effect(&store, &one).await);
    }
}

/// What is counted is what is kept, whatever happened before.
pub async fn inbox_counts_agree_with_what_is_kept(world: World) {
    let store = world.open().await;
    let work = world.work();
    // Nothing is due by itself, so that each step finds what the one before left.
    let slow = RetryPolicy { first: HOUR, cap: HOUR, ..RetryPolicy::default() };
    let rules = InboxRules { retry: slow, ..ordered(10, true) };
    let agree = async |when: &str| {
        let kept = store.parked("billing", ALL).await.expect("a list").items;
        let dead = kept.iter().filter(|parked| parked.dead).count() as u64;
        let counts = counts(&store).await;
        assert_eq!((counts.dead, counts.parked), (dead, kept.len() as u64 - dead), "{when}");
        let done = store.processed("billing", ALL).await.expect("a list").items.len() as u64;
        assert_eq!(counts.processed, done, "{when}");
    };
    let arrivals = three(&store, &work, &rules).await;
    agree("one failed and two wait").await;
    process(&store, &arrivals, &work, &rules).await;
    agree("all came again").await;
    store.unpark("billing", arrivals[0].message.id, "ann").await.expect("it can be unparked");
    agree("the first was unparked").await;
    process(&store, &arrivals[..1], &work, &ordered(1, true)).await;
    agree("the first is Dead").await;
    assert_eq!((counts(&store).await.dead, counts(&store).await.parked), (1, 2));
    store.unpark("billing", arrivals[0].message.id, "ann").await.expect("it can be unparked");
    agree("the first was unparked again").await;
    store.drop_parked("billing", arrivals[2].message.id, "ann").await.expect("it can be dropped");
    agree("a follower was dropped").await;
    unblock(&store, &arrivals[0]).await;
    done_in_order(&store, &work, &rules, 2).await;
    agree("the rest is done").await;
    let expected = InboxCounts { processed: 2, ..InboxCounts::default() };
    assert_eq!(counts(&store).await, expected);
}
