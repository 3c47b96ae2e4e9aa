//! What groups do not acknowledge in time: sent again a few times, never in a storm, and told.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use broker::embedded::{Broker, Config};
use broker::{Guarantees, Outcome, Outgoing, Publisher};
use chrono::Utc;
use message::{Message, MessageId};
use relay::{Overdue, Patience, Relay, Route, Running, Settings, Settle};
use store::sqlite::SqliteStore;
use store::{Amend, Append, Filter, Inspect, NewMessage, Page, Record};
use testkit::until;

const ALL: Page = Page { after: None, limit: 10_000, newest_first: false };

/// The embedded broker, and which delivery of each message it got.
struct Counting {
    broker: Broker,
    deliveries: Mutex<BTreeMap<MessageId, Vec<u32>>>,
}

#[async_trait]
impl Publisher for Counting {
    fn guarantees(&self) -> Guarantees {
        self.broker.guarantees()
    }

    async fn publish(&self, batch: Vec<Outgoing>) -> Vec<Outcome> {
        let of: Vec<_> = batch.iter().map(|outgoing| (outgoing.message.id, outgoing.delivery)).collect();
        let outcomes = self.broker.publish(batch).await;
        let mut deliveries = self.deliveries.lock().expect("no panic");
        for ((id, delivery), _) in
            of.into_iter().zip(&outcomes).filter(|(_, told)| **told == Outcome::Confirmed)
        {
            deliveries.entry(id).or_default().push(delivery);
        }
        outcomes
    }
}

struct Bench {
    store: Arc<SqliteStore>,
    counting: Arc<Counting>,
    _folder: tempfile::TempDir,
}

impl Bench {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let store = Arc::new(SqliteStore::open(folder.path().join("store.db")).expect("a store"));
        let broker = Broker::open(Config::new(folder.path().join("broker.db"))).expect("a broker");
        Self { store, counting: Arc::new(Counting { broker, deliveries: Mutex::default() }), _folder: folder }
    }

    /// A relay whose group `billing` has so little time, and whose group `audit` may take for ever.
    fn relay(&self, timeout: Duration, max_redeliveries: u32, settle: Settle) -> Running {
        let route = Route { settle, ..Route::new("main", &["*"], self.counting.clone()) };
        let check_every = Duration::from_millis(20);
        let remembered = Duration::from_secs(3_600);
        let group = "billing".to_owned();
        let patience = vec![Patience { group, timeout, check_every, max_redeliveries, remembered }];
        let groups: relay::Groups = Arc::new(|_| vec!["billing".to_owned(), "audit".to_owned()]);
        Relay::start(self.store.clone(), vec![route], Settings { patience, groups, ..Settings::default() })
    }

    async fn write(&self, count: usize) -> Vec<MessageId> {
        let messages: Vec<Message> = (0..count).map(|n| Message::new("orders", n.to_string())).collect();
        let ids = messages.iter().map(|message| message.id).collect();
        self.store.append(messages.into_iter().map(Into::into).collect()).await.expect("stored");
        ids
    }

    async fn acknowledge(&self, ids: &[MessageId], group: &str) {
        let done = ids.iter().map(|id| (*id, group.to_owned())).collect();
        self.store.acknowledge(done).await.expect("the store answers");
    }

    async fn unacknowledged(&self, group: &str) -> Vec<Record> {
        let filter = Filter { unacknowledged_by: Some(group.to_owned()), ..Filter::default() };
        self.store.list(&filter, ALL).await.expect("a list").items
    }

    fn deliveries(&self) -> BTreeMap<MessageId, Vec<u32>> {
        self.counting.deliveries.lock().expect("no panic").clone()
    }

    async fn sent(&self, count: u64) {
        until("the sending", async || self.store.counts().await.expect("counts").sent == count).await;
    }
}

