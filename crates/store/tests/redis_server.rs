//! What kinds of server do to a store on Redis: those that are refused, that crash, fill up, fail over or are locked.

#![cfg(feature = "redis")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

mod redis_place;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use message::{Message, MessageId, Status};
use redis::Commands;
use redis_place::{DURABLE, PATIENCE, Server, relay};
use store::redis::{Config, RedisStore, append};
use store::{
    Amend, Append, Appended, Claim, ClaimOrder, Error, Filter, Inspect, Instance, Lanes, Lease, NewMessage,
    Once, Page, Record, Retention, Settlement,
};
use testkit::store::{free, sent};
use testkit::within;

const ACCEPTED: &str = "I accept that messages may be lost";

fn order(key: &str) -> Message {
    Message::new("orders", "{}").key(key)
}

async fn connect(config: Config) -> Result<RedisStore, Error> {
    RedisStore::connect(config).await
}

fn accepting(url: String) -> Config {
    Config { accept_loss: Some(ACCEPTED.to_owned()), ..Config::new(url) }
}

#[tokio::test]
async fn a_server_that_evicts_or_writes_nothing_down_is_refused_unless_loss_is_accepted_in_words() {
    let evicting: &[&str] =
        &["--appendonly", "yes", "--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"];
    let forgetful: &[&str] = &["--appendonly", "no"];
    for (settings, told, promised) in
        [(evicting, "noeviction", "throws messages away"), (forgetful, "appendonly yes", "last snapshot")]
    {
        let server = Server::start(settings);
        let error = connect(Config::new(server.url())).await.unwrap_err();
        assert!(matches!(error, Error::Refused(_)), "{error:?}");
        assert!(error.to_string().contains(told) && error.to_string().contains(ACCEPTED), "{error}");
        let almost = Config { accept_loss: Some("yes".to_owned()), ..Config::new(server.url()) };
        let error = connect(almost).await.unwrap_err().to_string();
        assert!(error.contains("exactly"), "{error}");
        let store = connect(accepting(server.url())).await.unwrap();
        assert!(store.promises().iter().any(|said| said.contains(promised)), "{:?}", store.promises());
        store.append(vec![order("1").into()]).await.unwrap();
    }
}

#[tokio::test]
async fn a_replica_is_refused_whatever_is_accepted() {
    let primary = Server::start(&DURABLE);
    let port = primary.port();
    let replica = Server::start(&["--appendonly", "yes", "--replicaof", "127.0.0.1", &port]);
    let error = connect(accepting(replica.url())).await.unwrap_err().to_string();
    assert!(error.contains("is a replica") && error.contains("primary"), "{error}");
}

#[tokio::test]
async fn what_cannot_be_looked_at_is_said() {
    let server = Server::start(&["--appendonly", "yes"]);
    let mut connection = server.connection();
    redis::cmd("ACL")
        .arg(&["SETUSER", "app", "on", ">s3cret", "~*", "&*", "+@all", "-config", "-function"])
        .exec(&mut connection)
        .unwrap();
    let url = server.url().replace("redis://", "redis://app:s3cret@");
    let store = connect(Config::new(url)).await.unwrap();
    let said = store.promises();
    assert!(
        said.iter().any(|said| said.contains("could not be looked at (CONFIG is forbidden)")),
        "{said:?}"
    );
    store.append(vec![order("1").into()]).await.unwrap();
    assert!(!format!("{store:?}").contains("s3cret"));
}

#[tokio::test]
async fn the_promises_are_those_of_the_server() {
    for (fsync, told) in [("always", "survives a crash"), ("everysec", "up to the last second")] {
        let server = Server::start(&["--appendonly", "yes", "--appendfsync", fsync]);
        let said = server.store().await.promises();
        assert!(said.iter().any(|said| said.contains(told)), "{fsync}: {said:?}");
    }
}

