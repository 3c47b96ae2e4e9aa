//! What is Redis's own: the application's MULTI and scripts, other languages, handlers' scripts, cost and bounds.

#![cfg(feature = "redis")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

mod redis_place;

use std::collections::BTreeMap;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use chrono::SubsecRound;
use message::{Message, MessageId, Status};
use redis::{Commands, Connection};
use redis_place::{DURABLE, PATIENCE, Place, Server, relay, relay_by};
use store::redis::{RedisStore, append, library, send_script};
use store::{
    Append, Arrival, Claimed, Filter, Handled, Inbox, InboxCounts, InboxRules, Inspect, Lanes, Page, Receipt,
    Reservation, Store, TopicRule, Work,
};
use testkit::store::{Relay, dead, free, holding, sent};

const ALL: Page = Page { after: None, limit: 10_000, newest_first: false };

fn order(key: &str) -> Message {
    Message::new("orders", "{\"total\": 10}").key(key)
}

async fn pending(store: &RedisStore) -> u64 {
    store.counts().await.unwrap().pending
}

#[tokio::test]
async fn the_applications_keys_and_its_message_are_written_in_one_multi() {
    let place = Place::new();
    let store = place.store().await;
    let mut connection = place.connection();
    let message = order("42").kind("Placed").header("traceparent", "00-\"ü\"");
    let mut pipe = redis::pipe();
    pipe.atomic().set(place.key("order"), "placed").ignore();
    append(&mut pipe, place.prefix(), &message).unwrap();
    pipe.get(place.key("order"));
    let (placed,): (String,) = pipe.query(&mut connection).unwrap();
    assert_eq!(placed, "placed", "the message adds nothing to the results");
    let found = store.record(message.id).await.unwrap().unwrap().message;
    assert_eq!(Message { occurred_at: message.occurred_at, ..found }, message);
    let claimed = relay(&store).await.drain(10, &sent()).await;
    assert_eq!(claimed.len(), 1);
}

#[tokio::test]
async fn a_multi_that_is_not_executed_leaves_no_message() {
    let place = Place::new();
    let store = place.store().await;
    let mut connection = place.connection();
    // Somebody changed what the application had read.
    redis::cmd("WATCH").arg(place.key("order")).exec(&mut connection).unwrap();
    let () = place.connection().set(place.key("order"), "other").unwrap();
    let mut pipe = redis::pipe();
    pipe.atomic().set(place.key("order"), "placed").ignore();
    append(&mut pipe, place.prefix(), &order("1")).unwrap();
    let executed: Option<()> = pipe.query(&mut connection).unwrap();
    assert_eq!(executed, None);
    // A command that Redis does not know.
    let mut pipe = redis::pipe();
    pipe.atomic().set(place.key("order"), "placed").ignore().cmd("NOSUCHCOMMAND").ignore();
    append(&mut pipe, place.prefix(), &order("2")).unwrap();
    pipe.query::<()>(&mut connection).unwrap_err();
    assert_eq!(pending(&store).await, 0);
    let value: String = connection.get(place.key("order")).unwrap();
    assert_eq!(value, "other");
    // What no store could keep is not even sent.
    append(&mut redis::pipe(), place.prefix(), &Message::new("no topic!", "1")).unwrap_err();
}

#[tokio::test]
async fn a_script_of_the_application_writes_its_keys_and_sends() {
    let place = Place::new();
    let store = place.store().await;
    let mut connection = place.connection();
    let body = "local id = postrider.send('orders', ARGV[1], '{}', ARGV[2])
                redis.call('SET', KEYS[1], id)
                return id";
    let script = store::redis::script(place.prefix(), body).unwrap();
    let id = MessageId::new();
    for (key, good) in [("1", true), ("2", false)] {
        let mut call = script.key(place.key(key));
        let answer: Result<String, _> = call.arg(key).arg(id.to_string()).invoke(&mut connection);
        assert_eq!(answer.is_ok(), good, "{answer:?}");
        if let Err(error) = answer {
            assert!(error.to_string().contains("another message has the id"), "{error}");
        }
        assert_eq!(connection.exists::<_, bool>(place.key(key)).unwrap(), good);
    }
    assert_eq!(store.record(id).await.unwrap().unwrap().message.key.as_deref(), Some("1"));
    store::redis::script("a b", "").unwrap_err();
}

