//! The traps of Redis Streams, one by one, on real servers.

mod redis_streams_server;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use broker::{
    Delivery, Examine, Health, Outcome, Outgoing, Plan, Position, Publisher, Subscriber, Subscription,
};
use message::Message;
use redis::streams::StreamRangeReply;
use redis_streams_server::Redis;

const PATIENCE: Duration = Duration::from_secs(30);

fn outgoing(key: &str, seq: i64) -> Outgoing {
    Outgoing::new(Message::new("orders", seq.to_string()).key(key), seq)
}

/// Messages numbered from `from`, over `keys` keys.
fn batch(keys: i64, from: i64, count: i64) -> Vec<Outgoing> {
    (from..from + count).map(|seq| outgoing(&format!("key-{}", seq % keys), seq)).collect()
}

fn confirmed(outcomes: &[Outcome]) -> bool {
    outcomes.iter().all(|outcome| *outcome == Outcome::Confirmed)
}

fn number(delivery: &Delivery) -> i64 {
    std::str::from_utf8(&delivery.message.payload).expect("text").parse().expect("a number")
}

fn positions(deliveries: &[Delivery]) -> Vec<Position> {
    deliveries.iter().map(|delivery| delivery.position).collect()
}

async fn subscribe(broker: &impl Subscriber, group: &str) -> Box<dyn Subscription> {
    broker.subscribe(group, &["orders".to_owned()]).await.expect("the group can be joined")
}

async fn receive(subscription: &mut Box<dyn Subscription>, count: usize) -> Vec<Delivery> {
    let mut deliveries = Vec::new();
    while deliveries.len() < count {
        let more = tokio::time::timeout(PATIENCE, subscription.receive(count - deliveries.len())).await;
        let more = more.unwrap_or_else(|_| panic!("{} of {count} came", deliveries.len()));
        deliveries.extend(more.expect("messages can be received"));
    }
    deliveries
}

/// Hazard 79: what a group has not read is not trimmed, whatever the others have done; what all have read is.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_that_a_group_has_not_acknowledged_is_removed() {
    let redis = Redis::shared();
    let broker = redis.open(|config| config.retain = Duration::ZERO);
    for from in (0..4_000).step_by(1_000) {
        assert!(confirmed(&broker.publish(batch(8, from, 1_000)).await));
    }
    let (mut quick, mut slow) = (subscribe(&broker, "quick").await, subscribe(&broker, "slow").await);
    let read = receive(&mut quick, 4_000).await;
    quick.acknowledge(&positions(&read)).await.expect("an acknowledgement is taken");
    let some = receive(&mut slow, 10).await;
    broker.sweep().await.expect("old messages can be removed");
    assert_eq!(redis.stored().await.len(), 4_000, "the slow group still needs them");

    let mut came: BTreeSet<i64> = some.iter().map(number).collect();
    let rest = receive(&mut slow, 3_990).await;
    came.extend(rest.iter().map(number));
    assert_eq!(came.len(), 4_000);
    slow.acknowledge(&positions(&rest)).await.expect("an acknowledgement is taken");
    broker.sweep().await.expect("old messages can be removed");
    // Redis removes whole blocks of a hundred entries.
    let left = redis.stored().await.len();
    assert!(left < 4 * 100, "{left} are left although everybody has read them");
}

/// Hazard 79: a group that does not come back keeps messages until it is forgotten.
#[tokio::test(flavor = "multi_thread")]
async fn a_group_that_is_forgotten_keeps_nothing() {
    let redis = Redis::shared();
    let broker = redis.open(|config| config.retain = Duration::ZERO);
    assert!(confirmed(&broker.publish(batch(8, 0, 1_000)).await));
    let (gone, mut here) = (subscribe(&broker, "gone").await, subscribe(&broker, "here").await);
    let error = broker.forget("gone").await.expect_err("it has a member").to_string();
    assert!(error.contains("gone"), "{error}");
    gone.close().await;
    let read = receive(&mut here, 1_000).await;
    here.acknowledge(&positions(&read)).await.expect("an acknowledgement is taken");
    broker.sweep().await.expect("old messages can be removed");
    assert_eq!(redis.stored().await.len(), 1_000);
    broker.forget("gone").await.expect("nobody is there");
    broker.sweep().await.expect("old messages can be removed");
    assert!(redis.stored().await.len() < 400);
}

