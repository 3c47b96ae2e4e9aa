//! Many at once on MySQL: writers, relays, consumers, and what is cut off in the middle.

#![cfg(feature = "mysql")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

mod mysql_database;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use message::{Message, MessageId};
use mysql_async::TxOpts;
use mysql_async::prelude::Queryable;
use rand::Rng;
use store::mysql::{Config, MysqlStore};
use store::{
    Acknowledged, Amend, Append, Appended, Arrival, Claim, ClaimOrder, Filter, Handled, Inbox, InboxRules,
    Inspect, NewMessage, Once, Page, Receipt, Reservation, Settlement, Store, TopicRule, Verdict, Work,
};
use testkit::store::{Relay, free, holding, sent};

use mysql_database::Database;

const ALL: Page = Page { after: None, limit: 10_000, newest_first: false };

async fn open(database: &Database) -> Arc<MysqlStore> {
    Arc::new(MysqlStore::connect(Config::new(database.url())).await.unwrap())
}

async fn relay(store: &Arc<MysqlStore>) -> Relay {
    let store: Arc<dyn Store> = store.clone();
    Relay::with_all_lanes(store).await
}

/// What went out, in order: key and payload of each message that was confirmed.
type Sent = Arc<Mutex<Vec<(String, String)>>>;

/// Takes and confirms, failing now and then, until `over` and nothing is left.
async fn run_relay(store: Arc<MysqlStore>, log: Sent, over: Arc<AtomicBool>) {
    let mut relay = { Relay::new(store.clone() as Arc<dyn Store>).by(holding) };
    let mut settlements = Vec::new();
    loop {
        let beaten = relay.beat().await;
        if settlements.is_empty() && beaten.surplus > 0 {
            let back = relay.held.split_off(relay.held.len() - beaten.surplus);
            store::Lanes::release(&*store, &back, store::Left::Untouched).await.unwrap();
        }
        let last = over.load(Ordering::Acquire);
        let order = ClaimOrder {
            leases: relay.held.clone(),
            limit: 50,
            bytes: 1 << 20,
            rule: Arc::new(holding) as Arc<dyn Fn(&str) -> TopicRule + Send + Sync>,
        };
        let turn = store.turn(std::mem::take(&mut settlements), Some(order)).await.unwrap();
        assert!(turn.fenced.is_empty(), "nobody lost a lane");
        if turn.batches.is_empty() && !turn.more && turn.next_due.is_none() && last {
            return store::Lanes::leave(&*store, &relay.instance).await.unwrap();
        }
        for batch in turn.batches {
            let mut verdicts = Vec::new();
            let mut troubled = BTreeSet::new();
            for claimed in &batch.messages {
                let key = claimed.message.key.clone().unwrap();
                // As a broker that keeps order would: what follows one that failed is not sent either.
                let fails = troubled.contains(&key) || rand::rng().random_ratio(1, 40);
                verdicts.push((
                    claimed.seq,
                    match fails {
                        true if troubled.insert(key.clone()) => {
                            let retry_after = Duration::from_millis(3);
                            Verdict::Failed { error: "no luck".to_owned(), retry_after, hold: true }
                        }
                        true => Verdict::Released { error: None },
                        false => {
                            let payload = String::from_utf8(claimed.message.payload.to_vec()).unwrap();
                            log.lock().unwrap().push((key, payload));
                            Verdict::Sent { ack_groups: Vec::new() }
                        }
                    },
                ));
            }
            settlements.push(Settlement {
                batch: batch.id,
                lease: batch.lease,
                verdicts,
                beside: Vec::new(),
            });
        }
        tokio::task::yield_now().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn many_writers_and_three_relays_lose_nothing_double_nothing_and_keep_order() {
    const WRITERS: usize = 8;
    const EACH: usize = 250;
    let database = Database::fresh().await;
    let log: Sent = Arc::default();
    let over = Arc::new(AtomicBool::new(false));
    let mut relays = Vec::new();
    for _ in 0..3 {
        relays.push(tokio::spawn(run_relay(open(&database).await, log.clone(), over.clone())));
    }
    let mut writers = Vec::new();
    for writer in 0..WRITERS {
        let mut application = database.application().await;
        writers.push(tokio::spawn(async move {
            let mut written = Vec::new();
            for number in 0..EACH {
                let (key, payload) = (format!("{writer}-{}", number % 5), number.to_string());
                let mut transaction = application.start_transaction(TxOpts::default()).await.unwrap();
                let message = Message::new("orders", payload.clone()).key(key.clone());
                store::mysql::append(&mut transaction, &message).await.unwrap();
                // Transactions of different lengths: numbers become visible out of order.
                let work = rand::rng().random_range(0..4_000);
                tokio::time::sleep(Duration::from_micros(work)).await;
                if number % 10 == 3 {
                    transaction.rollback().await.unwrap();
                } else {
                    transaction.commit().await.unwrap();
                    written.push((key, payload));
                }
            }
            written
        }));
    }
    let mut expected: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for writer in writers {
        for (key, payload) in writer.await.unwrap() {
            expected.entry(key).or_default().push(payload);
        }
    }
    over.store(true, Ordering::Release);
    for relay in relays {
        relay.await.unwrap();
    }
    let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (key, payload) in log.lock().unwrap().iter() {
        found.entry(key.clone()).or_default().push(payload.clone());
    }
    assert_eq!(found, expected);
    let counts = open(&database).await.counts().await.unwrap();
    let all = (WRITERS * EACH * 9 / 10) as u64;
    assert_eq!((counts.sent, counts.publish_success_total, counts.pending, counts.failed), (all, all, 0, 0));
}

#[tokio::test]
async fn a_writer_that_commits_a_low_number_late_is_delivered() {
    let database = Database::fresh().await;
    let store = open(&database).await;
    let relay = relay(&store).await.by(holding);
    let mut application = database.application().await;
    let mut slow = application.start_transaction(TxOpts::default()).await.unwrap();
    let late = Message::new("orders", "late").key("k");
    store::mysql::append(&mut slow, &late).await.unwrap();
    let quick: Vec<NewMessage> =
        (0..50).map(|n| Message::new("orders", "quick").key(n.to_string()).into()).collect();
    store.append(quick).await.unwrap();
    assert_eq!(relay.drain(10, &sent()).await.len(), 50);
    slow.commit().await.unwrap();
    let found = relay.drain(10, &sent()).await;
    assert_eq!(found.iter().map(|claimed| claimed.message.id).collect::<Vec<_>>(), [late.id]);
}

/// Nothing of the topic `closed` may be taken.
fn rule(topic: &str) -> TopicRule {
    TopicRule { take: if topic == "closed" { 0 } else { usize::MAX }, ..free(topic) }
}

/// The time of a turn that settles and claims, the best of many: whatever else the machine does, one of them is not
/// disturbed.
async fn turn_time(store: &Arc<MysqlStore>, relay: &Relay) -> Duration {
    const TURNS: usize = 15;
    const EACH: usize = 100;
    let message = |number: usize| Message::new("orders", "{}").key(number.to_string()).into();
    store.append((0..TURNS * EACH).map(message).collect()).await.unwrap();
    let mut settlements = Vec::new();
    let mut best = Duration::MAX;
    loop {
        let order =
            ClaimOrder { leases: relay.held.clone(), limit: EACH, bytes: 1 << 20, rule: Arc::new(rule) };
        let (settles, start) = (!settlements.is_empty(), Instant::now());
        let turn = store.turn(std::mem::take(&mut settlements), Some(order)).await.unwrap();
        let took = start.elapsed();
        if turn.batches.is_empty() {
            return best;
        }
        if settles {
            best = best.min(took);
        }
        settlements = turn
            .batches
            .into_iter()
            .map(|batch| {
                let verdicts = batch.messages.iter().map(|claimed| (claimed.seq, sent())).collect();
                Settlement { batch: batch.id, lease: batch.lease, verdicts, beside: Vec::new() }
            })
            .collect();
    }
}

#[tokio::test]
async fn a_turn_costs_the_same_with_many_sent_rows_and_with_a_backlog_that_may_not_be_taken() {
    let database = Database::fresh().await;
    let store = open(&database).await;
    let relay = relay(&store).await;
    turn_time(&store, &relay).await;
    let few = turn_time(&store, &relay).await;
    let mut application = database.application().await;
    // Doubled until they are many: every server knows this much SQL.
    application
        .query_drop("INSERT INTO outbox_events (topic, payload, status, ready, sent_at) VALUES ('orders', '{}', 'sent', 0, utc_timestamp(3))")
        .await
        .unwrap();
    let double = "INSERT INTO outbox_events (topic, payload, status, ready, sent_at)
                  SELECT topic, payload, status, ready, sent_at FROM outbox_events WHERE status = 'sent' LIMIT 30000";
    for _ in 0..8 {
        application.query_drop(double).await.unwrap();
    }
    let shut = "INSERT INTO outbox_events (topic, payload)
                SELECT 'closed', payload FROM outbox_events WHERE status = 'sent' LIMIT 30000";
    application.query_drop(shut).await.unwrap();
    let many = turn_time(&store, &relay).await;
    let rows: Option<u64> = application.query_first("SELECT count(*) FROM outbox_events").await.unwrap();
    assert!(rows.unwrap() > 100_000, "{rows:?}");
    // A turn that read them all would take a hundred times as long.
    assert!(many < few * 3 + Duration::from_millis(20), "{few:?} with few rows, {many:?} with many");
}

#[tokio::test]
async fn work_on_a_lane_delays_neither_the_heartbeat_nor_the_taking_of_other_lanes() {
    const SOON: Duration = Duration::from_secs(5);
    let database = Database::fresh().await;
    let store = open(&database).await;
    let mut first = relay(&store).await;
    // As a relay that was stopped in the middle of a turn would.
    let mut stopped = database.application().await;
    let mut turn = stopped.start_transaction(TxOpts::default()).await.unwrap();
    turn.query_drop("SELECT part FROM outbox_counters WHERE part = 3 FOR UPDATE").await.unwrap();
    let renewed = tokio::time::timeout(SOON, first.renew()).await.expect("it does not wait");
    assert_eq!(renewed.held.len(), 16);
    first.leave().await;
    let mut second = Relay::new(open(&database).await as Arc<dyn Store>);
    let taken = tokio::time::timeout(SOON, second.beat()).await.expect("it does not wait");
    assert_eq!((taken.held.len(), taken.wanting), (15, 1), "all but the one in use");
    assert!(taken.held.iter().all(|lease| lease.lane != 3));
    turn.rollback().await.unwrap();
    assert_eq!(second.beat().await.held.len(), 16);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_is_dropped_leaves_a_clean_connection_behind() {
    const ROUNDS: u64 = 60;
    let database = Database::fresh().await;
    let config = Config { pool: 2, ..Config::new(database.url()) };
    let store = Arc::new(MysqlStore::connect(config).await.unwrap());
    for round in 0..ROUNDS {
        let once = Once { key: round.to_string(), fingerprint: [0; 32] };
        let message = Message::new("orders", round.to_string()).key(round.to_string());
        let new = NewMessage { once: Some(once), ..message.clone().into() };
        let _ =
            tokio::time::timeout(Duration::from_micros(round * 40), store.append(vec![new.clone()])).await;
        let result = store.append(vec![new]).await.unwrap().remove(0).unwrap();
        assert!(
            matches!(result, Appended::New(id) | Appended::Repeated(id) if id == message.id),
            "{result:?}"
        );
    }
    let records = store.list(&Filter::default(), ALL).await.unwrap().items;
    let payloads: BTreeSet<&[u8]> = records.iter().map(|record| &record.message.payload[..]).collect();
    assert_eq!((records.len() as u64, payloads.len() as u64), (ROUNDS, ROUNDS));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_whose_connections_are_killed_goes_on() {
    // A server of its own: one that hands the thread of a connection that ends to the next caller may kill that one.
    let server = testkit::servers::Own::start("mariadb");
    let database = Database::on(server.url()).await;
    let store = open(&database).await;
    let mut relay = relay(&store).await;
    let over = Arc::new(AtomicBool::new(false));
    let killer = {
        let (mut administrator, over) = (database.application().await, over.clone());
        tokio::spawn(async move {
            let mut killed = 0;
            while !over.load(Ordering::Acquire) {
                let victims: Vec<u64> = administrator
                    .query("SELECT id FROM information_schema.processlist WHERE db = database() AND id <> connection_id()")
                    .await
                    .unwrap();
                for victim in victims {
                    killed += usize::from(administrator.query_drop(format!("KILL {victim}")).await.is_ok());
                }
                tokio::time::sleep(Duration::from_millis(15)).await;
            }
            killed
        })
    };
    let mut written = BTreeSet::new();
    let mut done: HashMap<MessageId, usize> = HashMap::new();
    for round in 0..60 {
        let once = Once { key: round.to_string(), fingerprint: [1; 32] };
        let message = Message::new("orders", "{}").key((round % 7).to_string());
        let new = NewMessage { once: Some(once), ..message.into() };
        // The caller does what every caller does: the same again, until it is answered.
        let id = loop {
            match store.append(vec![new.clone()]).await {
                Ok(mut results) => match results.remove(0).unwrap() {
                    Appended::New(id) | Appended::Repeated(id) => break id,
                },
                Err(error) => assert!(error.is_transient(), "{error}"),
            }
        };
        written.insert(id);
        while let Err(error) = store.record(id).await {
            assert!(error.is_transient(), "{error}");
        }
    }
    over.store(true, Ordering::Release);
    assert!(killer.await.unwrap() > 10, "connections were killed");
    relay.beat().await;
    for claimed in relay.drain(20, &sent()).await {
        *done.entry(claimed.message.id).or_default() += 1;
    }
    assert_eq!(done.keys().copied().collect::<BTreeSet<_>>(), written);
    assert!(done.values().all(|times| *times == 1));
}

fn arrival(key: &str, payload: &str) -> Arrival {
    Arrival { message: Message::new("orders", payload.to_owned()).key(key), seq: None, delivery: 0 }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn parallel_consumers_do_each_message_once_although_some_fail_at_first() {
    let database = Database::fresh().await;
    let store = open(&database).await;
    let mut application = database.application().await;
    application
        .query_drop(
            "CREATE TABLE effects (id VARCHAR(36) PRIMARY KEY, worth INT NOT NULL, CONSTRAINT worthy CHECK (worth > 0))",
        )
        .await
        .unwrap();
    let arrivals: Vec<Arrival> = (0..120)
        .map(|number| arrival(&(number % 11).to_string(), if number % 17 == 5 { "0" } else { "7" }))
        .collect();
    // What is worth nothing cannot be written, until the table lets it.
    let work = Work::Sql("INSERT INTO effects (id, worth) VALUES (:id, :payload)".to_owned());
    let mut rules = InboxRules::default();
    rules.retry.first = Duration::from_millis(1);
    rules.retry.cap = Duration::from_millis(1);
    rules.retry.max_attempts = 1_000;
    let mut consumers = Vec::new();
    for consumer in 0..4 {
        let (store, work, rules) = (open(&database).await, work.clone(), rules.clone());
        let mut arrivals = arrivals.clone();
        arrivals.rotate_left(consumer * 30);
        consumers.push(tokio::spawn(async move {
            let mut done = 0;
            for batch in arrivals.chunks(13) {
                let receipts = store.process("billing", batch.to_vec(), &work, &rules).await.unwrap();
                done += receipts.iter().filter(|receipt| **receipt == Receipt::Done).count();
            }
            done
        }));
    }
    let mut done = 0;
    for consumer in consumers {
        done += consumer.await.unwrap();
    }
    application.query_drop("ALTER TABLE effects DROP CONSTRAINT worthy").await.unwrap();
    while done < arrivals.len() {
        let due = store.due("billing", 50).await.unwrap();
        let receipts = store.process("billing", due, &work, &rules).await.unwrap();
        done += receipts.iter().filter(|receipt| **receipt == Receipt::Done).count();
    }
    let counts = store.inbox_counts("billing").await.unwrap();
    assert_eq!((counts.processed, counts.parked, counts.dead), (120, 0, 0));
    let effects: Option<u64> = application.query_first("SELECT count(*) FROM effects").await.unwrap();
    assert_eq!(effects, Some(120));
    assert!(store.parked("billing", ALL).await.unwrap().items.is_empty(), "nobody is left waiting");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn what_one_consumer_works_on_outside_no_other_does_inside() {
    let database = Database::fresh().await;
    let (inside, outside) = (open(&database).await, open(&database).await);
    let rules = InboxRules::default();
    let lease = Duration::from_secs(60);
    for round in 0..40 {
        let arrivals: Vec<Arrival> = (0..3).map(|_| arrival(&round.to_string(), "{}")).collect();
        let (receipts, reservations) = tokio::join!(
            inside.process("billing", arrivals.clone(), &Work::Mark, &rules),
            outside.reserve("billing", arrivals.clone(), lease, &rules),
        );
        let (receipts, reservations) = (receipts.unwrap(), reservations.unwrap());
        for ((arrival, receipt), reservation) in arrivals.into_iter().zip(receipts).zip(reservations) {
            match (receipt, reservation) {
                (Receipt::Done, Reservation::Settled(Receipt::Duplicate)) => {}
                (Receipt::Busy, Reservation::Granted(token)) => {
                    let done = vec![(arrival, token, Handled::Done)];
                    let concluded = outside.conclude("billing", done, &rules).await.unwrap();
                    assert_eq!(concluded, [Receipt::Done]);
                }
                other => panic!("both or none of them do it: {other:?}"),
            }
        }
    }
    assert_eq!(inside.inbox_counts("billing").await.unwrap().processed, 120);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn of_the_same_acknowledgement_given_by_many_one_is_new() {
    let database = Database::fresh().await;
    let store = open(&database).await;
    let relay = relay(&store).await;
    let messages: Vec<NewMessage> = (0..30).map(|_| Message::new("orders", "{}").into()).collect();
    let done: Vec<(MessageId, String)> =
        messages.iter().map(|new| (new.message.id, "billing".to_owned())).collect();
    store.append(messages).await.unwrap();
    let batches = relay.claim(100).await;
    // Some come before the settlement, some at the same time, some after it.
    let mut acknowledging = Vec::new();
    for _ in 0..4 {
        let (store, done) = (store.clone(), done.clone());
        acknowledging.push(tokio::spawn(async move { store.acknowledge(done).await.unwrap() }));
    }
    relay.settle_all(&batches, &Verdict::Sent { ack_groups: vec!["billing".to_owned()] }).await;
    let mut new = 0;
    for answers in acknowledging {
        new += answers.await.unwrap().iter().filter(|answer| **answer == Acknowledged::New).count();
    }
    assert_eq!(new, done.len());
    assert_eq!(store.counts().await.unwrap().acknowledged_total, done.len() as u64);
    let left = Filter { unacknowledged_by: Some("billing".to_owned()), ..Filter::default() };
    assert!(store.list(&left, ALL).await.unwrap().items.is_empty());
}