/// Runs the commands in the documentation of `store::redis`, under this place's prefix.
fn documented(place: &Place) -> Vec<String> {
    let text = include_str!("../src/redis.rs");
    let commands = text.lines().filter_map(|line| line.strip_prefix("//! redis-cli "));
    commands
        .map(|command| {
            let command = command.replace("{postrider}", place.prefix());
            let command = format!("redis-cli -p {} {command}", place.port());
            let output = Command::new("sh").args(["-c", &command]).output().unwrap();
            assert!(output.status.success(), "{command}");
            String::from_utf8(output.stdout).unwrap().trim().to_owned()
        })
        .collect()
}

#[tokio::test]
async fn the_documented_calls_of_redis_cli_send_and_mark_a_message_and_apply_versions() {
    let place = Place::new();
    let store = place.store().await;
    let answers = documented(&place);
    assert_eq!(answers.len(), 5, "{answers:?}");
    let id: MessageId = answers[0].parse().unwrap();
    let record = store.record(id).await.unwrap().unwrap();
    assert_eq!((record.message.topic.as_str(), record.message.key.as_deref()), ("orders", Some("42")));
    assert_eq!(record.message.payload, "{\"total\": 10}");
    assert_eq!(record.message.content_type, Message::DEFAULT_CONTENT_TYPE);
    let full = store.record(answers[1].parse().unwrap()).await.unwrap().unwrap().message;
    assert_eq!(full.id.to_string(), "0190a5c4-6b2e-7d3f-8a4b-5c6d7e8f9a0b");
    assert_eq!(full.headers, BTreeMap::from([("traceparent".to_owned(), "00-ab".to_owned())]));
    assert_eq!(full.kind.as_deref(), Some("OrderPlaced"));
    assert_eq!(answers[2..], ["1", "1", "1"], "it is new to the group, and so are the versions");
    assert_eq!(documented(&place)[2..], ["0", "0", "0"], "and then no more");
    let price: i64 = redis::cmd("HGET")
        .arg(&[&format!("{}:price:42", place.prefix()), "price"])
        .query(&mut place.connection())
        .unwrap();
    assert_eq!(price, 300);
    let counts = store.inbox_counts("billing").await.unwrap();
    assert_eq!(counts, InboxCounts { processed: 1, duplicates: 1, ..InboxCounts::default() });
}

fn fcall(connection: &mut Connection, place: &Place, args: &[&str]) -> redis::RedisResult<String> {
    redis::cmd("FCALL").arg("postrider_send").arg(1).arg(place.prefix()).arg(args).query(connection)
}

