//! Inbox: doing the work of a message once.

use std::sync::Arc;
use std::time::Duration;

use message::{Message, MessageId, RetryPolicy, Status};
use store::{Arrival, Handled, InboxCounts, InboxRules, Receipt, Reservation, Store, Verdict, Work};
use uuid::Uuid;

use super::{ALL, HOUR, PATIENCE, record, write};
use crate::store::{Relay, World};
use crate::within;

/// Try again soon and often.
pub(super) fn rules() -> InboxRules {
    let soon = Duration::from_millis(1);
    InboxRules {
        retry: RetryPolicy { first: soon, cap: soon, max_attempts: 10, ..RetryPolicy::default() },
        ordered: false,
        hold_dead: true,
        acknowledge: false,
    }
}

/// An arrival whose work has an effect that can be looked for.
pub(super) fn arrival(key: &str) -> Arrival {
    let message = Message::new("orders", MessageId::new().to_string()).key(key);
    Arrival { message, seq: Some(7), delivery: 0 }
}

/// The id of the message that the work of `arrival` writes.
pub(super) fn effect(arrival: &Arrival) -> MessageId {
    let text = std::str::from_utf8(&arrival.message.payload).expect("the payload is an id");
    text.parse().expect("the payload is an id")
}

pub(super) async fn has_effect(store: &Arc<dyn Store>, arrival: &Arrival) -> bool {
    let found = store.record(effect(arrival)).await.expect("records can be read");
    found.is_some_and(|record| record.message.topic == "effects")
}

/// Makes the work of `arrival` fail until [`unblock`].
pub(super) async fn block(store: &Arc<dyn Store>, arrival: &Arrival) {
    let blocker = Message::new("blockers", "x").id(effect(arrival));
    store.append(vec![blocker.into()]).await.expect("messages can be appended");
}

pub(super) async fn unblock(store: &Arc<dyn Store>, arrival: &Arrival) {
    store.delete(effect(arrival), "test").await.expect("the blocker can be deleted");
}

pub(super) async fn process(
    store: &Arc<dyn Store>,
    arrivals: &[Arrival],
    work: &Work,
    rules: &InboxRules,
) -> Vec<Receipt> {
    let receipts = store.process("billing", arrivals.to_vec(), work, rules).await;
    let receipts = receipts.expect("the call is answered");
    assert_eq!(receipts.len(), arrivals.len(), "one receipt each");
    receipts
}

pub(super) async fn counts(store: &Arc<dyn Store>) -> InboxCounts {
    store.inbox_counts("billing").await.expect("counts")
}

/// Waits until something parked is due.
pub(super) async fn due(store: &Arc<dyn Store>) -> Vec<Arrival> {
    within(PATIENCE, "a parked message to be due", || async {
        let due = store.due("billing", 100).await.expect("an answer");
        (!due.is_empty()).then_some(due)
    })
    .await
}

pub(super) async fn reserve(store: &Arc<dyn Store>, arrival: &Arrival, lease: Duration) -> Reservation {
    let answers = store.reserve("billing", vec![arrival.clone()], lease, &rules()).await;
    answers.expect("the call is answered").remove(0)
}

pub(super) async fn granted(store: &Arc<dyn Store>, arrival: &Arrival, lease: Duration) -> Uuid {
    match reserve(store, arrival, lease).await {
        Reservation::Granted(token) => token,
        settled => panic!("it is free to be reserved, but {settled:?}"),
    }
}

pub(super) async fn conclude(
    store: &Arc<dyn Store>,
    arrival: &Arrival,
    token: Uuid,
    handled: Handled,
) -> Receipt {
    let receipts = store.conclude("billing", vec![(arrival.clone(), token, handled)], &rules()).await;
    receipts.expect("the call is answered").remove(0)
}

fn is_parked(receipt: &Receipt) -> bool {
    matches!(receipt, Receipt::Parked { .. })
}

