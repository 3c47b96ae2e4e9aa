//! Amend: mending by people, and acknowledging by consumers.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use message::{Event, Message, MessageId, Next, Status, step};
use store::{Acknowledged, Edit, NewMessage, Retention, Store, Verdict};

use super::{ALL, HOUR, ids, ids_of, record, write};
use crate::store::{Relay, World, dead, failed, holding, sent};
use crate::within;

/// One message in each status, in the order of [`Status::ALL`].
async fn one_in_each_status(relay: &Relay) -> Vec<(Status, MessageId)> {
    let store = &relay.store;
    let mut messages = Vec::new();
    for (status, verdict) in
        [(Status::Sent, sent()), (Status::Failed, failed(HOUR, false)), (Status::Dead, dead(false))]
    {
        let id = write(store, "orders", &[status.as_str()]).await[0];
        relay.settle_all(&relay.claim(1).await, &verdict).await;
        messages.push((status, id));
    }
    messages.push((Status::InFlight, write(store, "orders", &["in flight"]).await[0]));
    assert_eq!(relay.claim(1).await.len(), 1);
    messages.push((Status::Pending, write(store, "orders", &["pending"]).await[0]));
    for (status, id) in &messages {
        assert_eq!(record(store, *id).await.state.status, *status);
    }
    messages
}

async fn act(store: &Arc<dyn Store>, event: Event, id: MessageId) -> bool {
    let answer = match event {
        Event::Requeued => store.requeue(id, "test").await,
        Event::Discarded => store.discard(id, "test").await,
        _ => store.delete(id, "test").await,
    };
    answer.is_ok()
}

/// Amend 1: what may be done with a message is what [`message::step`] says, in every status.
pub async fn what_the_transition_function_refuses_changes_nothing(world: World) {
    for event in [Event::Requeued, Event::Discarded, Event::Deleted] {
        let relay = Relay::with_all_lanes(world.open().await).await;
        let store = &relay.store;
        let mut messages = one_in_each_status(&relay).await;
        for (status, id) in &messages {
            let before = record(store, *id).await;
            let expected = step(before.state, event);
            assert_eq!(act(store, event, *id).await, expected.is_ok(), "{status} {event:?}");
            let after = store.record(*id).await.expect("records can be read").map(|record| record.state);
            let expected = match expected {
                Ok(Next::State(state)) => Some(state),
                Ok(Next::Gone) => None,
                Err(_) => Some(before.state),
            };
            assert_eq!(after, expected, "{status} {event:?}");
        }
        // The next round starts with an empty store.
        relay.leave().await;
        let successor = Relay::with_all_lanes(world.open().await).await;
        successor.leave().await;
        while let Some((_, id)) = messages.pop() {
            if store.record(id).await.expect("records can be read").is_some() {
                store.delete(id, "test").await.expect("what is not in flight can be deleted");
            }
        }
    }
    let store = world.open().await;
    store.edit(MessageId::new(), &Edit::default(), "test").await.expect_err("there is no such message");
    store.requeue(MessageId::new(), "test").await.expect_err("there is no such message");
}

/// Amend 2: a relay's hands are not to be meddled with.
pub async fn no_action_touches_a_message_in_an_open_batch(world: World) {
    let relay = Relay::with_all_lanes(world.open().await).await;
    let other = world.open().await;
    let id = write(&relay.store, "orders", &["a"]).await[0];
    let batches = relay.claim(1).await;
    other.requeue(id, "test").await.expect_err("it is in flight");
    other.edit(id, &Edit::default(), "test").await.expect_err("it is in flight");
    other.discard(id, "test").await.expect_err("it is in flight");
    let error = other.delete(id, "test").await.expect_err("it is in flight").to_string();
    assert!(error.contains("InFlight"), "the refusal says why: {error}");
    let none =
        Retention { sent: Duration::ZERO, dead: Duration::ZERO, keys: Duration::ZERO, audit: Duration::ZERO };
    other.clean(&none).await.expect("retention can run");
    assert_eq!(record(&other, id).await.state.status, Status::InFlight);
    assert!(relay.settle(&batches[0], |_| sent()).await.fenced.is_empty());
    assert!(other.audit(ALL).await.expect("the audit can be read").items.is_empty());
}