#[tokio::test]
async fn what_is_sent_by_hand_wrongly_is_refused_with_the_reason_and_writes_nothing() {
    let place = Place::new();
    let store = place.store().await;
    let mut connection = place.connection();
    let cases: [(&[&str], &str); 8] = [
        (&["no topic!", "k", "1"], "a topic has"),
        (&["orders", "k"], "payload"),
        (&["orders", "a\nb", "1"], "the key has a control character"),
        (&["orders", &"k".repeat(1_025), "1"], "the limit is 1024"),
        (&["orders", "k", "1", "7"], "an id must be a UUID"),
        (&["orders", "k", "1", "", "[1]"], "headers must be a JSON object"),
        (&["orders", "k", "1", "", "{\"a\":7}"], "headers must be a JSON object"),
        (&["orders", "k", "1", "", "", "", "", "soon"], "milliseconds"),
    ];
    for (args, expected) in cases {
        let error = fcall(&mut connection, &place, args).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    assert_eq!(pending(&store).await, 0);
    let nowhere = redis::cmd("FCALL")
        .arg(&["postrider_send", "1", "{no-such-store}", "orders", "k", "1"])
        .query::<String>(&mut connection);
    let error = nowhere.unwrap_err().to_string();
    assert!(error.contains("there is no store at {no-such-store}"), "{error}");
    // What a JSON reader would choke on is written so that it does not.
    let id = fcall(&mut connection, &place, &["orders", "", "1", "", "{\"a\":\"x\n\"}"]).unwrap();
    let record = store.record(id.parse().unwrap()).await.unwrap().unwrap();
    assert_eq!(record.message.headers["a"], "x\n");
    assert_eq!(record.message.key, None);
    assert!(id.chars().nth(14) == Some('7'), "a UUIDv7: {id}");
}

#[tokio::test]
async fn a_server_without_functions_is_sent_to_by_eval() {
    let place = Place::new();
    let store = place.store().await;
    let id: String = redis::cmd("EVAL")
        .arg(send_script())
        .arg(1)
        .arg(&[place.prefix(), "orders", "42", "{}"])
        .query(&mut place.connection())
        .unwrap();
    assert!(store.record(id.parse().unwrap()).await.unwrap().is_some());
}

#[tokio::test]
async fn the_functions_of_a_newer_program_are_left_alone_and_those_of_an_older_one_replaced() {
    let server = Server::start(&DURABLE);
    let mut connection = server.connection();
    let mut load = |code: &str| redis::cmd("FUNCTION").arg(&["LOAD", "REPLACE", code]).exec(&mut connection);
    let with_version = |version: u32| library().replacen("-- version 2", &format!("-- version {version}"), 1);
    let loaded = |server: &Server| -> String {
        let list: redis::Value =
            redis::cmd("FUNCTION").arg(&["LIST", "WITHCODE"]).query(&mut server.connection()).unwrap();
        format!("{list:?}")
    };
    load(&with_version(0)).unwrap();
    server.store().await;
    assert!(loaded(&server).contains("-- version 2"));
    load(&with_version(9)).unwrap();
    server.store().await;
    assert!(loaded(&server).contains("-- version 9"));
}

#[tokio::test]
async fn redis_forgetting_its_scripts_loses_nothing() {
    let place = Place::new();
    let store = place.store().await;
    let mut connection = place.connection();
    let mut forget = || redis::cmd("SCRIPT").arg("FLUSH").exec(&mut connection).unwrap();
    let mut relay = relay(&store).await;
    let mut taken = 0;
    for round in 0..5 {
        forget();
        store.append(vec![order(&round.to_string()).into()]).await.unwrap();
        forget();
        relay.renew().await;
        forget();
        let batches = relay.claim(10).await;
        taken += batches.len();
        forget();
        relay.settle_all(&batches, &sent()).await;
        forget();
    }
    let counts = store.counts().await.unwrap();
    assert_eq!((taken, counts.sent, counts.pending, counts.in_flight), (5, 5, 0, 0));
}

fn rules() -> InboxRules {
    InboxRules { acknowledge: false, ..InboxRules::default() }
}

fn arrival(payload: &str) -> Arrival {
    let message = Message::new("orders", payload.to_owned()).key("42").header("a", "b");
    Arrival { message, seq: Some(7), delivery: 0 }
}

async fn work(store: &RedisStore, arrivals: &[Arrival], script: &str) -> Vec<Receipt> {
    let work = Work::Script(script.to_owned());
    store.process("billing", arrivals.to_vec(), &work, &rules()).await.unwrap()
}

#[tokio::test]
async fn a_handlers_script_sees_the_whole_message() {
    let place = Place::new();
    let store = place.store().await;
    let mut one = arrival("hello");
    one.message.kind = Some("Placed".to_owned());
    let script = format!(
        "redis.call('SET', '{}', table.concat({{message.id, message.topic, message.type, message.key, message.payload,
         message.headers.a, message.occurred_at, message.seq, message.group}}, ' '))",
        place.key("seen")
    );
    assert_eq!(work(&store, std::slice::from_ref(&one), &script).await, [Receipt::Done]);
    let seen: String = place.connection().get(place.key("seen")).unwrap();
    let millis = one.message.occurred_at.timestamp_millis();
    assert_eq!(seen, format!("{} orders Placed 42 hello b {millis} 7 billing", one.message.id));
}

