//! Routes that send at most once: settled before the broker hears of it, lost where it does not confirm, and counted.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use broker::{Guarantees, Outcome, Outgoing, Publisher};
use message::{Message, Status};
use relay::{Direct, NotTaken, Relay, Route, Settings, Settle, Try};
use store::sqlite::SqliteStore;
use store::{Append, Filter, Inspect, Page};
use testkit::until;
use tokio::sync::watch;

/// What it was given, and whether the store called it Sent by then.
type Seen = Vec<(String, Option<Status>)>;

/// A broker that looks into the store before it answers, and answers as it is told.
struct Looking {
    store: Option<Arc<SqliteStore>>,
    answer: Box<dyn Fn(&Message) -> Outcome + Send + Sync>,
    seen: Mutex<Seen>,
    free: watch::Sender<bool>,
}

impl Looking {
    fn new(
        store: Option<Arc<SqliteStore>>,
        answer: impl Fn(&Message) -> Outcome + Send + Sync + 'static,
    ) -> Arc<Self> {
        let (answer, seen, free) = (Box::new(answer), Mutex::default(), watch::Sender::new(true));
        Arc::new(Self { store, answer, seen, free })
    }

    fn seen(&self) -> Seen {
        self.seen.lock().expect("no panic").clone()
    }
}

#[async_trait]
impl Publisher for Looking {
    fn guarantees(&self) -> Guarantees {
        Guarantees { key_order: true, ordered_batches: true, max_batch: 100, ..Guarantees::default() }
    }

    async fn publish(&self, batch: Vec<Outgoing>) -> Vec<Outcome> {
        self.free.subscribe().wait_for(|free| *free).await.expect("the sender is ours");
        let mut stopped: BTreeSet<Option<String>> = BTreeSet::new();
        let mut outcomes = Vec::new();
        for Outgoing { message, .. } in batch {
            // As a broker that keeps order does: after a failure, nothing of that key is tried.
            if stopped.contains(&message.key) {
                outcomes.push(Outcome::Held);
                continue;
            }
            let status = match &self.store {
                Some(store) => {
                    let record = store.record(message.id).await.expect("readable").expect("it is there");
                    Some(record.state.status)
                }
                None => None,
            };
            let text = String::from_utf8_lossy(&message.payload).into_owned();
            self.seen.lock().expect("no panic").push((text, status));
            let outcome = (self.answer)(&message);
            if outcome != Outcome::Confirmed {
                stopped.insert(message.key.clone());
            }
            outcomes.push(outcome);
        }
        outcomes
    }
}

fn store() -> (Arc<SqliteStore>, tempfile::TempDir) {
    let folder = tempfile::tempdir().expect("a folder");
    (Arc::new(SqliteStore::open(folder.path().join("store.db")).expect("a store")), folder)
}

async fn write(store: &SqliteStore, count: usize) {
    let message = |n: usize| Message::new("orders", n.to_string()).key(format!("key {}", n % 10)).into();
    store.append((0..count).map(message).collect()).await.expect("stored");
}