/// Amend 3: the requeued one first, then those it held, then newer ones.
pub async fn a_requeued_message_goes_before_those_it_held(world: World) {
    let relay = Relay::with_all_lanes(world.open().await).await.by(holding);
    let store = &relay.store;
    let mut written = write(store, "orders", &["a", "a", "a"]).await;
    relay.settle_all(&relay.claim(1).await, &dead(true)).await;
    assert_eq!(ids(&relay.drain(10, &sent()).await), []);
    store.requeue(written[0], "test").await.expect("a Dead message can be requeued");
    written.extend(write(store, "orders", &["a"]).await);
    let again = record(store, written[0]).await.state;
    assert_eq!((again.attempts, again.crashes, again.delivery), (0, 0, 1));
    assert_eq!(ids(&relay.drain(2, &sent()).await), written);
}

/// Amend 3: without it the others go on, in order.
pub async fn discarding_a_dead_message_lets_those_behind_it_go(world: World) {
    let relay = Relay::with_all_lanes(world.open().await).await.by(holding);
    let store = &relay.store;
    let written = write(store, "orders", &["a", "a", "a"]).await;
    relay.settle_all(&relay.claim(1).await, &dead(true)).await;
    assert_eq!(ids(&relay.drain(10, &sent()).await), []);
    store.discard(written[0], "test").await.expect("a Dead message can be discarded");
    assert!(store.record(written[0]).await.expect("records can be read").is_none());
    assert_eq!(ids(&relay.drain(2, &sent()).await), written[1..]);
    assert!(store.holds(10).await.expect("holds").is_empty());
}

/// A mended message is sent with its new content; what was not mended stays.
pub async fn an_edited_message_is_sent_as_mended(world: World) {
    let relay = Relay::with_all_lanes(world.open().await).await;
    let store = &relay.store;
    let message = Message::new("orders", "broken").key("a").kind("Placed").header("a", "1");
    store.append(vec![message.clone().into()]).await.expect("messages can be appended");
    relay.settle_all(&relay.claim(1).await, &dead(true)).await;
    let edit = Edit {
        payload: Some("mended".into()),
        content_type: Some("text/plain".to_owned()),
        headers: Some(BTreeMap::from([("b".to_owned(), "2".to_owned())])),
    };
    store.edit(message.id, &edit, "ann").await.expect("a Dead message can be mended");
    let batches = relay.claim(1).await;
    let claimed = &batches[0].messages[0];
    assert_eq!(claimed.message.payload, "mended");
    assert_eq!(claimed.message.content_type, "text/plain");
    assert_eq!(claimed.message.headers.keys().collect::<Vec<_>>(), ["b"]);
    assert_eq!((&claimed.message.kind, &claimed.message.key), (&message.kind, &message.key));
    assert_eq!(claimed.state.delivery, 1, "brokers must not take it for the one they know");
    let audit = store.audit(ALL).await.expect("the audit can be read").items;
    assert!(audit[0].detail.contains("broken"), "the original is kept: {}", audit[0].detail);
}

/// Amend 4: a group's second acknowledgement is no news.
pub async fn acknowledging_twice_is_once(world: World) {
    let relay = Relay::with_all_lanes(world.open().await).await;
    let store = &relay.store;
    let id = write(store, "orders", &["a"]).await[0];
    let groups = vec!["billing".to_owned(), "audit".to_owned()];
    relay.settle_all(&relay.claim(1).await, &Verdict::Sent { ack_groups: groups }).await;
    let ack = |group: &str| (id, group.to_owned());
    let answers = store.acknowledge(vec![ack("billing"), ack("billing"), ack("audit")]).await;
    assert_eq!(
        answers.expect("the call is answered"),
        [Acknowledged::New, Acknowledged::Repeated, Acknowledged::New]
    );
    let answers = store.acknowledge(vec![ack("audit")]).await.expect("the call is answered");
    assert_eq!(answers, [Acknowledged::Repeated]);
    assert_eq!(record(store, id).await.acknowledgements.len(), 2);
    assert_eq!(store.counts().await.expect("counts").acknowledged_total, 2);
}