#[tokio::test]
async fn a_handlers_script_that_fails_parks_its_message_and_no_other() {
    let place = Place::new();
    let store = place.store().await;
    let script = "if message.payload == 'odd' then error('an odd message') end
                  if message.payload == 'wrong' then redis.call('NOSUCHCOMMAND') end
                  if message.payload == 'said' then return redis.error_reply('ERR it said so') end";
    let mut arrivals: Vec<Arrival> = ["1", "odd", "wrong", "said", "2"].map(arrival).to_vec();
    for (number, arrival) in arrivals.iter_mut().enumerate() {
        arrival.message.key = Some(number.to_string());
    }
    let receipts = work(&store, &arrivals, script).await;
    let errors: Vec<&str> = receipts
        .iter()
        .filter_map(|receipt| match receipt {
            Receipt::Parked { error } => Some(error.as_str()),
            _ => None,
        })
        .collect();
    assert_eq!((&receipts[0], &receipts[4], errors.len()), (&Receipt::Done, &Receipt::Done, 3));
    assert!(errors[0].contains("handler:1: an odd message"), "its line is told: {errors:?}");
    assert!(errors[1].contains("Unknown Redis command") && errors[2].contains("it said so"), "{errors:?}");
}

/// Reserves all of these for a handler outside.
async fn reserve(store: &RedisStore, group: &str, arrivals: &[Arrival], lease: Duration) -> Vec<Reservation> {
    store.reserve(group, arrivals.to_vec(), lease, &rules()).await.unwrap()
}

#[tokio::test]
async fn conclusions_of_all_kinds_in_one_call_keep_their_errors_and_waits() {
    let place = Place::new();
    let store = place.store().await;
    // More than go into one script; every third has no key, every fifth no place in the producer's order.
    let arrivals: Vec<Arrival> = (0..250)
        .map(|n: u32| {
            let mut message = Message::new("orders", n.to_string());
            // As exact as Redis keeps it.
            message.occurred_at = message.occurred_at.trunc_subsecs(3);
            let message = if n.is_multiple_of(3) { message } else { message.key(n.to_string()) };
            Arrival { message, seq: (!n.is_multiple_of(5)).then_some(i64::from(n)), delivery: n }
        })
        .collect();
    let hour = Duration::from_secs(3_600);
    let handled = |n: usize| match n % 4 {
        0 => Handled::Done,
        1 => Handled::Retry { error: format!("again {n}"), after: Some(hour) },
        2 => Handled::Dead { error: if n == 2 { String::new() } else { format!("never {n}") } },
        _ => Handled::Unavailable { error: format!("down {n}") },
    };
    let reserved = reserve(&store, "billing", &arrivals, PATIENCE).await;
    let conclusions = arrivals.iter().zip(&reserved).enumerate().map(|(n, (arrival, reservation))| {
        let Reservation::Granted(token) = reservation else { panic!("{n}: {reservation:?}") };
        (arrival.clone(), *token, handled(n))
    });
    let conclusions: Vec<_> = conclusions.collect();
    let receipts = store.conclude("billing", conclusions.clone(), &rules()).await.unwrap();
    for (n, receipt) in receipts.iter().enumerate() {
        let expected = match handled(n) {
            Handled::Done => Receipt::Done,
            Handled::Retry { error, .. } => Receipt::Parked { error },
            Handled::Dead { error } => Receipt::Dead { error },
            Handled::Unavailable { error } => Receipt::Unavailable { error },
        };
        assert_eq!(*receipt, expected, "{n}");
    }
    let again = store.conclude("billing", conclusions, &rules()).await.unwrap();
    assert_eq!(again, vec![Receipt::Busy; 250], "a token ends one reservation, once");
    let parked = Inbox::parked(store.as_ref(), "billing", ALL).await.unwrap().items;
    assert_eq!(parked.len(), 125);
    for kept in parked {
        let n = kept.arrival.delivery as usize;
        assert_eq!((&kept.arrival, kept.dead), (&arrivals[n], n % 4 == 2));
        let wait = kept.next_attempt_at.map(|at| at - chrono::Utc::now());
        assert_eq!(
            wait.is_some_and(|wait| wait > chrono::Duration::minutes(50)),
            n % 4 == 1,
            "{n}: {wait:?}"
        );
    }
    let done = store.processed("billing", ALL).await.unwrap().items;
    let done: Vec<_> = done.into_iter().map(|done| (done.id, done.topic, done.key, done.seq)).collect();
    let expected = arrivals
        .iter()
        .step_by(4)
        .map(|Arrival { message, seq, .. }| (message.id, message.topic.clone(), message.key.clone(), *seq));
    assert_eq!(done, expected.collect::<Vec<_>>());
}

