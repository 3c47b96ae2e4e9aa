//! Inspect: looking without touching.

use std::collections::BTreeSet;
use std::time::Duration;

use message::{Message, Status};
use store::{Claimed, Filter, NewMessage, Page, Verdict};

use super::{ALL, HOUR, ids, record, write};
use crate::store::{Relay, World, dead, failed, holding, sent};

/// Inspect 1: a list is read a page at a time, and together the pages are the list.
pub async fn pages_have_no_gap_and_no_repeat(world: World) {
    let store = world.open().await;
    let written = write(&store, "orders", &["a"; 25]).await;
    for newest_first in [false, true] {
        let mut seen = Vec::new();
        let mut after = None;
        loop {
            let page = Page { after, limit: 7, newest_first };
            let paged = store.list(&Filter::default(), page).await.expect("a list");
            assert!(paged.items.len() <= 7);
            seen.extend(paged.items.iter().map(|record| record.message.id));
            assert!(seen.len() <= written.len(), "pages repeat themselves");
            let Some(next) = paged.next else { break };
            after = Some(next);
        }
        if newest_first {
            seen.reverse();
        }
        assert_eq!(seen, written);
    }
}

/// A list shows exactly what its filter names.
pub async fn a_filter_shows_what_it_names(world: World) {
    let relay = Relay::with_all_lanes(world.open().await).await;
    let store = &relay.store;
    let asked = NewMessage {
        ack_groups: Some(vec!["billing".to_owned()]),
        ..Message::new("orders", "{}").key("a").into()
    };
    let asked_id = asked.message.id;
    store.append(vec![asked]).await.expect("messages can be appended");
    relay.settle_all(&relay.claim(1).await, &sent()).await;
    let doomed = write(store, "orders", &["b"]).await[0];
    relay.settle_all(&relay.claim(1).await, &dead(false)).await;
    let late = write(store, "orders", &["a"]).await[0];
    relay.settle_all(&relay.claim(1).await, &failed(HOUR, false)).await;
    let taken = write(store, "orders", &["c"]).await[0];
    assert_eq!(relay.claim(1).await.len(), 1);
    let waiting = write(store, "refunds", &["a"]).await[0];

    let text = |text: &str| Some(text.to_owned());
    let by = |statuses: &[Status]| Filter { statuses: statuses.to_vec(), ..Filter::default() };
    let cases = [
        (Filter::default(), vec![asked_id, doomed, late, taken, waiting]),
        (by(&[Status::Sent]), vec![asked_id]),
        (by(&[Status::Dead]), vec![doomed]),
        (by(&[Status::Failed]), vec![late]),
        (by(&[Status::InFlight]), vec![taken]),
        (by(&[Status::Pending]), vec![waiting]),
        (by(&[Status::Pending, Status::Failed]), vec![late, waiting]),
        (Filter { topic: text("refunds"), ..Filter::default() }, vec![waiting]),
        (Filter { key: text("a"), ..Filter::default() }, vec![asked_id, late, waiting]),
        (Filter { group: text("billing"), ..Filter::default() }, vec![asked_id]),
        (Filter { unacknowledged_by: text("billing"), ..Filter::default() }, vec![asked_id]),
        (Filter { unacknowledged_by: text("audit"), ..Filter::default() }, vec![]),
    ];
    for (filter, expected) in cases {
        let found = store.list(&filter, ALL).await.expect("a list");
        let found: Vec<_> = found.items.iter().map(|record| record.message.id).collect();
        assert_eq!(found, expected, "{filter:?}");
    }
    store.acknowledge(vec![(asked_id, "billing".to_owned())]).await.expect("it is acknowledged");
    let filter = Filter { unacknowledged_by: text("billing"), ..Filter::default() };
    assert!(store.list(&filter, ALL).await.expect("a list").items.is_empty());
}

/// Inspect 2: records, lists, counts, lanes and holds all call it InFlight.
pub async fn a_message_in_an_open_batch_is_in_flight_in_every_answer(world: World) {
    let relay = Relay::with_all_lanes(world.open().await).await.by(holding);
    let store = &relay.store;
    let written = write(store, "orders", &["a", "a"]).await;
    relay.settle_all(&relay.claim(1).await, &dead(true)).await;
    store.requeue(written[0], "test").await.expect("a Dead message can be requeued");
    assert_eq!(ids(&relay.claim(1).await[0].messages), [written[0]]);

    let found = record(store, written[0]).await;
    assert_eq!((found.state.status, found.state.rest), (Status::InFlight, Status::Pending));
    let until = found.locked_until.expect("the lease has an end");
    assert!((until - found.written_at).to_std().expect("the lease ends later") > Duration::from_secs(3_000));
    let listed = store.list(&Filter::default(), ALL).await.expect("a list").items;
    let statuses: Vec<_> = listed.iter().map(|record| record.state.status).collect();
    assert_eq!(statuses, [Status::InFlight, Status::Pending]);
    let counts = store.counts().await.expect("counts");
    assert_eq!((counts.in_flight, counts.pending), (1, 1));
    let in_flight: u64 = store.lanes().await.expect("lanes").iter().map(|lane| lane.in_flight).sum();
    assert_eq!(in_flight, 1);
    let holds = store.holds(10).await.expect("holds");
    assert_eq!(holds[0].status, Some(Status::InFlight));
}