/// Inbox 1: one is Done, whoever else tries at the same time; groups are separate.
pub async fn of_many_arrivals_of_an_id_one_is_done(world: World) {
    let (here, there) = (world.open().await, world.open().await);
    let one = arrival("a");
    let (work, rules) = (world.work(), rules());
    let calls = (0..20).map(|n| {
        let store = if n % 2 == 0 { &here } else { &there };
        store.process("billing", vec![one.clone(), one.clone()], &work, &rules)
    });
    let mut done = 0;
    for receipts in futures::future::join_all(calls).await {
        for receipt in receipts.expect("the call is answered") {
            match receipt {
                Receipt::Done => done += 1,
                other => assert_eq!(other, Receipt::Duplicate),
            }
        }
    }
    assert_eq!(done, 1);
    let expected = InboxCounts { processed: 1, duplicates: 39, ..InboxCounts::default() };
    assert_eq!(counts(&here).await, expected);
    let other = here.process("audit", vec![one.clone()], &Work::Mark, &rules).await;
    assert_eq!(other.expect("the call is answered"), [Receipt::Done], "another group has its own inbox");
    let seen = there.processed("billing", ALL).await.expect("a list").items;
    assert_eq!(seen.len(), 1);
    assert_eq!((seen[0].id, seen[0].seq), (one.message.id, one.seq));
    assert_eq!((seen[0].topic.as_str(), seen[0].key.as_deref()), ("orders", Some("a")));
}

/// Inbox 1: for as long as ids are kept, and no longer.
pub async fn ids_are_known_for_as_long_as_they_are_kept(world: World) {
    let store = world.open().await;
    let one = arrival("a");
    process(&store, std::slice::from_ref(&one), &Work::Mark, &rules()).await;
    assert_eq!(store.forget_ids("billing", HOUR).await.expect("an answer"), 0);
    let again = process(&store, std::slice::from_ref(&one), &Work::Mark, &rules()).await;
    assert_eq!(again, [Receipt::Duplicate]);
    assert_eq!(store.forget_ids("audit", Duration::ZERO).await.expect("a group that did nothing"), 0);
    within(PATIENCE, "the id to be forgotten", || async {
        let forgotten = store.forget_ids("billing", Duration::ZERO).await.expect("an answer");
        (forgotten == 1).then_some(())
    })
    .await;
    let again = process(&store, &[one], &Work::Mark, &rules()).await;
    assert_eq!(again, [Receipt::Done], "nobody remembers it");
}

/// Marks `count` messages as done by `group`.
async fn mark(store: &Arc<dyn Store>, group: &str, count: usize) {
    let arrivals: Vec<Arrival> = (0..count).map(|n| arrival(&n.to_string())).collect();
    let receipts = store.process(group, arrivals, &Work::Mark, &rules()).await.expect("the call is answered");
    assert!(receipts.iter().all(|receipt| *receipt == Receipt::Done));
}

/// Calls `forget_ids` for `group` until nothing is left, and answers how many were forgotten, once any were.
async fn forget(store: &Arc<dyn Store>, group: &str, keep: Duration) -> u64 {
    within(PATIENCE, "ids to be forgotten", || async {
        let mut forgotten = 0;
        loop {
            match store.forget_ids(group, keep).await.expect("an answer") {
                0 => break (forgotten > 0).then_some(forgotten),
                more => forgotten += more,
            }
        }
    })
    .await
}

/// Forgetting: the ids that another group keeps do not stand in the way.
pub async fn ids_are_forgotten_whatever_another_group_keeps(world: World) {
    let store = world.open().await;
    mark(&store, "audit", 1_500).await;
    assert_eq!(store.forget_ids("audit", HOUR).await.expect("an answer"), 0);
    mark(&store, "billing", 20).await;
    assert_eq!(forget(&store, "billing", Duration::ZERO).await, 20);
    let kept = store.processed("audit", ALL).await.expect("a list").items;
    assert_eq!(kept.len(), 1_500);
}

/// Forgetting: a group whose consumer is gone does not leave its ids behind.
pub async fn ids_of_a_group_without_a_consumer_are_forgotten_too(world: World) {
    let store = world.open().await;
    mark(&store, "audit", 2).await;
    store.forget_ids("audit", Duration::ZERO).await.expect("an answer");
    mark(&store, "audit", 20).await;
    mark(&store, "billing", 20).await;
    within(PATIENCE, "the ids of audit to be forgotten", || async {
        store.forget_ids("billing", HOUR).await.expect("an answer");
        store.processed("audit", ALL).await.expect("a list").items.is_empty().then_some(())
    })
    .await;
    assert_eq!(store.processed("billing", ALL).await.expect("a list").items.len(), 20);
}