#[tokio::test]
async fn reservations_that_have_ended_are_nobodys_and_go() {
    let place = Place::new();
    let store = place.store().await;
    let arrivals: Vec<Arrival> = (0..300).map(|n| arrival(&n.to_string())).collect();
    let moment = Duration::from_millis(1);
    let (ended, kept) = arrivals.split_at(299);
    let old = reserve(&store, "billing", ended, moment).await;
    reserve(&store, "billing", kept, PATIENCE).await;
    // A group that never said how long it keeps ids.
    reserve(&store, "audit", ended, moment).await;
    let is_over = || async {
        let one = std::slice::from_ref(&ended[0]);
        store.process("billing", one.to_vec(), &Work::Mark, &rules()).await.unwrap() == [Receipt::Done]
    };
    assert!(testkit::eventually(PATIENCE, is_over).await, "the lease does not end");
    let Reservation::Granted(token) = old[0] else { panic!("{old:?}") };
    let late = store.conclude("billing", vec![(ended[0].clone(), token, Handled::Done)], &rules()).await;
    assert_eq!(late.unwrap(), [Receipt::Busy]);
    let left = |group: &str| -> usize {
        place.connection().hlen(format!("{}:in:{group}:reserved", place.prefix())).unwrap()
    };
    let are_gone = || async {
        store.forget_ids("billing", PATIENCE).await.unwrap();
        (left("billing"), left("audit")) == (1, 0)
    };
    assert!(testkit::eventually(PATIENCE, are_gone).await, "{} and {}", left("billing"), left("audit"));
}

#[tokio::test]
async fn sql_is_refused_with_what_to_use_instead() {
    let place = Place::new();
    let store = place.store().await;
    let sql = Work::Sql("SELECT 1".to_owned());
    let error = store.check(&sql).await.unwrap_err().to_string();
    assert!(error.contains("`script`, `http` or `command`"), "{error}");
    store.process("billing", vec![arrival("1")], &sql, &rules()).await.unwrap_err();
    let error = store.check(&Work::Script("if".to_owned())).await.unwrap_err().to_string();
    assert!(error.contains("does not compile") && error.contains("handler:1"), "{error}");
}

/// Commands that Redis has run, those inside scripts too.
fn commands(connection: &mut Connection) -> u64 {
    let stats: String = redis::cmd("INFO").arg("commandstats").query(connection).unwrap();
    let calls =
        stats.lines().filter_map(|line| line.split_once(":calls=")?.1.split(',').next()?.parse::<u64>().ok());
    calls.sum()
}

async fn write(store: &RedisStore, topic: &str, count: usize) {
    let messages = (0..count).map(|n| Message::new(topic, "{}").key(n.to_string()).into()).collect();
    store.append(messages).await.unwrap();
}