/// Hazard 80: with `replicas`, nothing is confirmed that only the primary has, and a failover keeps what was confirmed.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_confirmed_before_replicas_have_it() {
    let (primary, replica) = (Redis::alone(), Redis::alone());
    let broker = primary.open(|config| config.replicas = 1);
    let first = batch(4, 0, 8);
    let lonely = broker.publish(first.clone()).await;
    let alone =
        |outcome: &Outcome| matches!(outcome, Outcome::Unconfirmed { error } if error.contains("0 of 1"));
    assert!(lonely.iter().all(alone), "{lonely:?}");

    replica.command(&["REPLICAOF", "127.0.0.1", &primary.port()]).await;
    testkit::within(PATIENCE, "the replica catches up", || async {
        primary.info("connected_slaves").await.filter(|count| count == "1").map(drop)
    })
    .await;
    testkit::within(PATIENCE, "the same messages are confirmed", || async {
        confirmed(&broker.publish(first.clone()).await).then_some(())
    })
    .await;
    assert!(confirmed(&broker.publish(batch(4, 8, 100)).await));

    let stalled = replica.own().stall();
    let unsure = broker.publish(batch(4, 108, 8)).await;
    assert!(unsure.iter().all(alone), "{unsure:?}");
    drop(stalled);

    primary.kill().await;
    replica.command(&["REPLICAOF", "NO", "ONE"]).await;
    let after = replica.under(&primary.prefix);
    let stored = after.stored().await;
    let numbers: BTreeSet<i64> = stored.iter().copied().collect();
    assert!((0..108).all(|seq| numbers.contains(&seq)), "what was confirmed is there: {numbers:?}");
    assert_eq!(stored.len(), numbers.len(), "and nothing twice");
    // As it was found: a server that is gone cannot be stopped.
    primary.resume().await;
}

/// Hazard 81: a server that is set up to lose messages is not trusted with any, unless that is accepted.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_may_lose_messages_is_refused() {
    let redis = Redis::alone();
    let settings = [
        (["appendonly", "no", "maxmemory", "0", "maxmemory-policy", "noeviction"], "appendonly yes"),
        (["appendonly", "yes", "maxmemory", "100mb", "maxmemory-policy", "allkeys-lru"], "noeviction"),
        (["appendonly", "yes", "maxmemory", "100mb", "maxmemory-policy", "volatile-ttl"], "noeviction"),
    ];
    for (setting, fix) in settings {
        redis.command(&[&["CONFIG", "SET"], &setting[..]].concat()).await;
        let outcomes = redis.open(|_| {}).publish(batch(1, 0, 1)).await;
        let [Outcome::Misconfigured { error }] = &outcomes[..] else { panic!("{setting:?}: {outcomes:?}") };
        assert!(error.contains(fix) && error.contains("accept_loss=true"), "{error}");
        assert!(redis.stored().await.is_empty());
        let doctor = redis.open(|_| {}).examine(&Plan::default()).await;
        let broken = doctor.iter().find(|finding| finding.about == "durability").expect("it is looked at");
        assert!(broken.health == Health::Broken && broken.text.contains(fix), "{broken:?}");
    }
    let outcomes = redis.open(|config| config.accept_loss = true).publish(batch(1, 0, 1)).await;
    assert!(confirmed(&outcomes), "{outcomes:?}");
}