fn route(publisher: Arc<Looking>) -> Route {
    Route { settle: Settle::Before, ..Route::new("fleeting", &["orders"], publisher) }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_is_sent_by_the_stores_account_before_its_broker_hears_of_it() {
    let (store, _folder) = store();
    let looking = Looking::new(Some(store.clone()), |_| Outcome::Confirmed);
    write(&store, 500).await;
    let relay = Relay::start(store.clone(), vec![route(looking.clone())], Settings::default());
    until("every message", async || looking.seen().len() == 500).await;
    assert!(looking.seen().iter().all(|(_, status)| *status == Some(Status::Sent)));
    assert!(relay.status().losses.is_empty());
    relay.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_confirmed_is_lost_and_counted_and_the_rest_of_its_key_still_goes_in_order() {
    let (store, _folder) = store();
    let looking = Looking::new(None, |message| match &message.payload[..] {
        b"13" | b"77" => Outcome::Unconfirmed { error: "no answer".to_owned() },
        b"42" => Outcome::Rejected { error: "too odd".to_owned() },
        _ => Outcome::Confirmed,
    });
    write(&store, 200).await;
    let relay = Relay::start(store.clone(), vec![route(looking.clone())], Settings::default());
    until("every message", async || looking.seen().len() == 200).await;
    until("the losses", async || relay.status().losses.iter().any(|loss| loss.messages == 3)).await;
    let counts = store.counts().await.expect("counts");
    assert_eq!((counts.sent, counts.dead), (200, 0), "nothing is tried again");
    let numbers: Vec<usize> =
        looking.seen().iter().map(|(text, _)| text.parse().expect("a number")).collect();
    for key in 0..10 {
        let of_key: Vec<usize> = numbers.iter().copied().filter(|n| n % 10 == key).collect();
        assert!(of_key.len() == 20 && of_key.is_sorted(), "each once, in order: {of_key:?}");
    }
    relay.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_is_written_with_the_settlement_and_comes_although_its_message_is_lost() {
    let (store, _folder) = store();
    let looking =
        Looking::new(Some(store.clone()), |_| Outcome::Unconfirmed { error: "no answer".to_owned() });
    let recording = Looking::new(None, |_| Outcome::Confirmed);
    looking.free.send_replace(false);
    let postponed = Message::new("orders", "later").deliver_after(Duration::from_secs(3_600));
    store.append(vec![postponed.into()]).await.expect("stored");
    write(&store, 20).await;
    let fleeting = Route { copy_to: Some("record".to_owned()), ..route(looking.clone()) };
    let record = Route::new("record", &["record"], recording.clone());
    let relay = Relay::start(store.clone(), vec![fleeting, record], Settings::default());
    // Nobody has heard of the messages by now.
    until("the copies", async || recording.seen().len() == 20).await;
    looking.free.send_replace(true);
    until("the losses", async || relay.status().losses.iter().any(|loss| loss.messages == 20)).await;
    let page = Page { after: None, limit: 100, newest_first: false };
    let records = store.list(&Filter::default(), page).await.expect("a list").items;
    let copies: Vec<&Message> =
        records.iter().map(|record| &record.message).filter(|message| message.topic == "record").collect();
    assert_eq!(copies.len(), 20, "what is postponed is not settled, and has none yet");
    let named: BTreeSet<&str> = copies.iter().map(|copy| copy.headers[Message::COPY_OF].as_str()).collect();
    let lost = records
        .iter()
        .filter(|record| record.message.topic == "orders" && record.state.status == Status::Sent);
    let lost: Vec<String> = lost.map(|record| record.message.id.to_string()).collect();
    assert_eq!(named, lost.iter().map(String::as_str).collect(), "each names its own");
    relay.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn while_the_broker_is_away_messages_wait_in_the_store() {
    let (store, _folder) = store();
    let looking = Looking::new(None, |_| Outcome::Unreachable { error: "nobody is there".to_owned() });
    write(&store, 5_000).await;
    let settings = Settings { trains: 1, ..Settings::default() };
    let relay = Relay::start(store.clone(), vec![route(looking.clone())], settings);
    until("the breaker", async || relay.status().breakers.iter().any(|breaker| breaker.open)).await;
    let counts = store.counts().await.expect("counts");
    assert!(counts.pending >= 4_000, "what was at stake is lost, and no more: {}", counts.pending);
    drop(relay);
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_sends_past_the_store_never_waits_and_what_is_not_taken_is_counted() {
    let looking = Looking::new(None, |_| Outcome::Confirmed);
    looking.free.send_replace(false);
    let direct = Direct::start(vec![(route(looking.clone()), Try::Confirmed)]);
    let (mut taken, mut refused) = (0, 0);
    let started = Instant::now();
    for n in 0..12_000 {
        match direct.send("fleeting", Message::new("orders", n.to_string())) {
            Ok(()) => taken += 1,
            Err(reason) => {
                assert_eq!(reason, NotTaken::Full);
                refused += 1;
            }
        }
    }
    assert!(
        started.elapsed() < Duration::from_secs(5),
        "nobody waits for the broker: {:?}",
        started.elapsed()
    );
    assert!(taken >= 10_000 && refused >= 1, "{taken} taken, {refused} not");
    assert_eq!(direct.losses()[0].messages, refused);
    looking.free.send_replace(true);
    direct.drain(Duration::from_secs(30)).await;
    assert_eq!(looking.seen().len(), taken, "what was taken is sent, once");
    assert_eq!(direct.send("fleeting", Message::new("orders", "late")), Err(NotTaken::Ending));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_waits_for_too_long_at_the_end_is_counted_as_lost() {
    let looking = Looking::new(None, |_| Outcome::Confirmed);
    let direct = Direct::start(vec![(route(looking.clone()), Try::Confirmed)]);
    direct.send("fleeting", Message::new("orders", "first")).expect("there is room");
    until("the first is sent", async || looking.seen().len() == 1).await;
    looking.free.send_replace(false);
    for n in 0..7 {
        direct.send("fleeting", Message::new("orders", n.to_string())).expect("there is room");
    }
    direct.drain(Duration::from_millis(50)).await;
    assert_eq!(direct.losses()[0].messages, 7, "and not the one that was sent");
}

#[tokio::test(flavor = "multi_thread")]
async fn past_the_store_a_message_is_tried_once() {
    let looking = Looking::new(None, |message| match &message.payload[..] {
        b"3" => Outcome::Deferred { error: "not today".to_owned(), after: None },
        _ => Outcome::Confirmed,
    });
    for attempt in [Try::Confirmed, Try::Unconfirmed] {
        looking.seen.lock().expect("no panic").clear();
        let direct = Direct::start(vec![(route(looking.clone()), attempt)]);
        for n in 0..10 {
            direct.send("fleeting", Message::new("orders", n.to_string()).key("one")).expect("there is room");
        }
        direct.drain(Duration::from_secs(30)).await;
        assert_eq!(looking.seen().len(), 10, "each once");
        assert_eq!(direct.losses()[0].messages, 1);
        assert_eq!(direct.losses()[0].error, "not today");
    }
}