/// Amend 4: a consumer may be quicker than the settle of the message it has done.
pub async fn an_acknowledgement_before_the_settle_is_not_lost(world: World) {
    let relay = Relay::with_all_lanes(world.open().await).await;
    let other = world.open().await;
    let id = write(&relay.store, "orders", &["a"]).await[0];
    let batches = relay.claim(1).await;
    let billing = "billing".to_owned();
    let answers = other.acknowledge(vec![(id, billing.clone())]).await.expect("the call is answered");
    assert_eq!(answers, [Acknowledged::New]);
    relay.settle_all(&batches, &Verdict::Sent { ack_groups: vec![billing.clone()] }).await;
    let record = record(&relay.store, id).await;
    assert_eq!(record.acknowledgements.iter().map(|ack| &ack.group).collect::<Vec<_>>(), [&billing]);
    let filter = store::Filter { unacknowledged_by: Some(billing), ..Default::default() };
    assert!(other.list(&filter, ALL).await.expect("a list").items.is_empty(), "it is not asked for again");
}

/// Amend 4: a consumer may have what its relay gave back because nobody answered.
pub async fn what_was_sent_without_an_answer_can_be_acknowledged(world: World) {
    let relay = Relay::with_all_lanes(world.open().await).await;
    let store = &relay.store;
    let id = write(store, "orders", &["a"]).await[0];
    let billing = "billing".to_owned();
    let refused = store.acknowledge(vec![(id, billing.clone())]).await.expect("the call is answered");
    assert_eq!(refused, [Acknowledged::Refused(Status::Pending)], "nobody ever had it");
    let unanswered = Verdict::Released { error: Some("no answer".to_owned()) };
    relay.settle_all(&relay.claim(1).await, &unanswered).await;
    let answers = store.acknowledge(vec![(id, billing.clone())]).await.expect("the call is answered");
    assert_eq!(answers, [Acknowledged::New]);
    relay.settle_all(&relay.claim(1).await, &Verdict::Sent { ack_groups: vec![billing.clone()] }).await;
    let filter = store::Filter { unacknowledged_by: Some(billing), ..Default::default() };
    assert!(store.list(&filter, ALL).await.expect("a list").items.is_empty(), "it is not asked for again");
}

/// Writes a message that is Sent, and that two groups must acknowledge.
async fn asked_of_two(relay: &Relay) -> MessageId {
    let id = write(&relay.store, "orders", &["a"]).await[0];
    let ack_groups = vec!["billing".to_owned(), "audit".to_owned()];
    relay.settle_all(&relay.claim(1).await, &Verdict::Sent { ack_groups }).await;
    id
}

/// Those that wait for the acknowledgement of `group`.
async fn waiting_for(store: &Arc<dyn Store>, group: &str) -> Vec<MessageId> {
    let filter = store::Filter { unacknowledged_by: Some(group.to_owned()), ..Default::default() };
    let found = store.list(&filter, ALL).await.expect("a list").items;
    found.iter().map(|record| record.message.id).collect()
}