#[tokio::test]
async fn a_turn_costs_the_same_whatever_was_sent_waits_or_is_held_back() {
    fn rule(topic: &str) -> TopicRule {
        TopicRule { take: if topic == "down" { 0 } else { usize::MAX }, ..free(topic) }
    }
    let server = Server::start(&DURABLE);
    let store = server.store().await;
    let relay = relay_by(&store, rule).await;
    let mut connection = server.connection();
    let cost = async |connection: &mut Connection| {
        write(&store, "orders", 10).await;
        let before = commands(connection);
        let batches = relay.claim(10).await;
        let after = commands(connection);
        relay.settle_all(&batches, &sent()).await;
        after - before
    };
    write(&store, "down", 1).await;
    cost(&mut connection).await;
    let few = cost(&mut connection).await;
    write(&store, "done", 5_000).await;
    assert_eq!(relay.drain(500, &sent()).await.len(), 5_000);
    write(&store, "later", 500).await;
    relay.drain(500, &testkit::store::failed(std::time::Duration::from_secs(3_600), false)).await;
    write(&store, "down", 5_000).await;
    cost(&mut connection).await;
    let many = cost(&mut connection).await;
    // A few more topics stand on the lanes; their messages cost nothing.
    assert!(many <= few + 64, "{few} commands with nothing around, {many} with 10,500 messages");
}

#[tokio::test]
async fn the_number_of_lanes_changes_under_writers_and_order_is_kept() {
    let place = Place::new();
    let store = place.store().await;
    let keys: Vec<String> = (0..40).map(|n| format!("key {n}")).collect();
    let write = async |from: usize, to: usize| {
        for number in from..to {
            let messages =
                keys.iter().map(|key| Message::new("orders", number.to_string()).key(key).into()).collect();
            store.append(messages).await.unwrap();
        }
    };
    write(0, 150).await;
    // 6,000 messages are sorted anew in several steps, with writers in between.
    let (changed, ()) = tokio::join!(store.set_lanes(4), write(150, 170));
    assert!(changed.unwrap());
    let (changed, ()) = tokio::join!(store.set_lanes(64), write(170, 200));
    assert!(changed.unwrap());
    let mut relay = relay(&store).await;
    relay.beat().await;
    assert_eq!(relay.held.len(), 64);
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    for claimed in relay.drain(500, &sent()).await {
        let next = seen.entry(claimed.message.key.clone().unwrap()).or_default();
        assert_eq!(claimed.message.payload, next.to_string(), "{:?}", claimed.message.key);
        *next += 1;
    }
    assert_eq!(seen.len(), 40);
    assert!(seen.values().all(|count| *count == 200), "{seen:?}");
}