/// Hazard 81: a server that is full refuses loudly, blames nobody, and keeps what it has.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_server_refuses_and_loses_nothing() {
    let redis = Redis::alone();
    let broker = redis.open(|_| {});
    assert!(confirmed(&broker.publish(batch(4, 0, 100)).await));
    redis.command(&["CONFIG", "SET", "maxmemory", "1mb"]).await;
    let outcomes = broker.publish(batch(4, 100, 100)).await;
    for (place, outcome) in outcomes.iter().enumerate() {
        match outcome {
            Outcome::Unreachable { error } => assert!(error.contains("OOM"), "{error}"),
            Outcome::Held => assert!(place >= 4, "only later ones of a key are held"),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(redis.stored().await.len(), 100);
    redis.command(&["CONFIG", "SET", "maxmemory", "0"]).await;
    assert!(confirmed(&broker.publish(batch(4, 100, 100)).await), "and goes on when there is room");
    assert_eq!(redis.stored().await.len(), 200);
}

/// Hazard 82: a server that was told to forget its scripts learns them again.
#[tokio::test(flavor = "multi_thread")]
async fn forgotten_scripts_are_learned_again() {
    let redis = Redis::alone();
    let broker = redis.open(|_| {});
    let mut subscription = subscribe(&broker, "billing").await;
    for round in 0..5 {
        redis.command(&["SCRIPT", "FLUSH", "SYNC"]).await;
        assert!(confirmed(&broker.publish(batch(4, round * 10, 10)).await));
        redis.command(&["SCRIPT", "FLUSH", "SYNC"]).await;
        let came = receive(&mut subscription, 10).await;
        redis.command(&["SCRIPT", "FLUSH", "SYNC"]).await;
        subscription.acknowledge(&positions(&came)).await.expect("an acknowledgement is taken");
    }
    assert_eq!(redis.pending("billing").await, 0);
}

/// Hazards 82 and 83: killed in the midst of scripts again and again, Redis has each message once and in order.
#[tokio::test(flavor = "multi_thread")]
async fn a_killed_server_has_each_message_once_and_in_order() {
    let redis = Redis::alone();
    let broker = redis.open(|config| config.timeout = Duration::from_secs(2));
    for round in 0..5_i64 {
        let publish = async {
            for step in 0..30 {
                let messages = batch(8, round * 3_000 + step * 100, 100);
                // As the relay does: what is not confirmed is sent again, with the same ids.
                testkit::within(PATIENCE, "all are confirmed in the end", || async {
                    confirmed(&broker.publish(messages.clone()).await).then_some(())
                })
                .await;
            }
        };
        let kill = async {
            redis.until_stored(usize::try_from(round * 3_000 + 300).expect("few")).await;
            redis.kill().await;
            redis.resume().await;
        };
        tokio::join!(publish, kill);
    }
    redis.assert_each_once_and_in_order(15_000).await;
}

/// Hazard 83: a message whose confirmation was lost is stored once; a deliberate second delivery is another message.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_is_sent_twice_is_stored_once() {
    let redis = Redis::shared();
    let messages = batch(4, 0, 50);
    let (here, there) = (redis.open(|_| {}), redis.open(|_| {}));
    for broker in [&here, &there, &here] {
        assert!(confirmed(&broker.publish(messages.clone()).await));
    }
    // Within one call too.
    assert!(confirmed(&here.publish([messages.clone(), messages.clone()].concat()).await));
    redis.assert_each_once_and_in_order(50).await;
    let again: Vec<_> = messages.into_iter().map(|one| Outgoing { delivery: 1, ..one }).collect();
    assert!(confirmed(&here.publish(again).await));
    assert_eq!(redis.stored().await.len(), 100);
}

/// Hazard 83: connections break in the midst of calls; nothing is stored twice and no order is lost.
#[tokio::test(flavor = "multi_thread")]
async fn broken_connections_leave_no_duplicates() {
    let redis = Redis::alone();
    let broker = redis.open(|_| {});
    let cut = async {
        for after in (100..2_000).step_by(100) {
            redis.until_stored(after).await;
            redis.command(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]).await;
        }
    };
    let publish = async {
        for from in (0..2_000).step_by(20) {
            let messages = batch(8, from, 20);
            testkit::within(PATIENCE, "all are confirmed in the end", || async {
                confirmed(&broker.publish(messages.clone()).await).then_some(())
            })
            .await;
        }
    };
    tokio::join!(cut, publish);
    redis.assert_each_once_and_in_order(2_000).await;
}

/// Hazard 83: members die with messages in hand; others finish them, and in the end nothing is pending and nobody is left.
#[tokio::test(flavor = "multi_thread")]
async fn what_dead_members_leave_is_finished_by_others() {
    let redis = Redis::shared();
    let broker = redis.open(|config| config.lease = Duration::from_millis(300));
    assert!(confirmed(&broker.publish(batch(8, 0, 200)).await));
    for _ in 0..5 {
        let mut dying = subscribe(&broker, "billing").await;
        receive(&mut dying, 1).await;
        // Without a farewell.
        drop(dying);
    }
    let mut last = subscribe(&broker, "billing").await;
    let mut orders: BTreeMap<String, Vec<i64>> = BTreeMap::new();
    let came = receive(&mut last, 200).await;
    for delivery in &came {
        let key = delivery.message.key.clone().expect("every message has a key");
        orders.entry(key).or_default().push(number(delivery));
    }
    assert!(orders.values().all(|numbers| numbers.is_sorted()), "{orders:?}");
    last.acknowledge(&positions(&came)).await.expect("an acknowledgement is taken");
    assert_eq!(redis.pending("billing").await, 0);
    broker.sweep().await.expect("consumers can be removed");
    assert_eq!(redis.consumers("billing").await.len(), 1, "the names of the dead are gone");
    last.close().await;
    assert_eq!(redis.consumers("billing").await.len(), 0);
}