/// Amend 5: for the group that did not acknowledge; who has is not asked again.
pub async fn what_a_group_did_not_acknowledge_is_sent_again_as_a_new_delivery(world: World) {
    let relay = Relay::with_all_lanes(world.open().await).await;
    let store = &relay.store;
    let id = asked_of_two(&relay).await;
    store.acknowledge(vec![(id, "audit".to_owned())]).await.expect("the call is answered");
    for delivery in 1..=2 {
        assert!(store.redeliver(id, "billing", "no answer").await.expect("an answer"));
        let found = record(store, id).await;
        assert_eq!((found.state.status, found.state.delivery), (Status::Pending, delivery));
        assert_eq!(found.last_error.as_deref(), Some("no answer"));
        assert!(waiting_for(store, "billing").await.is_empty(), "what is not sent waits for nobody");
        assert!(!store.redeliver(id, "billing", "no answer").await.expect("an answer"), "it is on its way");
        let batches = relay.claim(1).await;
        assert_eq!(batches[0].messages[0].state.delivery, delivery);
        let ack_groups = vec!["billing".to_owned(), "audit".to_owned()];
        relay.settle_all(&batches, &Verdict::Sent { ack_groups }).await;
        assert_eq!(waiting_for(store, "billing").await, [id]);
        assert!(waiting_for(store, "audit").await.is_empty());
    }
    let audit = store.audit(ALL).await.expect("the audit can be read").items;
    assert_eq!(audit.iter().filter(|entry| entry.action == "redeliver").count(), 2);
}

/// Amend 5: nothing else is touched.
pub async fn what_is_acknowledged_or_not_sent_is_not_redelivered(world: World) {
    let relay = Relay::with_all_lanes(world.open().await).await;
    let store = &relay.store;
    let id = asked_of_two(&relay).await;
    assert!(!store.redeliver(id, "mail", "").await.expect("an answer"), "another group is asked");
    store.acknowledge(vec![(id, "billing".to_owned())]).await.expect("the call is answered");
    assert!(!store.redeliver(id, "billing", "").await.expect("an answer"), "it has acknowledged");
    assert_eq!(record(store, id).await.state.status, Status::Sent);
    assert!(!store.redeliver(MessageId::new(), "billing", "").await.expect("an answer"), "nobody wrote it");
    for (status, id) in one_in_each_status(&relay).await {
        let before = record(store, id).await.state;
        assert!(!store.redeliver(id, "billing", "").await.expect("an answer"), "{status}: nobody is asked");
        assert_eq!(record(store, id).await.state, before);
    }
}

/// Amend 5: a group may be late, and its word counts when it comes.
pub async fn what_is_sent_again_can_be_acknowledged_meanwhile(world: World) {
    let relay = Relay::with_all_lanes(world.open().await).await;
    let store = &relay.store;
    let id = asked_of_two(&relay).await;
    assert!(store.redeliver(id, "billing", "no answer").await.expect("an answer"));
    for (group, expected) in [("billing", Acknowledged::New), ("billing", Acknowledged::Repeated)] {
        let answers = store.acknowledge(vec![(id, group.to_owned())]).await.expect("the call is answered");
        assert_eq!(answers, [expected]);
    }
    let ack_groups = vec!["billing".to_owned(), "audit".to_owned()];
    relay.settle_all(&relay.claim(1).await, &Verdict::Sent { ack_groups }).await;
    assert!(waiting_for(store, "billing").await.is_empty());
    assert_eq!(waiting_for(store, "audit").await, [id], "it has not, and goes on being asked");
}

/// Amend 4: legal for what was sent or may have been, for groups that were asked.
pub async fn only_what_was_sent_can_be_acknowledged_and_only_by_those_asked(world: World) {
    let relay = Relay::with_all_lanes(world.open().await).await;
    let store = &relay.store;
    for (status, id) in one_in_each_status(&relay).await {
        // Sent with no group to acknowledge: then nobody is asked.
        let expected = match status {
            Status::Sent => Acknowledged::NotAsked,
            // Whoever failed to send it may not have heard that it was sent.
            Status::InFlight | Status::Failed => Acknowledged::New,
            other => Acknowledged::Refused(other),
        };
        let answers = store.acknowledge(vec![(id, "billing".to_owned())]).await;
        assert_eq!(answers.expect("the call is answered"), [expected], "{status}");
    }
    let answers = store.acknowledge(vec![(MessageId::new(), "billing".to_owned())]).await;
    assert_eq!(answers.expect("the call is answered"), [Acknowledged::Unknown]);
}