/// Inbox 10: ids are counted while they are kept, for each group, and their space with them.
pub async fn what_is_remembered_is_counted_until_it_is_forgotten(world: World) {
    let (store, other) = (world.open().await, world.open().await);
    let remembered = async |group: &str| other.remembered(group).await.expect("an answer");
    assert_eq!(remembered("billing").await.ids, 0);
    let arrivals: Vec<Arrival> = (0..30).map(|n| arrival(&n.to_string())).collect();
    for _ in 0..2 {
        process(&store, &arrivals, &Work::Mark, &rules()).await;
    }
    let outside = arrival("outside");
    let token = granted(&store, &outside, HOUR).await;
    assert_eq!(remembered("billing").await.ids, 30, "duplicates and what is not done are not counted");
    assert_eq!(conclude(&store, &outside, token, Handled::Done).await, Receipt::Done);
    mark(&store, "audit", 12).await;
    let (billing, audit) = (remembered("billing").await, remembered("audit").await);
    assert_eq!((billing.ids, audit.ids), (31, 12));
    for (bytes, ids) in [(billing.bytes, 31), (audit.bytes, 12)] {
        // An id alone is 16 bytes; what a server sets aside for a table may be much more than is in it.
        assert!(bytes.is_none_or(|bytes| bytes >= ids * 16), "{bytes:?} bytes for {ids} ids");
    }
    forget(&store, "billing", Duration::ZERO).await;
    let (billing, audit) = (remembered("billing").await, remembered("audit").await);
    assert_eq!((billing.ids, audit.ids), (0, 12));
    assert!(billing.bytes.is_none_or(|bytes| bytes == 0), "{billing:?}");
    process(&store, &arrivals[..1], &Work::Mark, &rules()).await;
    assert_eq!(remembered("billing").await.ids, 1, "it is new again");
}

/// Inbox 2: together or not at all.
pub async fn work_mark_and_acknowledgement_are_one(world: World) {
    let relay = Relay::with_all_lanes(world.open().await).await;
    let store = &relay.store;
    let rules = InboxRules { acknowledge: true, ..rules() };
    let (good, bad) = (arrival("a"), arrival("b"));
    store
        .append(vec![good.message.clone().into(), bad.message.clone().into()])
        .await
        .expect("messages can be appended");
    let asked = Verdict::Sent { ack_groups: vec!["billing".to_owned()] };
    relay.settle_all(&relay.claim(10).await, &asked).await;
    block(store, &bad).await;
    let receipts = process(store, &[good.clone(), bad.clone()], &world.work(), &rules).await;
    assert_eq!(receipts[0], Receipt::Done);
    assert!(is_parked(&receipts[1]), "{receipts:?}");

    let other = world.open().await;
    for (arrival, done) in [(&good, true), (&bad, false)] {
        assert_eq!(has_effect(&other, arrival).await, done);
        let acknowledged = !record(&other, arrival.message.id).await.acknowledgements.is_empty();
        assert_eq!(acknowledged, done);
    }
    let marks: Vec<_> = other.processed("billing", ALL).await.expect("a list").items;
    assert_eq!(marks.iter().map(|mark| mark.id).collect::<Vec<_>>(), [good.message.id]);
}

/// Inbox 3: nothing of it is left but the message, which is tried again.
pub async fn a_message_that_failed_leaves_no_trace_and_is_tried_again(world: World) {
    let store = world.open().await;
    let one = Arrival { delivery: 3, ..arrival("a") };
    block(&store, &one).await;
    let receipts = process(&store, std::slice::from_ref(&one), &world.work(), &rules()).await;
    assert!(is_parked(&receipts[0]), "{receipts:?}");
    assert_eq!(counts(&store).await, InboxCounts { parked: 1, ..InboxCounts::default() });
    let parked = world.open().await.parked("billing", ALL).await.expect("a list").items;
    assert_eq!((parked.len(), parked[0].attempts, parked[0].dead), (1, 1, false));
    assert!(!parked[0].error.is_empty() && parked[0].next_attempt_at.is_some());

    unblock(&store, &one).await;
    let due = due(&store).await;
    assert_eq!(due[0].message.payload, one.message.payload, "its payload was kept");
    assert_eq!((due[0].message.id, due[0].seq, due[0].delivery), (one.message.id, one.seq, one.delivery));
    assert_eq!(process(&store, &due, &world.work(), &rules()).await, [Receipt::Done]);
    assert!(has_effect(&store, &one).await);
    assert_eq!(counts(&store).await, InboxCounts { processed: 1, ..InboxCounts::default() });
    assert_eq!(process(&store, &[one], &world.work(), &rules()).await, [Receipt::Duplicate]);
}