#[tokio::test]
async fn a_password_is_never_told() {
    let server = Server::start(&DURABLE);
    redis::cmd("CONFIG").arg(&["SET", "requirepass", "right"]).exec(&mut server.connection()).unwrap();
    let wrong = server.url().replace("redis://", "redis://:s3cret@");
    let error = connect(Config::new(wrong)).await.unwrap_err();
    assert!(!error.is_transient() && !format!("{error:?}").contains("s3cret"), "{error:?}");
    let mut nowhere = Server::start(&DURABLE);
    nowhere.kill();
    let gone = nowhere.url().replace("redis://", "redis://:s3cret@");
    let error = connect(Config::new(gone)).await.unwrap_err();
    assert!(error.is_transient() && !format!("{error:?}").contains("s3cret"), "{error:?}");
}

/// Appends until Redis is gone; what it acknowledged.
async fn write_on(store: Arc<RedisStore>, key: String) -> Vec<MessageId> {
    let mut acknowledged = Vec::new();
    loop {
        let messages: Vec<NewMessage> = (0..3).map(|_| order(&key).into()).collect();
        let Ok(results) = store.append(messages).await else { return acknowledged };
        acknowledged.extend(results.into_iter().map(|result| match result {
            Ok(Appended::New(id)) => id,
            other => panic!("a new message is stored, not {other:?}"),
        }));
    }
}

/// Takes and settles until Redis is gone.
async fn carry_on(store: Arc<RedisStore>, leases: Vec<Lease>) {
    let mut settlements = Vec::new();
    loop {
        let order = ClaimOrder { leases: leases.clone(), limit: 20, bytes: usize::MAX, rule: Arc::new(free) };
        let Ok(turn) = store.turn(std::mem::take(&mut settlements), Some(order)).await else { return };
        settlements.extend(turn.batches.into_iter().map(|batch| Settlement {
            batch: batch.id,
            lease: batch.lease,
            verdicts: batch.messages.iter().map(|claimed| (claimed.seq, sent())).collect(),
            beside: Vec::new(),
        }));
    }
}

/// Relays that were cut off said no goodbye, and their leases have a long way to go.
async fn bury(store: &RedisStore) {
    let lanes = store.lanes().await.unwrap();
    let owners: BTreeSet<String> = lanes.into_iter().filter_map(|lane| lane.owner).collect();
    for owner in owners {
        let id = owner.trim_start_matches("relay ").parse().unwrap();
        store.leave(&Instance { id, name: owner }).await.unwrap();
    }
}

