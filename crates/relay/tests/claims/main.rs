//! Claims in Redis: what is locked, counted and given back, and what a worker leaves that died.
//!
//! Workers that die are processes of their own, killed while they send: this file runs itself again for them.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod rules;
mod world;

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use broker::Outcome;
use message::{Message, Status};
use redis::Commands;
use relay::claims::redis::Config;
use store::sqlite::SqliteStore;
use store::{Amend, Record};
use world::{Abyss, Destination, LIMIT, PATIENCE, Server, World, free_port, lines, relay};

/// What [`World::dying_worker`] runs.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "a process that others start and kill"]
async fn a_worker_in_a_process_of_its_own() {
    let given =
        |name: &str| std::env::var(name).unwrap_or_else(|_| panic!("{name} is set by whoever starts it"));
    let store = Arc::new(SqliteStore::open(given("CLAIMS_STORE")).expect("a store"));
    let claims = Config {
        prefix: given("CLAIMS_PREFIX"),
        ttl: Duration::from_millis(given("CLAIMS_TTL").parse().expect("milliseconds")),
        ..Config::new(given("CLAIMS_REDIS"))
    };
    let _relay = relay(store, Arc::new(Abyss(given("CLAIMS_REQUESTS").into())), &claims);
    std::future::pending::<()>().await;
}

fn order(key: &str) -> Message {
    Message::new("orders", "{}").key(key)
}

fn deferred() -> Outcome {
    Outcome::Deferred { error: "not now".to_owned(), after: None }
}