/// Inbox 3: not before its wait is over, even if the broker delivers it again.
pub async fn a_parked_message_is_not_due_before_its_wait_is_over(world: World) {
    let store = world.open().await;
    let one = arrival("a");
    let slow = RetryPolicy { first: HOUR, cap: HOUR, ..RetryPolicy::default() };
    let rules = InboxRules { retry: slow, ..rules() };
    block(&store, &one).await;
    process(&store, std::slice::from_ref(&one), &world.work(), &rules).await;
    unblock(&store, &one).await;
    assert_eq!(store.due("billing", 10).await.expect("an answer"), []);
    let again = process(&store, std::slice::from_ref(&one), &world.work(), &rules).await;
    assert!(is_parked(&again[0]), "{again:?}");
    assert!(!has_effect(&store, &one).await);
    assert_eq!(store.parked("billing", ALL).await.expect("a list").items[0].attempts, 1);
}

/// Inbox 5: the last attempt is the last.
pub async fn at_the_limit_of_its_attempts_a_message_is_dead(world: World) {
    let store = world.open().await;
    let one = arrival("a");
    let rules = InboxRules { retry: RetryPolicy { max_attempts: 2, ..rules().retry }, ..rules() };
    block(&store, &one).await;
    let first = process(&store, std::slice::from_ref(&one), &world.work(), &rules).await;
    assert!(is_parked(&first[0]), "{first:?}");
    let due = due(&store).await;
    let second = process(&store, &due, &world.work(), &rules).await;
    assert!(matches!(second[0], Receipt::Dead { .. }), "{second:?}");
    unblock(&store, &one).await;
    let again = process(&store, std::slice::from_ref(&one), &world.work(), &rules).await;
    assert!(matches!(again[0], Receipt::Dead { .. }), "it waits for a person: {again:?}");
    assert!(!has_effect(&store, &one).await);
    assert_eq!(counts(&store).await, InboxCounts { dead: 1, ..InboxCounts::default() });
    let parked = store.parked("billing", ALL).await.expect("a list").items;
    assert_eq!((parked[0].attempts, parked[0].dead), (2, true));
    assert!(parked[0].error.contains("MaxAttempts(2) exceeded"), "{}", parked[0].error);
}

/// Inbox 5: Dead at once when the handler says so, and its word is kept.
pub async fn a_message_that_its_handler_gives_up_is_dead_with_its_error(world: World) {
    let store = world.open().await;
    let one = arrival("a");
    let token = granted(&store, &one, HOUR).await;
    let receipt = conclude(&store, &one, token, Handled::Dead { error: "no such order".to_owned() }).await;
    assert_eq!(receipt, Receipt::Dead { error: "no such order".to_owned() });
    let parked = store.parked("billing", ALL).await.expect("a list").items;
    assert_eq!((parked[0].dead, parked[0].error.as_str()), (true, "no such order"));
    assert_eq!(parked[0].arrival.message.id, one.message.id);
}

/// Inbox 6: no mark, no attempt, nothing parked; the broker delivers it again.
pub async fn an_unavailable_handler_changes_nothing(world: World) {
    let store = world.open().await;
    let one = arrival("a");
    let receipts = process(&store, std::slice::from_ref(&one), &world.impossible_work(), &rules()).await;
    assert!(matches!(receipts[0], Receipt::Unavailable { .. }), "{receipts:?}");
    let token = granted(&store, &one, HOUR).await;
    let receipt = conclude(&store, &one, token, Handled::Unavailable { error: "down".to_owned() }).await;
    assert_eq!(receipt, Receipt::Unavailable { error: "down".to_owned() });
    assert_eq!(counts(&store).await, InboxCounts::default());
    assert!(store.parked("billing", ALL).await.expect("a list").items.is_empty());
    assert_eq!(process(&store, &[one], &world.work(), &rules()).await, [Receipt::Done]);
}

