//! Transactions: batches that are sent together with their notes.

use std::sync::{Arc, Mutex};

use broker::{Line, Outcome, Outgoing, SendTogether};
use message::Message;

use super::{drain, nothing_comes, numbers, outgoing, subscribe};
use crate::broker::World;

/// Another client's sender that has these lanes, and the notes of those who had them; nothing where the broker has no
/// transactions.
async fn take(world: &World, lanes: &[u16]) -> Option<(Arc<dyn SendTogether>, Vec<String>)> {
    let line = Line { store: "shop".to_owned(), broker: "main".to_owned() };
    let sender = world.transactions().await?.sender(&line).await.expect("a sender can be had");
    let notes = sender.take(lanes).await.expect("lanes can be taken");
    let mut notes: Vec<String> =
        notes.into_iter().map(|note| String::from_utf8_lossy(&note).into_owned()).collect();
    notes.sort();
    Some((sender, notes))
}

async fn send(sender: &dyn SendTogether, seqs: std::ops::Range<i64>, note: &str) -> Vec<Outcome> {
    let batch = seqs.map(|seq| outgoing(&format!("key-{seq}"), seq)).collect();
    sender.publish(batch, &|_| note.as_bytes().to_vec()).await
}

/// Transactions 1: of all who took a lane, the last alone sends.
pub async fn who_lost_a_lane_stores_nothing_any_more(world: World) {
    let Some((old, found)) = take(&world, &[0, 1]).await else { return };
    assert!(found.is_empty(), "nobody had them: {found:?}");
    assert_eq!(send(&*old, 0..5, "old").await, vec![Outcome::Confirmed; 5]);
    let Some((new, _)) = take(&world, &[0]).await else { return };
    let late = send(&*old, 5..10, "late").await;
    assert!(!late.contains(&Outcome::Confirmed), "{late:?}");
    assert!(!old.is_good(), "it cannot send of the other lane either");
    assert_eq!(send(&*new, 10..15, "new").await, vec![Outcome::Confirmed; 5]);
    let mut subscription = subscribe(&world.open().await, "billing").await;
    let mut stored = numbers(&drain(&mut subscription, 10).await);
    stored.sort_unstable();
    assert_eq!(stored, (0..5).chain(10..15).collect::<Vec<_>>());
    assert!(nothing_comes(&mut subscription).await);
}

/// Transactions 2: nobody who had a lane is forgotten, and of each there is the last note.
pub async fn the_last_notes_of_all_who_had_a_lane_are_answered(world: World) {
    let Some((first, _)) = take(&world, &[7, 8]).await else { return };
    for note in ["one", "two"] {
        assert_eq!(send(&*first, 0..1, note).await, [Outcome::Confirmed]);
    }
    let Some((second, found)) = take(&world, &[7]).await else { return };
    assert!(found.contains(&"two".to_owned()), "{found:?}");
    assert_eq!(send(&*second, 1..2, "three").await, [Outcome::Confirmed]);
    // One that sends nothing hides nobody.
    let Some(_third) = take(&world, &[7]).await else { return };
    let Some((_, found)) = take(&world, &[7]).await else { return };
    assert!(["three", "two"].iter().all(|note| found.contains(&(*note).to_owned())), "{found:?}");
}

/// Transactions 3: the note says what is stored.
pub async fn a_batch_is_stored_with_its_note(world: World) {
    let Some((sender, _)) = take(&world, &[3]).await else { return };
    let broker = world.open().await;
    let limit = broker.guarantees().max_payload.expect("the suite's brokers have a limit");
    let impossible = Outgoing::new(Message::new("orders", vec![b'x'; limit + 1]).key("c"), 99);
    let batch = vec![outgoing("a", 1), outgoing("b", 2), impossible, outgoing("c", 3), outgoing("d", 4)];
    let told = Mutex::new(Vec::new());
    let note = |places: &[usize]| {
        places.clone_into(&mut told.lock().expect("nobody panics while it is held"));
        format!("{places:?}").into_bytes()
    };
    let outcomes = sender.publish(batch, &note).await;
    assert!(matches!(outcomes[2], Outcome::Rejected { .. }), "{outcomes:?}");
    assert_eq!(outcomes[3], Outcome::Held, "it is of the same key");
    let confirmed = [&outcomes[0], &outcomes[1], &outcomes[4]];
    assert_eq!(confirmed, [&Outcome::Confirmed; 3], "{outcomes:?}");
    assert_eq!(*told.lock().expect("nobody panics while it is held"), [0, 1, 4]);
    let mut subscription = subscribe(&broker, "billing").await;
    let mut stored = numbers(&drain(&mut subscription, 3).await);
    stored.sort_unstable();
    assert_eq!(stored, [1, 2, 4]);
    let Some((_, found)) = take(&world, &[3]).await else { return };
    assert_eq!(found, ["[0, 1, 4]"]);
}