#[tokio::test(flavor = "multi_thread")]
async fn while_it_is_sent_a_message_is_locked_and_afterwards_it_is_sent_and_has_no_key() {
    let world = World::new(Duration::from_secs(60));
    let (claims, seen) = (world.claims.clone(), Arc::new(Mutex::new(Vec::new())));
    let looked = seen.clone();
    let destination = Destination::new(move |message| {
        let mut redis = redis::Client::open(claims.url.as_str()).unwrap().get_connection().unwrap();
        let lock = claims.prefix.replace("{id}", &message.id.to_string());
        let value: Option<String> = redis.get(&lock).unwrap();
        let counter: Option<String> = redis.hget(format!("{lock}:attempts"), "attempts").unwrap();
        let (rest, keep): (i64, i64) =
            (redis.pttl(&lock).unwrap(), redis.pttl(format!("{lock}:attempts")).unwrap());
        looked.lock().unwrap().push((value, counter, rest, keep));
        Outcome::Confirmed
    });
    let ids = world.write((0..20).map(|n| order(&format!("k{n}"))).collect()).await;
    let relay = world.relay(destination.clone());
    for id in &ids {
        world.until_status(*id, Status::Sent).await;
    }
    world.until_no_keys().await;
    relay.drain().await;
    assert_eq!(destination.requests().len(), 20);
    for (value, counter, rest, keep) in seen.lock().expect("no panic").iter() {
        assert_eq!((value.as_deref(), counter.as_deref()), (Some("1"), Some("1")));
        assert!((1..=60_000).contains(rest), "{rest}");
        assert!(*keep > 6 * 24 * 3_600_000, "{keep}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_of_a_worker_that_was_killed_is_sent_again_when_its_lock_ends_and_not_before() {
    let world = World::new(Duration::from_secs(6));
    let ids = world.write(vec![order("k"), order("k")]).await;
    let worker = world.dying_worker();
    worker.until_it_sends().await;
    worker.kill();
    let (looked_at, rest) =
        (Instant::now(), world.redis().pttl::<_, i64>(world.lock(ids[0])).expect("a lock"));
    assert!(rest > 0, "the lock is there: {rest}");

    let destination = Destination::new(|_| Outcome::Confirmed);
    let relay = world.relay(destination.clone());
    let waiting = world.until_status(ids[0], Status::Failed).await;
    assert_eq!(waiting.state.attempts, 1, "the attempt of the dead one counts");
    assert!(waiting.last_error.expect("an error").contains("another worker held its lock"));
    for id in &ids {
        world.until_status(*id, Status::Sent).await;
    }
    let requests = destination.requests();
    assert_eq!(requests.iter().map(|(id, _)| *id).collect::<Vec<_>>(), ids, "once each, in order");
    let ended = looked_at + Duration::from_millis(u64::try_from(rest).expect("positive"));
    assert!(requests[0].1 >= ended, "sent {:?} too early", ended.duration_since(requests[0].1));
    assert_eq!(world.record(ids[0]).await.state.attempts, 1);
    world.until_no_keys().await;
    relay.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_attempt_of_which_only_the_count_is_left_is_counted_in_the_store_too() {
    let world = World::new(Duration::from_millis(200));
    let ids = world.write(vec![order("k")]).await;
    let worker = world.dying_worker();
    worker.until_it_sends().await;
    worker.kill();
    let ended = || async { !world.redis().exists::<_, bool>(world.lock(ids[0])).expect("Redis") };
    assert!(testkit::eventually(PATIENCE, ended).await);
    assert_eq!(world.counter(ids[0])["attempts"], "1", "it outlives the lock");

    let destination = Destination::new(|_| Outcome::Confirmed);
    let relay = world.relay(destination.clone());
    let sent = world.until_status(ids[0], Status::Sent).await;
    assert_eq!((sent.state.attempts, destination.requests().len()), (1, 1));
    world.until_no_keys().await;
    relay.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn after_three_failures_it_is_dead_without_a_fourth_request_and_both_agree() {
    let world = World::new(Duration::from_secs(60));
    let ids = world.write(vec![order("k")]).await;
    let destination = Destination::new(|_| deferred());
    let relay = world.relay(destination.clone());
    world.until(ids[0], "a failure", |record| record.state.attempts == 1).await;
    let dead = world.until_status(ids[0], Status::Dead).await;
    assert_eq!((dead.state.attempts, destination.requests().len()), (LIMIT, 3));
    assert_eq!(dead.dead_reason.as_deref(), Some("MaxAttempts(3) exceeded"));
    world.until_no_keys().await;

    // A person sends it again: that is a life of its own.
    world.store.requeue(ids[0], "test").await.expect("requeued");
    let again = |record: &Record| record.state.status == Status::Dead && record.state.delivery == 1;
    let dead = world.until(ids[0], "dead again", again).await;
    assert_eq!((dead.state.attempts, destination.requests().len()), (LIMIT, 6));
    world.until_no_keys().await;
    relay.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn after_three_crashes_of_its_workers_it_is_dead_without_a_fourth_request_and_both_agree() {
    let world = World::new(Duration::from_millis(500));
    let ids = world.write(vec![order("k")]).await;
    for crash in 1..=3 {
        let worker = world.dying_worker();
        worker.until_it_sends().await;
        assert_eq!(world.counter(ids[0])["attempts"], crash.to_string());
        worker.kill();
    }
    let destination = Destination::new(|_| Outcome::Confirmed);
    let relay = world.relay(destination.clone());
    let dead = world.until_status(ids[0], Status::Dead).await;
    assert_eq!(dead.dead_reason.as_deref(), Some("MaxAttempts(3) exceeded"));
    assert_eq!(dead.state.attempts, LIMIT);
    assert!(destination.requests().is_empty(), "no fourth request");
    assert_eq!(lines(&world.folder.path().join("requests")), 3);
    world.until_no_keys().await;
    relay.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lock_that_somebody_else_has_keeps_its_message_and_its_key_and_nobody_else() {
    let world = World::new(Duration::from_secs(60));
    let ids = world.write(vec![order("k"), order("k"), order("other")]).await;
    let _: () = world.redis().pset_ex(world.lock(ids[0]), "1", 3_600_000).expect("a lock");
    let destination = Destination::new(|_| Outcome::Confirmed);
    let relay = world.relay(destination.clone());
    world.until_status(ids[2], Status::Sent).await;
    let held = world.until_status(ids[0], Status::Failed).await;
    let wait = held.next_attempt_at.expect("a wait") - held.written_at;
    assert!(wait.num_minutes() >= 59, "{wait}");
    relay.drain().await;
    assert_eq!(destination.requests().iter().map(|(id, _)| *id).collect::<Vec<_>>(), [ids[2]]);
    assert_eq!(world.record(ids[1]).await.state.attempts, 0, "it only waits for its key");
    assert_eq!(world.keys(), [world.lock(ids[0])], "the lock of a stranger stays");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_destination_that_is_down_leaves_no_lock_and_spends_no_attempt_anywhere() {
    let world = World::new(Duration::from_secs(60));
    let ids = world.write(vec![order("k")]).await;
    let destination = Destination::new(|_| Outcome::Unreachable { error: "refused".to_owned() });
    let relay = world.relay(destination.clone());
    let probed = || async { destination.requests().len() >= 2 };
    assert!(testkit::eventually(PATIENCE, probed).await);
    world.until_no_keys().await;
    relay.drain().await;
    assert_eq!(world.record(ids[0]).await.state.attempts, 0);
    assert_eq!(world.keys(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_message_waits_without_a_lock_and_with_its_count() {
    let world = World::new(Duration::from_secs(60));
    let ids = world.write(vec![order("k")]).await;
    let wait = Duration::from_secs(3_600);
    let destination =
        Destination::new(move |_| Outcome::Deferred { error: "later".to_owned(), after: Some(wait) });
    let relay = world.relay(destination.clone());
    world.until_status(ids[0], Status::Failed).await;
    let counter = format!("{}:attempts", world.lock(ids[0]));
    let kept = testkit::eventually(PATIENCE, || async { world.keys() == [counter.clone()] }).await;
    assert!(kept, "{:?}", world.keys());
    assert_eq!(world.counter(ids[0])["attempts"], "1");
    relay.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn while_redis_is_away_nothing_is_sent_and_nothing_spent_and_all_flows_when_it_is_back() {
    let port = free_port();
    let world = World::on(format!("redis://127.0.0.1:{port}"), Duration::from_secs(60));
    let ids = world.write((0..200).map(|n| order(&format!("k{n}"))).collect()).await;
    let (claims, unlocked) = (world.claims.clone(), Arc::new(Mutex::new(Vec::new())));
    let seen = unlocked.clone();
    let destination = Destination::new(move |message| {
        let lock = claims.prefix.replace("{id}", &message.id.to_string());
        let redis = redis::Client::open(claims.url.as_str()).unwrap().get_connection();
        if !redis.is_ok_and(|mut redis| redis.exists(lock).unwrap_or(false)) {
            seen.lock().unwrap().push(message.id);
        }
        Outcome::Confirmed
    });
    let relay = world.relay(destination.clone());
    let away =
        || async { relay.status().breakers.iter().any(|view| view.open && view.destination == "claims") };
    assert!(testkit::eventually(PATIENCE, away).await);
    let server = Server::start(port, world.folder.path()).await;
    for id in &ids {
        let record = world.until_status(*id, Status::Sent).await;
        assert_eq!(record.state.attempts, 0);
    }
    assert_eq!(destination.requests().len(), 200, "once each");
    world.until_no_keys().await;

    drop(server);
    let ids = world.write((0..200).map(|n| order(&format!("k{n}"))).collect()).await;
    assert!(testkit::eventually(PATIENCE, away).await);
    let _server = Server::start(port, world.folder.path()).await;
    for id in &ids {
        assert_eq!(world.until_status(*id, Status::Sent).await.state.attempts, 0);
    }
    assert_eq!(destination.requests().len(), 400);
    assert_eq!(*unlocked.lock().unwrap(), [], "nothing is sent without its lock");
    world.until_no_keys().await;
    relay.drain().await;
}
