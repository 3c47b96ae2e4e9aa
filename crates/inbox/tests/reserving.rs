//! Large batches: a part of them is reserved first, and handled while the rest is.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod world;

use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use inbox::{Group, Handler};
use message::Message;
use store::sqlite::SqliteStore;
use store::{Arrival, Error, Inbox, InboxRules, Receipt, Reservation};
use tokio::sync::Notify;
use world::{GROUP, World, arrival, messages, rules};

/// What happens to the rest of a batch.
enum Rest {
    /// It is reserved when a handler has run.
    WaitsForAHandler(Notify),
    /// It cannot be.
    Fails,
}

/// A real store that does something to the second reservation.
struct Slow {
    store: Second,
}

testkit::pass_on!(Slow);

struct Second {
    store: Arc<SqliteStore>,
    /// How many messages were asked for, call by call.
    reservations: Mutex<Vec<usize>>,
    rest: Rest,
}

impl Deref for Second {
    type Target = SqliteStore;

    fn deref(&self) -> &SqliteStore {
        &self.store
    }
}

impl Second {
    async fn reserve(
        &self,
        group: &str,
        arrivals: Vec<Arrival>,
        lease: Duration,
        rules: &InboxRules,
    ) -> Result<Vec<Reservation>, Error> {
        let call = {
            let mut reservations = self.reservations.lock().unwrap();
            reservations.push(arrivals.len());
            reservations.len()
        };
        if call == 2 {
            match &self.rest {
                Rest::WaitsForAHandler(ran) => ran.notified().await,
                Rest::Fails => {
                    let (reason, retry_after) = ("away".to_owned(), Duration::ZERO);
                    return Err(Error::Unavailable { reason, retry_after });
                }
            }
        }
        self.store.reserve(group, arrivals, lease, rules).await
    }
}

impl Slow {
    fn new(world: &World, rest: Rest) -> Arc<Self> {
        let store = Arc::clone(&world.store);
        Arc::new(Self { store: Second { store, reservations: Mutex::default(), rest } })
    }
}

/// What was handled, by key and in order.
type Handling = Arc<Mutex<BTreeMap<String, Vec<usize>>>>;

/// Notes what it handles. The second message of `k3` fails.
fn noting(handled: &Handling, store: &Arc<Slow>) -> Handler {
    let (handled, store) = (Arc::clone(handled), Arc::clone(store));
    Handler::closure(move |message: Message| {
        let (handled, store) = (Arc::clone(&handled), Arc::clone(&store));
        async move {
            if let Rest::WaitsForAHandler(ran) = &store.store.rest {
                ran.notify_one();
            }
            let number = std::str::from_utf8(&message.payload).unwrap().parse().unwrap();
            let key = message.key.unwrap();
            if key == "k3" && number == 1 {
                return Err("not today");
            }
            handled.lock().unwrap().entry(key).or_default().push(number);
            Ok(())
        }
    })
}

/// Ten keys, forty messages each, all keys in every part of the batch.
fn batch() -> Vec<Arrival> {
    messages(10, 40).into_iter().map(arrival).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn handlers_work_while_the_rest_is_reserved_and_each_key_stays_in_order() {
    let world = World::new();
    let store = Slow::new(&world, Rest::WaitsForAHandler(Notify::new()));
    let handled = Handling::default();
    let group = Group::new(GROUP, store.clone(), noting(&handled, &store), rules());
    let arrivals = batch();
    let handling = tokio::time::timeout(Duration::from_secs(60), group.process(arrivals.clone()));
    let receipts = handling.await.expect("nobody waits for anybody").unwrap();
    assert_eq!(store.store.reservations.lock().unwrap()[..2], [100, 300], "a quarter first, then the rest");
    let (failed, others): (Vec<_>, Vec<_>) = arrivals
        .into_iter()
        .zip(receipts)
        .partition(|(arrival, _)| arrival.message.key.as_deref() == Some("k3"));
    assert!(others.iter().all(|(_, receipt)| *receipt == Receipt::Done), "{others:?}");
    assert_eq!(failed[0].1, Receipt::Done);
    assert!(
        failed[1..].iter().all(|(_, receipt)| matches!(receipt, Receipt::Parked { .. })),
        "one failed, and the others of its key wait for it: {failed:?}"
    );
    let in_order: Vec<usize> = (0..40).collect();
    for (key, numbers) in &*handled.lock().unwrap() {
        assert_eq!(*numbers, if key == "k3" { vec![0] } else { in_order.clone() }, "{key}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rest_that_cannot_be_reserved_comes_again_and_what_was_begun_is_finished() {
    let world = World::new();
    let store = Slow::new(&world, Rest::Fails);
    let handled = Handling::default();
    let group = Group::new(GROUP, store.clone(), noting(&handled, &store), rules());
    let arrivals: Vec<Arrival> =
        batch().into_iter().filter(|arrival| arrival.message.key.as_deref() != Some("k3")).collect();
    let receipts = group.process(arrivals.clone()).await.unwrap();
    let done = receipts.iter().take_while(|receipt| **receipt == Receipt::Done).count();
    assert!(done > 0 && done < receipts.len(), "{done}");
    assert!(receipts[done..].iter().all(|receipt| *receipt == Receipt::Busy), "{receipts:?}");
    let again = group.process(arrivals).await.unwrap();
    assert!(again[..done].iter().all(|receipt| *receipt == Receipt::Duplicate), "{again:?}");
    assert!(again[done..].iter().all(|receipt| *receipt == Receipt::Done), "{again:?}");
    let in_order: Vec<usize> = (0..40).collect();
    assert!(handled.lock().unwrap().values().all(|numbers| *numbers == in_order));
}