/// After the first `Unavailable` of a call the rest are not tried: they would only fail as well.
pub async fn after_the_first_unavailable_the_rest_are_not_tried(world: World) {
    let store = world.open().await;
    let arrivals = [arrival("a"), arrival("b"), arrival("c")];
    let receipts = process(&store, &arrivals, &world.impossible_work(), &rules()).await;
    for receipt in receipts {
        assert!(matches!(receipt, Receipt::Unavailable { .. }), "{receipt:?}");
    }
    assert_eq!(counts(&store).await, InboxCounts::default());
}

/// Inbox 7: while it lasts, a reservation keeps others away.
pub async fn a_reserved_message_is_nobody_elses(world: World) {
    let (here, there) = (world.open().await, world.open().await);
    let one = arrival("a");
    let token = granted(&here, &one, HOUR).await;
    assert_eq!(reserve(&there, &one, HOUR).await, Reservation::Settled(Receipt::Busy));
    assert_eq!(process(&there, std::slice::from_ref(&one), &world.work(), &rules()).await, [Receipt::Busy]);
    assert_eq!(conclude(&here, &one, token, Handled::Done).await, Receipt::Done);
    assert_eq!(reserve(&there, &one, HOUR).await, Reservation::Settled(Receipt::Duplicate));
}

/// Inbox 7: however parallel, and whatever keys come with the id.
pub async fn of_many_who_reserve_an_id_at_once_one_has_it(world: World) {
    let (here, there) = (world.open().await, world.open().await);
    let rules = InboxRules { ordered: true, ..rules() };
    for _ in 0..20 {
        let one = arrival("a");
        let reserving = (0..16).map(|worker| {
            let store = if worker % 2 == 0 { &here } else { &there };
            let mut one = one.clone();
            one.message.key = Some(format!("key {}", worker % 4));
            store.reserve("billing", vec![one], HOUR, &rules)
        });
        let answers = futures::future::try_join_all(reserving).await.expect("answers");
        let granted = answers.iter().filter(|answers| matches!(answers[0], Reservation::Granted(_))).count();
        assert_eq!(granted, 1, "{answers:?}");
    }
}

/// Inbox 7: what was reserved by one call is concluded one by one.
pub async fn what_was_reserved_together_may_end_apart(world: World) {
    let store = world.open().await;
    let all = ["a", "b", "c"].map(arrival);
    let reserved = store.reserve("billing", all.to_vec(), HOUR, &rules()).await.expect("an answer");
    let tokens = reserved.into_iter().map(|reservation| match reservation {
        Reservation::Granted(token) => token,
        Reservation::Settled(receipt) => panic!("it is free to be reserved: {receipt:?}"),
    });
    let tokens: Vec<Uuid> = tokens.collect();
    let [a, b, c] = &all;
    assert_eq!(conclude(&store, b, tokens[1], Handled::Done).await, Receipt::Done);
    assert_eq!(reserve(&store, a, HOUR).await, Reservation::Settled(Receipt::Busy));
    let down = Handled::Unavailable { error: "down".to_owned() };
    assert!(matches!(conclude(&store, a, tokens[0], down).await, Receipt::Unavailable { .. }));
    assert_eq!(conclude(&store, a, tokens[0], Handled::Done).await, Receipt::Busy, "it was given up");
    assert_eq!(reserve(&store, c, HOUR).await, Reservation::Settled(Receipt::Busy));
    let token = granted(&store, a, HOUR).await;
    assert_eq!(conclude(&store, c, tokens[2], Handled::Done).await, Receipt::Done);
    assert_eq!(conclude(&store, a, token, Handled::Done).await, Receipt::Done);
}

/// Inbox 7: a worker that fell silent loses its reservation.
pub async fn a_reservation_ends_with_its_lease(world: World) {
    let store = world.open().await;
    let one = arrival("a");
    granted(&store, &one, Duration::from_millis(100)).await;
    within(PATIENCE, "the reservation to end", || async {
        matches!(reserve(&store, &one, HOUR).await, Reservation::Granted(_)).then_some(())
    })
    .await;
}