/// Beats, gives back what others should have, takes and settles, until `all` messages are through.
async fn carry(mut relay: Relay, sink: Arc<Mutex<Vec<Claimed>>>, all: usize) {
    while sink.lock().unwrap().len() < all {
        let surplus = relay.beat().await.surplus;
        let back = relay.held.split_off(relay.held.len() - surplus);
        relay.store.release(&back, store::Left::Untouched).await.unwrap();
        let batches = relay.claim(50).await;
        let claimed = batches.iter().flat_map(|batch| batch.messages.clone());
        sink.lock().unwrap().extend(claimed);
        relay.settle_all(&batches, &sent()).await;
    }
    relay.leave().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn three_relays_and_sixteen_writers_lose_nothing_repeat_nothing_and_keep_each_key_in_order() {
    const EACH: usize = 200;
    let place = Place::new();
    let sink: Arc<Mutex<Vec<Claimed>>> = Arc::default();
    let mut tasks = Vec::new();
    for _ in 0..3 {
        let store: Arc<dyn Store> = place.store().await;
        tasks.push(tokio::spawn(carry(Relay::new(store), sink.clone(), 16 * EACH)));
    }
    for writer in 0..16 {
        let store = place.store().await;
        tasks.push(tokio::spawn(async move {
            for number in 0..EACH {
                let message = Message::new("orders", number.to_string()).key(format!("writer {writer}"));
                store.append(vec![message.into()]).await.unwrap();
            }
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    let mut next: BTreeMap<String, usize> = BTreeMap::new();
    for claimed in sink.lock().unwrap().iter() {
        let number = next.entry(claimed.message.key.clone().unwrap()).or_default();
        assert_eq!(claimed.message.payload, number.to_string(), "{:?}", claimed.message.key);
        *number += 1;
    }
    assert!(next.len() == 16 && next.values().all(|count| *count == EACH), "{next:?}");
    let counts = place.store().await.counts().await.unwrap();
    assert_eq!((counts.sent, counts.pending, counts.in_flight), (16 * EACH as u64, 0, 0));
}

#[tokio::test]
async fn a_long_line_of_followers_is_let_go_in_order_a_part_at_a_time() {
    let place = Place::new();
    let store = place.store().await;
    let relay = relay_by(&store, holding).await;
    let messages: Vec<Message> = (0..1_300).map(|_| order("42")).collect();
    let ids: Vec<MessageId> = messages.iter().map(|message| message.id).collect();
    store.append(messages.into_iter().map(Into::into).collect()).await.unwrap();
    let first = relay.claim(1).await;
    relay.settle_all(&first, &dead(true)).await;
    assert!(relay.drain(100, &sent()).await.is_empty(), "all wait");
    store::Amend::discard(&*store, ids[0], "test").await.unwrap();
    // One that comes while the line goes on stands at its end.
    let late = order("42");
    store.append(vec![late.clone().into()]).await.unwrap();
    let taken: Vec<MessageId> =
        relay.drain(2_000, &sent()).await.iter().map(|claimed| claimed.message.id).collect();
    assert_eq!(taken, [&ids[1..], &[late.id]].concat());
    assert!(store.holds(10).await.unwrap().is_empty());
}

#[tokio::test]
async fn a_thousand_topics_are_claimed_in_the_order_of_writing() {
    let place = Place::new();
    let store = place.store().await;
    store.set_lanes(1).await.unwrap();
    let messages: Vec<Message> =
        (0..1_000).map(|n| Message::new(format!("topic-{n}"), "1").key("k")).collect();
    let ids: Vec<MessageId> = messages.iter().map(|message| message.id).collect();
    store.append(messages.into_iter().map(Into::into).collect()).await.unwrap();
    let taken = relay(&store).await.drain(300, &sent()).await;
    assert_eq!(taken.iter().map(|claimed| claimed.message.id).collect::<Vec<_>>(), ids);
}

#[tokio::test]
async fn a_list_finds_what_stands_behind_ten_thousand_others() {
    let place = Place::new();
    let store = place.store().await;
    for _ in 0..11 {
        write(&store, "others", 1_000).await;
    }
    write(&store, "orders", 1).await;
    let filter =
        Filter { topic: Some("orders".to_owned()), statuses: vec![Status::Pending], ..Filter::default() };
    let (mut found, mut pages, mut page) = (0, 0, ALL);
    loop {
        let paged = store.list(&filter, page).await.unwrap();
        (found, pages) = (found + paged.items.len(), pages + 1);
        let Some(next) = paged.next else { break };
        page.after = Some(next);
    }
    assert_eq!((found, pages), (1, 2), "a call looks at a bounded number");
}

#[tokio::test]
async fn a_flushed_store_says_that_it_is_gone() {
    let server = Server::start(&DURABLE);
    let store = server.store().await;
    let relay = relay(&store).await;
    redis::cmd("FLUSHALL").exec(&mut server.connection()).unwrap();
    let error = store.append(vec![order("1").into()]).await.unwrap_err();
    assert!(!error.is_transient() && error.to_string().contains("there is no store at"), "{error}");
    let beat = store::Beat {
        instance: relay.instance.clone(),
        lease: relay.lease,
        held: relay.held.clone(),
        take: true,
        rule: Arc::new(free),
    };
    store.beat(&beat).await.unwrap_err();
    // Started anew, it is another store.
    let anew = server.store().await;
    anew.append(vec![order("1").into()]).await.unwrap();
    assert_eq!(pending(&anew).await, 1);
}