/// Every action is in the audit: who, what, to which message.
pub async fn every_action_is_audited(world: World) {
    let relay = Relay::with_all_lanes(world.open().await).await;
    let store = &relay.store;
    let written = write(store, "orders", &["a", "b", "c", "d"]).await;
    relay.settle_all(&relay.claim(10).await, &dead(false)).await;
    store.requeue(written[0], "ann").await.expect("a Dead message can be requeued");
    store.edit(written[1], &Edit::default(), "bob").await.expect("a Dead message can be mended");
    store.discard(written[2], "cid").await.expect("a Dead message can be discarded");
    store.delete(written[3], "dee").await.expect("a Dead message can be deleted");
    store.discard(written[0], "eve").await.expect_err("a Pending message cannot be discarded");
    let audit = store.audit(ALL).await.expect("the audit can be read").items;
    let told: Vec<_> = audit.iter().map(|entry| (&*entry.actor, &*entry.action, entry.message)).collect();
    let expected = [
        ("ann", "requeue", Some(written[0])),
        ("bob", "edit", Some(written[1])),
        ("cid", "discard", Some(written[2])),
        ("dee", "delete", Some(written[3])),
    ];
    assert_eq!(told, expected);
}

/// Retention removes what is old and done, never what somebody must still see to.
pub async fn retention_keeps_what_somebody_still_needs(world: World) {
    let relay = Relay::with_all_lanes(world.open().await).await.by(holding);
    let store = &relay.store;
    let none =
        Retention { sent: Duration::ZERO, dead: Duration::ZERO, keys: Duration::ZERO, audit: Duration::ZERO };
    let asked = NewMessage {
        ack_groups: Some(vec!["billing".to_owned()]),
        ..Message::new("orders", "{}").key("a").into()
    };
    let asked_id = asked.message.id;
    store.append(vec![asked]).await.expect("messages can be appended");
    relay.settle_all(&relay.claim(1).await, &sent()).await;
    let done = write(store, "orders", &["b"]).await[0];
    relay.settle_all(&relay.claim(1).await, &sent()).await;
    let holder = write(store, "orders", &["c", "c"]).await;
    relay.settle_all(&relay.claim(1).await, &dead(true)).await;
    let doomed = write(store, "orders", &["d"]).await[0];
    let batches = relay.claim(10).await;
    assert_eq!(ids_of(&batches), [doomed]);
    relay.settle_all(&batches, &dead(false)).await;

    store.clean(&Retention::default()).await.expect("retention can run");
    assert_eq!(store.list(&Default::default(), ALL).await.expect("a list").items.len(), 5, "all are young");
    within(super::PATIENCE, "old records to go", || async {
        store.clean(&none).await.expect("retention can run");
        let gone = [done, doomed].map(|id| store.record(id));
        let gone = futures::future::join_all(gone).await;
        gone.iter().all(|found| matches!(found, Ok(None))).then_some(())
    })
    .await;
    let left: Vec<_> = store.list(&Default::default(), ALL).await.expect("a list").items;
    let left: Vec<_> = left.iter().map(|record| record.message.id).collect();
    assert_eq!(left, [asked_id, holder[0], holder[1]]);

    store.acknowledge(vec![(asked_id, "billing".to_owned())]).await.expect("it is acknowledged");
    within(super::PATIENCE, "the acknowledged one to go", || async {
        store.clean(&none).await.expect("retention can run");
        store.record(asked_id).await.expect("records can be read").is_none().then_some(())
    })
    .await;
    let counts = store.counts().await.expect("counts");
    assert_eq!((counts.sent, counts.dead, counts.pending), (0, 1, 1));
}
