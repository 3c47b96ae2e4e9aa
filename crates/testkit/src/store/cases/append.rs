//! Append: writing messages.

use std::collections::BTreeSet;

use futures::future::join_all;
use message::{Message, MessageId};
use store::{Appended, NewMessage, Once, Turned};

use super::{ALL, PATIENCE, record, write};
use crate::store::World;

fn once(key: &str, fingerprint: u8) -> NewMessage {
    let once = Once { key: key.to_owned(), fingerprint: [fingerprint; 32] };
    NewMessage { once: Some(once), ..Message::new("orders", "{}").into() }
}

/// Append 1: what was answered is stored, with every part of it, and not only for the handle that wrote it.
pub async fn what_was_appended_is_there_for_another_process(world: World) {
    let store = world.open().await;
    let full = Message::new("orders", vec![0_u8, 255, 10])
        .key("k 7 ö")
        .kind("OrderPlaced")
        .header("traceparent", "00-\"quoted\"-ü")
        .header("a", "");
    let bare = Message::new("refunds", "");
    let groups = Some(vec!["billing".to_owned(), "audit".to_owned()]);
    let messages = vec![
        NewMessage { ack_groups: groups.clone(), ..full.clone().into() },
        NewMessage { ack_groups: Some(Vec::new()), ..bare.clone().into() },
    ];
    store.append(messages).await.expect("messages can be appended");

    let other = world.open().await;
    for (message, groups) in [(full, groups), (bare, Some(Vec::new()))] {
        let found = record(&other, message.id).await;
        // Stores keep the writer's time to the millisecond at least.
        let lost = (found.message.occurred_at - message.occurred_at).num_milliseconds();
        assert_eq!(lost, 0);
        assert_eq!(Message { occurred_at: message.occurred_at, ..found.message }, message);
        assert_eq!(found.ack_groups, groups);
        assert_eq!(found.state, message::State::NEW);
    }
}

/// Append 2: an id that is taken turns away that message only.
pub async fn each_message_is_stored_or_turned_away_by_itself(world: World) {
    let store = world.open().await;
    let taken = write(&store, "orders", &["a"]).await[0];
    let (before, after) = (Message::new("orders", "1"), Message::new("orders", "2"));
    let call = [before.clone(), Message::new("orders", "x").id(taken), after.clone()];
    let results = store.append(call.map(NewMessage::from).to_vec()).await.expect("the call is answered");
    assert_eq!(
        results,
        [Ok(Appended::New(before.id)), Err(Turned::IdTaken(taken)), Ok(Appended::New(after.id))]
    );
    assert_eq!(record(&store, before.id).await.message.payload, "1");
    assert_eq!(record(&store, after.id).await.message.payload, "2");
    assert_eq!(record(&store, taken).await.message.payload, "{}", "the message that had the id is unharmed");
}

/// Append 2: one result each, in order.
pub async fn results_come_in_the_order_of_the_messages(world: World) {
    let store = world.open().await;
    let messages: Vec<Message> = (0..50).map(|n| Message::new("orders", n.to_string())).collect();
    let call = messages.iter().cloned().map(NewMessage::from).collect();
    let results = store.append(call).await.expect("the call is answered");
    let expected: Vec<_> = messages.iter().map(|message| Ok(Appended::New(message.id))).collect();
    assert_eq!(results, expected);
    assert_eq!(store.append(Vec::new()).await.expect("nothing can be appended too"), []);
}

/// Append 3: one stores, all others hear its id, however parallel and on whichever handle.
pub async fn of_many_appends_with_one_key_one_stores(world: World) {
    let (here, there) = (world.open().await, world.open().await);
    let calls = (0..20).map(|n| {
        let store = if n % 2 == 0 { &here } else { &there };
        // Twice in the same call, too.
        store.append(vec![once("k", 1), once("k", 1)])
    });
    let mut new = Vec::new();
    let mut repeated = BTreeSet::new();
    for results in join_all(calls).await {
        for result in results.expect("the call is answered") {
            match result.expect("the same request is not turned away") {
                Appended::New(id) => new.push(id),
                Appended::Repeated(id) => {
                    repeated.insert(id);
                }
            }
        }
    }
    assert_eq!(new.len(), 1, "one stores");
    assert_eq!(repeated, BTreeSet::from([new[0]]), "the others hear which");
    assert_eq!(here.list(&Default::default(), ALL).await.expect("a list").items.len(), 1);
    // The key outlives the record.
    here.delete(new[0], "test").await.expect("a Pending message can be deleted");
    let again = here.append(vec![once("k", 1)]).await.expect("the call is answered");
    assert_eq!(again, [Ok(Appended::Repeated(new[0]))]);
}

/// Append 3: the same key with another request is turned away and stores nothing.
pub async fn a_key_that_was_used_for_another_request_is_turned_away(world: World) {
    let store = world.open().await;
    store.append(vec![once("k", 1)]).await.expect("the call is answered");
    let other = once("k", 2);
    let id: MessageId = other.message.id;
    let results = store.append(vec![other, once("l", 2)]).await.expect("the call is answered");
    assert_eq!(results[0], Err(Turned::KeyTaken));
    assert!(matches!(results[1], Ok(Appended::New(_))), "another key is another matter");
    assert!(store.record(id).await.expect("records can be read").is_none());
}

/// Append 4: the order of a call is the order of its sequence numbers.
pub async fn messages_of_one_call_get_rising_numbers(world: World) {
    let store = world.open().await;
    let mut written = write(&store, "orders", &["a", "b", "a", "c", "a"]).await;
    written.extend(write(&store, "refunds", &["a", "b"]).await);
    let mut last = 0;
    for id in written {
        let seq = record(&store, id).await.seq;
        assert!(seq > last, "{seq} after {last}");
        last = seq;
    }
}

/// Append 5: who waits for work in the same process hears of it.
pub async fn an_append_wakes_a_relay_of_its_process(world: World) {
    let store = world.open().await;
    write(&store, "orders", &["a"]).await;
    let woken = tokio::time::timeout(PATIENCE, store.woken()).await;
    assert!(woken.is_ok(), "an append before the wait is not missed");
    let waiting = {
        let store = store.clone();
        tokio::spawn(async move { store.woken().await })
    };
    write(&store, "orders", &["b"]).await;
    let woken = tokio::time::timeout(PATIENCE, waiting).await;
    assert!(woken.is_ok(), "an append during the wait ends it");
}