/// A stream that holds something else stops its own keys and nobody else's.
#[tokio::test(flavor = "multi_thread")]
async fn a_key_of_another_kind_harms_only_its_partition() {
    let redis = Redis::shared();
    let broker = redis.open(|config| config.partitions = 4);
    redis.command(&["SET", &redis.stream(0), "mine"]).await;
    let outcomes = broker.publish(batch(16, 0, 32)).await;
    let broken: BTreeSet<i64> = (0..16).filter(|key| outcomes[*key as usize] != Outcome::Confirmed).collect();
    assert!(!broken.is_empty() && broken.len() < 16, "{outcomes:?}");
    for key in 0..16 {
        let [first, second] = [&outcomes[key as usize], &outcomes[key as usize + 16]];
        match broken.contains(&key) {
            false => assert_eq!((first, second), (&Outcome::Confirmed, &Outcome::Confirmed)),
            true => {
                assert!(matches!(first, Outcome::Misconfigured { error } if error.contains("WRONGTYPE")));
                assert_eq!(*second, Outcome::Held);
            }
        }
    }
}

/// A password is never told, whatever goes wrong.
#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_password_is_misconfigured_and_not_told() {
    let redis = Redis::alone();
    redis.command(&["ACL", "SETUSER", "ann", "on", ">secret", "~*", "+@all"]).await;
    let url = redis.url.replace("redis://", "redis://ann:hush@");
    let broker =
        broker::redis_streams::Broker::open(broker::redis_streams::Config::from_url(&url).expect("a URL"));
    let broker = broker.expect("nothing is connected yet");
    let outcomes = broker.publish(batch(1, 0, 1)).await;
    assert!(matches!(&outcomes[..], [Outcome::Misconfigured { .. }]), "{outcomes:?}");
    let refused = broker.subscribe("billing", &["orders".to_owned()]).await.err().expect("it is refused");
    assert!(matches!(refused, broker::ReceiveError::Misconfigured(_)), "{refused}");
    let findings = broker.examine(&Plan::default()).await;
    assert!(findings.iter().any(|finding| finding.health == Health::Broken));
    let told = format!("{outcomes:?} {refused:?} {findings:?} {broker:?}");
    assert!(!told.contains("hush"), "{told}");
    let right = broker::redis_streams::Config::from_url(&url.replace("hush", "secret")).expect("a URL");
    let right = broker::redis_streams::Broker::open(right).expect("nothing is connected yet");
    assert!(confirmed(&right.publish(batch(1, 0, 1)).await));
}