/// Inbox 7: the loser of a reservation changes nothing and hears so.
pub async fn a_conclusion_with_an_old_token_changes_nothing(world: World) {
    let store = world.open().await;
    let one = arrival("a");
    let late = granted(&store, &one, Duration::from_millis(50)).await;
    let token = within(PATIENCE, "the reservation to end", || async {
        match reserve(&store, &one, HOUR).await {
            Reservation::Granted(token) => Some(token),
            Reservation::Settled(_) => None,
        }
    })
    .await;
    for wrong in [late, Uuid::new_v4()] {
        assert_eq!(conclude(&store, &one, wrong, Handled::Done).await, Receipt::Busy);
        let dead = Handled::Dead { error: "late".to_owned() };
        assert_eq!(conclude(&store, &one, wrong, dead).await, Receipt::Busy);
    }
    assert_eq!(counts(&store).await, InboxCounts::default());
    assert_eq!(conclude(&store, &one, token, Handled::Done).await, Receipt::Done);
    assert_eq!(conclude(&store, &one, token, Handled::Done).await, Receipt::Busy, "a token is used once");
}

/// Inbox 7: what was done outside cannot be undone, whatever happened to its key meanwhile.
pub async fn work_done_under_a_valid_token_is_done(world: World) {
    let store = world.open().await;
    let rules =
        InboxRules { ordered: true, retry: RetryPolicy { max_attempts: 1, ..rules().retry }, ..rules() };
    let (one, two) = (arrival("a"), arrival("a"));
    let reserved = store.reserve("billing", vec![two.clone()], HOUR, &rules).await.expect("an answer");
    let [Reservation::Granted(token)] = reserved[..] else {
        panic!("it is free to be reserved: {reserved:?}")
    };
    block(&store, &one).await;
    let receipts = process(&store, &[one, two.clone()], &world.work(), &rules).await;
    assert!(matches!(receipts[0], Receipt::Dead { .. }), "{receipts:?}");
    let done = vec![(two.clone(), token, Handled::Done)];
    let receipts = store.conclude("billing", done, &rules).await.expect("an answer");
    assert_eq!(receipts, [Receipt::Done]);
    let marks = store.processed("billing", ALL).await.expect("a list").items;
    assert_eq!(marks.iter().map(|mark| mark.id).collect::<Vec<_>>(), [two.message.id]);
    assert_eq!(counts(&store).await, InboxCounts { processed: 1, dead: 1, ..InboxCounts::default() });
}

/// Inbox 8: another message under a known id is an error of its sender, not a duplicate to swallow.
pub async fn an_id_that_returns_with_other_content_is_dead(world: World) {
    let store = world.open().await;
    let one = arrival("a");
    assert_eq!(process(&store, std::slice::from_ref(&one), &world.work(), &rules()).await, [Receipt::Done]);
    let mut other = one.clone();
    other.message.payload = MessageId::new().to_string().into();
    // However often it comes.
    for _ in 0..3 {
        let receipts = process(&store, std::slice::from_ref(&other), &world.work(), &rules()).await;
        assert!(matches!(&receipts[0], Receipt::Dead { error } if error.contains("id")), "{receipts:?}");
    }
    assert!(!has_effect(&store, &other).await);
    assert_eq!(counts(&store).await, InboxCounts { processed: 1, dead: 1, ..InboxCounts::default() });
    let parked = store.parked("billing", ALL).await.expect("a list").items;
    assert_eq!(parked[0].arrival.message.payload, other.message.payload, "what came is kept to look at");
    // A duplicate of the first takes nothing away.
    assert_eq!(process(&store, &[one], &world.work(), &rules()).await, [Receipt::Duplicate]);
    let expected = InboxCounts { processed: 1, duplicates: 1, dead: 1, ..InboxCounts::default() };
    assert_eq!(counts(&store).await, expected);
    assert_eq!(store.parked("billing", ALL).await.expect("a list").items.len(), 1);
    // The outbox is not concerned.
    let id = write(&store, "orders", &["a"]).await[0];
    assert_eq!(record(&store, id).await.state.status, Status::Pending);
}

/// Inbox 9: a consumer learns of it when it starts, not with its first message.
pub async fn work_that_cannot_be_done_is_refused_beforehand(world: World) {
    let store = world.open().await;
    store.check(&world.work()).await.expect("the work of this suite can be done");
    store.check(&Work::Mark).await.expect("a mark can always be made");
    let error = store.check(&world.impossible_work()).await.expect_err("it cannot be done").to_string();
    assert!(!error.is_empty());
}