/// All records, a page at a time.
async fn everything(store: &RedisStore) -> Vec<Record> {
    let mut page = Page { after: None, limit: 1_000, newest_first: false };
    let mut records = Vec::new();
    loop {
        let paged = store.list(&Filter::default(), page).await.unwrap();
        records.extend(paged.items);
        let Some(next) = paged.next else { return records };
        page.after = Some(next);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_redis_loses_nothing_that_was_acknowledged_and_leaves_nothing_half_written() {
    let mut server = Server::start(&DURABLE);
    let mut acknowledged = BTreeSet::new();
    for round in 1..=3 {
        let store = server.store().await;
        bury(&store).await;
        let leases = relay(&store).await.held;
        let writers: Vec<_> =
            (0..8).map(|writer| tokio::spawn(write_on(store.clone(), writer.to_string()))).collect();
        let carrier = tokio::spawn(carry_on(store.clone(), leases));
        within(PATIENCE, "some messages to be sent", || async {
            store.counts().await.is_ok_and(|counts| counts.sent >= 200 * round).then_some(())
        })
        .await;
        server.kill();
        for writer in writers {
            acknowledged.extend(writer.await.unwrap());
        }
        carrier.await.unwrap();
        server.restart();

        let store = server.store().await;
        let records = everything(&store).await;
        let ids: BTreeSet<MessageId> = records.iter().map(|record| record.message.id).collect();
        assert!(acknowledged.is_subset(&ids), "{} are lost", acknowledged.difference(&ids).count());
        assert_eq!(ids.len(), records.len());
        let counts = store.counts().await.unwrap();
        let count = |status| records.iter().filter(|record| record.state.status == status).count() as u64;
        assert_eq!(counts.pending, count(Status::Pending));
        assert_eq!(counts.in_flight, count(Status::InFlight));
        assert_eq!((counts.sent, counts.publish_success_total), (count(Status::Sent), count(Status::Sent)));
        for record in records.iter().step_by(50) {
            assert!(store.record(record.message.id).await.unwrap().is_some(), "it is found by its id");
        }
    }
    let store = server.store().await;
    let counts = store.counts().await.unwrap();
    bury(&store).await;
    let sent = relay(&store).await.drain(1_000, &sent()).await.len() as u64;
    assert_eq!(sent, counts.pending + counts.in_flight, "all that was left can be sent");
}

#[tokio::test]
async fn a_primary_that_became_a_replica_is_unavailable_until_it_is_one_again() {
    let server = Server::start(&DURABLE);
    let store = server.store().await;
    let command = |words: &[&str]| redis::cmd("REPLICAOF").arg(words).exec(&mut server.connection()).unwrap();
    command(&["127.0.0.1", "1"]);
    let error = store.append(vec![order("1").into()]).await.unwrap_err();
    assert!(error.is_transient(), "{error:?}");
    command(&["NO", "ONE"]);
    within(PATIENCE, "the primary", || async { store.append(vec![order("1").into()]).await.ok() }).await;
    assert_eq!(store.counts().await.unwrap().pending, 1);
}

#[tokio::test]
async fn a_store_goes_on_by_itself_when_redis_is_back() {
    let mut server = Server::start(&DURABLE);
    let store = server.store().await;
    let mut relay = relay(&store).await;
    store.append(vec![order("1").into()]).await.unwrap();
    server.kill();
    let error = store.append(vec![order("2").into()]).await.unwrap_err();
    assert!(error.is_transient(), "{error:?}");
    server.restart();
    within(PATIENCE, "the store to answer", || async { store.counts().await.ok() }).await;
    let beat = store::Beat {
        instance: relay.instance.clone(),
        lease: relay.lease,
        held: relay.held.clone(),
        take: true,
        rule: Arc::new(free),
    };
    let beaten = within(PATIENCE, "a beat", || async { store.beat(&beat).await.ok() }).await;
    assert_eq!(beaten.held, relay.held, "its leases outlived the server");
    relay.held = beaten.held;
    assert_eq!(relay.drain(10, &sent()).await.len(), 1);
}

#[tokio::test]
async fn a_full_redis_turns_writers_away_and_lets_relays_and_retention_make_room() {
    let server = Server::start(&[&DURABLE[..], &["--maxmemory", "12mb"]].concat());
    let store = server.store().await;
    let large = |_| Message::new("orders", vec![b'x'; 20_000]).into();
    let error = loop {
        let messages: Vec<NewMessage> = (0..10).map(large).collect();
        if let Err(error) = store.append(messages).await {
            break error;
        }
    };
    assert!(error.is_transient() && error.to_string().contains("Redis is full"), "{error}");
    let mut connection = server.connection();
    let limit =
        |bytes: &str| redis::cmd("CONFIG").arg(&["SET", "maxmemory", bytes]).exec(&mut server.connection());
    limit("0").unwrap();
    let () = connection.set("{postrider}:application", "kept").unwrap();
    limit("1mb").unwrap();
    // An application's MULTI is refused as a whole, also when nothing else in it needs memory.
    let mut pipe = redis::pipe();
    pipe.atomic().del("{postrider}:application").ignore();
    append(&mut pipe, store.prefix(), &order("1")).unwrap();
    let error = pipe.query::<()>(&mut connection).unwrap_err().to_string();
    assert!(error.contains("OOM"), "{error}");
    assert_eq!(connection.get::<_, String>("{postrider}:application").unwrap(), "kept");

    let mut relay = relay(&store).await;
    relay.renew().await;
    let pending = store.counts().await.unwrap().pending;
    assert_eq!(relay.drain(100, &sent()).await.len() as u64, pending, "relays go on");
    let none =
        Retention { sent: Duration::ZERO, dead: Duration::ZERO, keys: Duration::ZERO, audit: Duration::ZERO };
    within(PATIENCE, "retention to make room", || async {
        store.clean(&none).await.unwrap();
        (store.counts().await.unwrap().sent == 0).then_some(())
    })
    .await;
    limit("12mb").unwrap();
    store.append(vec![order("2").into()]).await.unwrap();
}

#[tokio::test]
async fn what_too_few_replicas_have_is_not_acknowledged_and_can_be_repeated() {
    // A replica is served at once, not after others had a chance to ask too.
    let primary = Server::start(&[&DURABLE[..], &["--repl-diskless-sync-delay", "0"]].concat());
    let config = Config { replicas: 1, ..Config::new(primary.url()) };
    // Without a replica it cannot even be made ready.
    let error = connect(config.clone()).await.unwrap_err();
    assert!(error.is_transient(), "{error:?}");
    let port = primary.port();
    let replica = Server::start(&["--appendonly", "yes", "--replicaof", "127.0.0.1", &port]);
    let store = within(PATIENCE, "the replica", || async { connect(config.clone()).await.ok() }).await;
    let store = Arc::new(store);
    assert!(store.promises().iter().any(|said| said.contains("when 1 replica(s)")));
    let once = Once { key: "k".to_owned(), fingerprint: [7; 32] };
    let request = || vec![NewMessage { once: Some(once.clone()), ..order("1").into() }];
    drop(replica);
    redis::cmd("SCRIPT").arg("FLUSH").exec(&mut primary.connection()).unwrap();
    let error = store.append(request()).await.unwrap_err();
    assert!(error.is_transient(), "{error:?}");
    assert!(error.to_string().contains("written, but only 0 of 1 replicas"), "{error}");
    assert_eq!(store.counts().await.unwrap().pending, 1, "it is written all the same");

    // A claim that too few know of is given back, and is no crash of its message.
    let relay = relay(&store).await;
    let order = ClaimOrder { leases: relay.held.clone(), limit: 10, bytes: usize::MAX, rule: Arc::new(free) };
    store.turn(Vec::new(), Some(order)).await.unwrap_err();
    let record =
        store.list(&Filter::default(), Page { after: None, limit: 1, newest_first: false }).await.unwrap();
    assert_eq!(record.items[0].state, message::State::NEW);

    let _replica = Server::start(&["--appendonly", "yes", "--replicaof", "127.0.0.1", &port]);
    let repeated = within(PATIENCE, "the replica", || async { store.append(request()).await.ok() }).await;
    assert_eq!(repeated, [Ok(Appended::Repeated(record.items[0].message.id))]);
    assert_eq!(relay.drain(10, &sent()).await.len(), 1);
}

#[tokio::test]
async fn a_store_lives_in_one_slot_of_a_cluster() {
    let server = Server::start(&[&DURABLE[..], &["--cluster-enabled", "yes"]].concat());
    let mut connection = server.connection();
    redis::cmd("CLUSTER").arg(&["ADDSLOTSRANGE", "0", "16383"]).exec(&mut connection).unwrap();
    within(PATIENCE, "the cluster", || async {
        let info: String = redis::cmd("CLUSTER").arg("INFO").query(&mut server.connection()).unwrap();
        info.contains("cluster_state:ok").then_some(())
    })
    .await;
    let store = server.store().await;
    assert!(store.promises().iter().any(|said| said.contains("one store is one node's work")));
    let mut pipe = redis::pipe();
    pipe.atomic().set("{postrider}:application", "placed").ignore();
    append(&mut pipe, store.prefix(), &order("1")).unwrap();
    pipe.query::<()>(&mut connection).unwrap();
    store.append(vec![order("2").into()]).await.unwrap();
    let relay = relay(&store).await;
    assert_eq!(relay.drain(10, &sent()).await.len(), 2);
    assert_eq!(store.counts().await.unwrap().sent, 2);
}