/// Others read and write the same streams with the client that comes with Redis.
#[tokio::test(flavor = "multi_thread")]
async fn redis_cli_reads_and_writes_the_same_messages() {
    let redis = Redis::shared();
    let broker = redis.open(|config| config.partitions = 1);
    let message = Message::new("orders", r#"{"total": 10}"#).key("42").kind("Placed").header("tenant", "eu");
    assert!(confirmed(&broker.publish(vec![Outgoing::new(message.clone(), 7)]).await));
    let said = redis.cli(&["XRANGE", &redis.stream(0), "-", "+"]);
    let id = message.id.to_string();
    for text in [
        "payload",
        r#"{"total": 10}"#,
        "postrider-key",
        "42",
        "postrider-type",
        "Placed",
        "tenant",
        "eu",
        &id,
    ] {
        assert!(said.lines().any(|line| line == text), "{text} is missing: {said}");
    }

    redis.cli(&["XADD", &redis.stream(0), "*", "payload", "hello", "postrider-key", "7", "color", "red"]);
    redis.cli(&["XADD", &redis.stream(0), "*", "total", "11", "currency", "EUR"]);
    let mut subscription = subscribe(&broker, "billing").await;
    let came = receive(&mut subscription, 3).await;
    assert_eq!(came[0].message.id, message.id);
    assert_eq!(&came[1].message.payload[..], b"hello");
    assert_eq!((came[1].message.key.as_deref(), &*came[1].message.headers["color"]), (Some("7"), "red"));
    assert_eq!(&came[2].message.payload[..], br#"{"currency":"EUR","total":"11"}"#);
    subscription.give_back(&positions(&came[1..2])).await.expect("messages can be given back");
    let again = receive(&mut subscription, 2).await;
    assert_eq!(again[0].message.id, came[1].message.id, "it is the same message again");
}

/// What the doctor says of topics and groups.
#[tokio::test(flavor = "multi_thread")]
async fn the_doctor_finds_what_is_missing_and_who_does_not_come_back() {
    let redis = Redis::shared();
    let broker = redis.open(|_| {});
    assert!(confirmed(&broker.publish(batch(4, 0, 10)).await));
    subscribe(&broker, "gone").await.close().await;
    let strict = redis.open(|config| config.create = false);
    let plan = Plan {
        topics: vec!["orders".to_owned(), "refunds".to_owned()],
        horizon: Duration::from_secs(86_400),
        max_payload: 2 << 20,
        ..Plan::default()
    };
    let findings = strict.examine(&plan).await;
    let of = |about: &str| {
        let found = findings.iter().find(|finding| finding.about == about);
        found.unwrap_or_else(|| panic!("{about} is missing: {findings:#?}"))
    };
    assert_eq!(of("topic orders").health, Health::Good);
    assert_eq!(of("topic refunds").health, Health::Broken);
    assert!(of("topic refunds").fix.as_deref().is_some_and(|fix| fix.contains("HSET")));
    assert_eq!(of("group gone of topic orders").health, Health::Doubtful);
    assert!(of("group gone of topic orders").text.contains("10 messages"));
    assert_eq!(of("durability").health, Health::Doubtful, "everysec");
    assert_eq!(of("duplicates").health, Health::Doubtful);
    assert_eq!(of("payload").health, Health::Broken);
    // What it says to do helps.
    let fix = of("topic refunds").fix.clone().expect("there is one");
    let words: Vec<&str> = fix.split(' ').skip(1).map(|word| word.trim_matches('\'')).collect();
    redis.cli(&words);
    assert_eq!(
        strict.examine(&plan).await.iter().find(|f| f.about == "topic refunds").expect("found").health,
        Health::Good
    );
}

/// A server that is not there yet is no error: what is opened before works after.
#[tokio::test(flavor = "multi_thread")]
async fn a_broker_may_be_opened_before_its_server() {
    let redis = Redis::alone();
    tokio::task::block_in_place(|| redis.own().stop());
    let broker = redis.open(|_| {});
    let outcomes = broker.publish(batch(1, 0, 1)).await;
    assert!(matches!(&outcomes[..], [Outcome::Unreachable { .. }]), "{outcomes:?}");
    let away = broker.subscribe("billing", &["orders".to_owned()]).await.err().expect("nobody is there");
    assert!(matches!(away, broker::ReceiveError::Unreachable(_)), "{away}");
    redis.resume().await;
    assert!(confirmed(&broker.publish(batch(1, 0, 1)).await));
    let mut subscription = subscribe(&broker, "billing").await;
    assert_eq!(receive(&mut subscription, 1).await.len(), 1);
}

/// Whatever is wiped is made again by whoever comes next.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_was_wiped_is_used_again() {
    let redis = Redis::alone();
    let broker = redis.open(|_| {});
    assert!(confirmed(&broker.publish(batch(4, 0, 10)).await));
    let mut member = subscribe(&broker, "billing").await;
    receive(&mut member, 10).await;
    redis.command(&["FLUSHALL"]).await;
    assert!(confirmed(&broker.publish(batch(4, 10, 10)).await));
    let mut came = BTreeSet::new();
    while came.len() < 10 {
        match tokio::time::timeout(PATIENCE, member.receive(10)).await.expect("messages or an error") {
            Ok(deliveries) => came.extend(deliveries.iter().map(number)),
            Err(broker::ReceiveError::Unreachable(_)) => member = subscribe(&broker, "billing").await,
            Err(error) => panic!("{error}"),
        }
    }
    assert_eq!(came, (10..20).collect());
}

/// What the streams of a prefix hold is read in the order of the streams.
fn numbers_of(entries: &StreamRangeReply) -> Vec<(String, i64)> {
    let text = |entry: &redis::streams::StreamId, name: &str| entry.get::<String>(name).unwrap_or_default();
    let read = |entry| (text(entry, "postrider-key"), text(entry, "payload").parse().expect("a number"));
    entries.ids.iter().map(read).collect()
}