/// Inspect 3: what is counted is what is there, and what has happened is counted once.
pub async fn counts_agree_with_the_records(world: World) {
    let relay = Relay::with_all_lanes(world.open().await).await;
    let store = &relay.store;
    write(store, "orders", &["a"; 12]).await;
    let verdicts = [
        sent(),
        sent(),
        dead(false),
        failed(HOUR, false),
        Verdict::Released { error: Some("down".to_owned()) },
    ];
    for verdict in &verdicts {
        relay.settle_all(&relay.claim(1).await, verdict).await;
    }
    let taken = relay.claim(2).await;
    let records = store.list(&Filter::default(), ALL).await.expect("a list").items;
    let acknowledged =
        records.iter().find(|record| record.state.status == Status::Sent).expect("one is Sent");
    store
        .acknowledge(vec![(acknowledged.message.id, "billing".to_owned())])
        .await
        .expect("the call is answered");
    let pending: Vec<_> = records
        .iter()
        .filter(|record| record.state.status == Status::Pending)
        .map(|record| record.message.id)
        .collect();
    store.delete(pending[0], "test").await.expect("a Pending message can be deleted");

    let records = store.list(&Filter::default(), ALL).await.expect("a list").items;
    let count = |status| records.iter().filter(|record| record.state.status == status).count() as u64;
    let counts = store.counts().await.expect("counts");
    assert_eq!(counts.pending, count(Status::Pending));
    assert_eq!(counts.in_flight, count(Status::InFlight));
    assert_eq!(counts.in_flight, taken.iter().map(|batch| batch.messages.len() as u64).sum::<u64>());
    assert_eq!(counts.failed, count(Status::Failed));
    assert_eq!(counts.sent, count(Status::Sent));
    assert_eq!(counts.dead, count(Status::Dead));
    assert_eq!(records.len(), 11);
    assert_eq!((counts.publish_success_total, counts.publish_failure_total, counts.dead_total), (2, 3, 1));
    assert_eq!(counts.write_to_sent.counts.iter().sum::<u64>(), 2);
    let acknowledgements =
        u64::from(!record(store, acknowledged.message.id).await.acknowledgements.is_empty());
    assert_eq!(counts.acknowledged_total, acknowledgements);
    assert_eq!(counts.sent_to_acknowledged.counts.iter().sum::<u64>(), acknowledgements);
    assert!(counts.oldest_age.is_some());
    let sent_ids: BTreeSet<_> = records
        .iter()
        .filter(|record| record.state.status == Status::Sent)
        .map(|record| record.seq)
        .collect();
    assert_eq!(sent_ids.len(), 2);
}

/// A record has every field that people ask for.
pub async fn a_record_says_all_that_is_known(world: World) {
    let relay = Relay::with_all_lanes(world.open().await).await;
    let store = &relay.store;
    let id = write(store, "orders", &["a"]).await[0];
    relay.settle_all(&relay.claim(1).await, &failed(HOUR, false)).await;
    let found = record(store, id).await;
    assert_eq!(found.last_error.as_deref(), Some("no luck"));
    let wait = found.next_attempt_at.expect("it is tried again") - found.written_at;
    assert!(wait.to_std().expect("later") >= HOUR - Duration::from_secs(1));
    assert!(found.sent_at.is_none() && found.dead_reason.is_none() && found.locked_until.is_none());

    let id = write(store, "orders", &["b"]).await[0];
    relay.settle_all(&relay.claim(1).await, &Verdict::Sent { ack_groups: vec!["billing".to_owned()] }).await;
    store.acknowledge(vec![(id, "billing".to_owned())]).await.expect("it is acknowledged");
    let found = record(store, id).await;
    assert!(found.sent_at.is_some_and(|at| at >= found.written_at));
    assert_eq!(found.ack_groups, Some(vec!["billing".to_owned()]));
    assert_eq!(found.acknowledgements[0].group, "billing");
    assert!(store.record(message::MessageId::new()).await.expect("an answer").is_none());
}

/// Inspect 5: of the messages asked for, those that are kept and not Sent.
pub async fn what_is_not_sent_is_told_and_nothing_else(world: World) {
    let relay = Relay::with_all_lanes(world.open().await).await;
    let store = &relay.store;
    write(store, "orders", &["a", "b", "c", "d"]).await;
    let batches = relay.claim(4).await;
    let mut seqs: Vec<_> =
        batches.iter().flat_map(|batch| &batch.messages).map(|claimed| claimed.seq).collect();
    seqs.sort_unstable();
    assert_eq!(store.unsent(&seqs).await.expect("an answer"), seqs, "in flight is not sent");
    for batch in &batches {
        let verdict = |claimed: &Claimed| match seqs.iter().position(|known| *known == claimed.seq) {
            Some(0) => sent(),
            Some(1) => failed(HOUR, false),
            Some(2) => dead(false),
            _ => Verdict::Released { error: None },
        };
        relay.settle(batch, verdict).await;
    }
    let asked = [&seqs[..], &[seqs[3] + 1_000]].concat();
    assert_eq!(store.unsent(&asked).await.expect("an answer"), seqs[1..], "and what nobody wrote is nothing");
    assert!(store.unsent(&[]).await.expect("an answer").is_empty());
}

/// Inspect 4: what others remember of a store must not be taken for another's.
pub async fn a_store_has_an_identity_of_its_own(world: World) {
    let identity = world.open().await.identity().await.expect("it has one");
    assert_eq!(identity, world.open().await.identity().await.expect("it has one"));
    let other = world.another().await.open().await.identity().await.expect("it has one");
    assert_ne!(identity, other);
}