fn billing(relay: &Running) -> Overdue {
    let overdue = relay.status().overdue;
    assert_eq!(overdue.len(), 1, "one group is watched");
    overdue.into_iter().next().expect("it is there")
}

#[tokio::test(flavor = "multi_thread")]
async fn what_one_of_two_groups_never_acknowledges_is_sent_three_times_more_and_then_told() {
    let bench = Bench::new();
    let relay = bench.relay(Duration::from_millis(100), 3, Settle::After);
    let ids = bench.write(50).await;
    bench.sent(50).await;
    bench.acknowledge(&ids, "audit").await;
    until("the end of patience", async || billing(&relay).given_up == 50).await;
    for (id, deliveries) in bench.deliveries() {
        assert_eq!(deliveries, [0, 1, 2, 3], "{id}: each under a number of its own");
    }
    let found = billing(&relay);
    assert_eq!((found.overdue, found.redelivered), (50, 150));
    let waiting: Vec<MessageId> =
        bench.unacknowledged("billing").await.iter().map(|record| record.message.id).collect();
    assert_eq!(waiting, ids);
    assert!(bench.unacknowledged("audit").await.is_empty(), "who has acknowledged is not asked again");
    bench.acknowledge(&ids, "billing").await;
    until("peace", async || billing(&relay).overdue == 0).await;
    relay.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_that_is_behind_gets_copies_of_a_few_only() {
    let bench = Bench::new();
    bench.write(3_000).await;
    // All are sent before anybody looks.
    let relay = bench.relay(Duration::from_secs(3_000), u32::MAX, Settle::After);
    bench.sent(3_000).await;
    relay.drain().await;
    // And all have waited too long: else the few that are due at first are not the oldest.
    let last = bench.unacknowledged("billing").await.iter().filter_map(|record| record.sent_at).max();
    until("impatience", async || last < Some(Utc::now() - Duration::from_millis(100))).await;
    let relay = bench.relay(Duration::from_millis(100), u32::MAX, Settle::After);
    // Several rounds of the same few.
    until("redeliveries", async || billing(&relay).redelivered >= 500).await;
    let again = bench.deliveries().into_values().filter(|deliveries| deliveries.len() > 1).count();
    assert!((1..=100).contains(&again), "{again} of 3,000 went out again");
    relay.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_group_passed_by_is_sent_again_and_a_late_word_ends_it() {
    let bench = Bench::new();
    let relay = bench.relay(Duration::from_millis(300), 3, Settle::After);
    let ids = bench.write(400).await;
    bench.sent(400).await;
    let (missed, done): (Vec<MessageId>, Vec<MessageId>) =
        ids.iter().copied().partition(|id| ids.iter().position(|other| other == id).expect("it is") < 150);
    bench.acknowledge(&done, "billing").await;
    until("all that were missed", async || {
        bench.deliveries().values().filter(|deliveries| deliveries.len() > 1).count() == 150
    })
    .await;
    bench.acknowledge(&missed, "billing").await;
    until("peace", async || billing(&relay).overdue == 0 && bench.unacknowledged("billing").await.is_empty())
        .await;
    let deliveries = bench.deliveries();
    assert!(done.iter().all(|id| deliveries[id] == [0]), "what was acknowledged went out once");
    relay.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_promises_to_go_out_once_does_however_long_its_group_is_silent() {
    let bench = Bench::new();
    let relay = bench.relay(Duration::from_millis(20), 3, Settle::Before);
    // By itself such a route asks nobody.
    let message = |n: usize| NewMessage {
        ack_groups: Some(vec!["billing".to_owned()]),
        ..NewMessage::from(Message::new("orders", n.to_string()))
    };
    bench.store.append((0..50).map(message).collect()).await.expect("stored");
    until("the look", async || billing(&relay).overdue == 50).await;
    assert!(bench.deliveries().into_values().all(|deliveries| deliveries == [0]));
    assert_eq!(billing(&relay).redelivered, 0);
    relay.drain().await;
}
