//! What a group does with messages, on a real store, a real broker and real endpoints.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod world;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::http::StatusCode;
use inbox::{CommandHandler, Condition, Group, Handler, HttpHandler};
use message::Message;
use store::{Inbox, InboxCounts, Page, Receipt};
use tokio::net::TcpListener;
use world::{Endpoint, GROUP, TOPIC, World, arrival, messages, ok, until};

fn http(endpoint: &Endpoint) -> Handler {
    Handler::Http(HttpHandler::new(&endpoint.url()).expect("a URL"))
}

const ALL: Page = Page { after: None, limit: 1000, newest_first: false };

#[tokio::test(flavor = "multi_thread")]
async fn of_64_parallel_deliveries_one_is_done_in_sql() {
    let world = World::new();
    let connection = rusqlite::Connection::open(world.store.path()).unwrap();
    connection.execute_batch("CREATE TABLE charges (id TEXT, amount INTEGER)").unwrap();
    let sql = "INSERT INTO charges VALUES (:id, json_extract(:payload, '$.amount'))";
    let group = Arc::new(world.group(Handler::Sql(sql.to_owned())));
    assert_eq!((group.name(), group.handler_kind()), (GROUP, "sql"));

    let message = Message::new(TOPIC, r#"{"amount": 100}"#);
    let receipts = deliver_64_times(&group, &message).await;
    assert_eq!(receipts.iter().filter(|receipt| **receipt == Receipt::Done).count(), 1);
    assert_eq!(receipts.iter().filter(|receipt| **receipt == Receipt::Duplicate).count(), 63);
    let effects: Vec<i64> = connection
        .prepare("SELECT amount FROM charges")
        .unwrap()
        .query_map([], |row| row.get(0))
        .unwrap()
        .collect::<Result<_, _>>()
        .unwrap();
    assert_eq!(effects, [100]);
}

#[tokio::test(flavor = "multi_thread")]
async fn of_64_parallel_deliveries_one_reaches_the_endpoint() {
    let world = World::new();
    let endpoint = Endpoint::new(|_, _| ok()).await;
    let group = Arc::new(world.group(http(&endpoint)));
    let message = Message::new(TOPIC, "{}");
    let receipts = deliver_64_times(&group, &message).await;
    assert_eq!(receipts.iter().filter(|receipt| **receipt == Receipt::Done).count(), 1);
    assert!(
        receipts.iter().all(|receipt| matches!(receipt, Receipt::Done | Receipt::Duplicate | Receipt::Busy))
    );
    assert_eq!(endpoint.requests().len(), 1);
    assert_eq!(group.process(vec![arrival(message)]).await.unwrap(), [Receipt::Duplicate]);
}

async fn deliver_64_times(group: &Arc<inbox::Group>, message: &Message) -> Vec<Receipt> {
    let deliveries = (0..64).map(|_| {
        let (group, message) = (Arc::clone(group), message.clone());
        tokio::spawn(async move { group.process(vec![arrival(message)]).await })
    });
    let mut receipts = Vec::new();
    for delivery in deliveries.collect::<Vec<_>>() {
        receipts.extend(delivery.await.expect("no panic").expect("a receipt"));
    }
    receipts
}

#[tokio::test]
async fn a_message_that_is_twice_in_a_batch_reaches_the_endpoint_once() {
    let world = World::new();
    let endpoint = Endpoint::new(|_, _| ok()).await;
    let group = world.group(http(&endpoint));
    let message = Message::new(TOPIC, "{}").key("k");
    let receipts = group.process(vec![arrival(message.clone()), arrival(message)]).await.unwrap();
    assert_eq!(receipts, [Receipt::Done, Receipt::Duplicate]);
    assert_eq!(endpoint.requests().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_endpoint_that_is_down_costs_no_message_an_attempt() {
    let world = World::new();
    // The port stays reserved while nobody listens on it, so that no other test can take it.
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = socket.local_addr().unwrap();
    let handler = HttpHandler::new(&format!("http://{address}/in")).unwrap();
    world.publish(&messages(4, 10)).await;
    let running = world.start(world.group(Handler::Http(handler)));

    until(|| async { matches!(running.status().condition, Condition::Paused { .. }) }).await;
    let received = running.status().received;
    until(|| async { running.status().received >= received + 3 }).await;
    let counts = world.counts().await;
    assert_eq!((counts.processed, counts.parked, counts.dead), (0, 0, 0));
    let Condition::Paused { error, .. } = running.status().condition else { panic!("not paused") };
    assert!(error.contains("cannot be reached"), "{error}");

    let endpoint = Endpoint::on(socket.listen(64).unwrap(), Arc::new(|_, _| ok()));
    world.processed(40).await;
    // The marks are there before the batch is counted.
    until(|| async { running.status().done == 40 }).await;
    until(|| async { running.status().condition == Condition::Running }).await;
    let status = running.status();
    assert_eq!((status.parked, status.dead), (0, 0));
    assert_eq!(endpoint.requests().len(), 40);
    running.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_endpoint_that_dies_under_its_requests_is_down_and_no_message_is_to_blame() {
    let world = World::new();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let handler = HttpHandler::new(&format!("http://{}/in", listener.local_addr().unwrap())).unwrap();
    let group = world.group(Handler::Http(handler));
    let dies = tokio::spawn(async move {
        let (connection, _) = listener.accept().await.unwrap();
        // The listener first, as when a process ends: descriptors are closed from the lowest.
        drop(listener);
        drop(connection);
    });
    let receipts = group.process(vec![arrival(Message::new(TOPIC, "{}"))]).await.unwrap();
    dies.await.unwrap();
    assert!(matches!(&receipts[..], [Receipt::Unavailable { .. }]), "{receipts:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_makes_its_endpoint_unavailable_is_put_aside_and_the_rest_goes_on() {
    let world = World::with_partitions(1);
    let endpoint = Endpoint::new(|_, request| match request.text().as_str() {
        "poison" => (StatusCode::BAD_GATEWAY, "not with this one".to_owned()),
        _ => ok(),
    })
    .await;
    let mut all = messages(50, 4);
    all.insert(5, Message::new(TOPIC, "poison").key("k5"));
    world.publish(&all).await;
    let running = world.start(world.group(http(&endpoint)));
    // All but those of its own key, which wait behind it.
    world.processed(196).await;
    // It is not tried for ever, and it no longer holds up the others meanwhile.
    until(|| async { world.counts().await.dead == 1 }).await;
    world.publish(&[Message::new(TOPIC, "later")]).await;
    world.processed(197).await;
    running.drain().await;
    let kept = world.store.parked(GROUP, ALL).await.unwrap().items;
    assert_eq!((kept.len(), kept[0].arrival.message.id), (5, all[5].id));
    assert!(kept[0].error.contains("not with this one"), "{}", kept[0].error);
    assert!(kept[1..].iter().all(|kept| kept.attempts == 0), "nobody else is to blame");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_endpoint_that_answers_all_messages_with_503_costs_no_attempt() {
    let world = World::with_partitions(1);
    let is_down = Arc::new(AtomicBool::new(true));
    let down = Arc::clone(&is_down);
    let endpoint = Endpoint::new(move |_, _| match down.load(Ordering::SeqCst) {
        true => (StatusCode::SERVICE_UNAVAILABLE, String::new()),
        false => ok(),
    })
    .await;
    let all = messages(20, 2);
    world.publish(&all).await;
    let running = world.start(world.group(http(&endpoint)));
    // The first is a suspect by then, and others are tried in its place.
    until(|| async { most_asked(&endpoint) >= 3 }).await;
    let asked = endpoint.requests().len();
    until(|| async { endpoint.requests().len() >= asked + 2 }).await;
    assert_eq!(world.counts().await, InboxCounts::default());
    is_down.store(false, Ordering::SeqCst);
    world.processed(40).await;
    running.drain().await;
    let counts = world.counts().await;
    assert_eq!((counts.parked, counts.dead), (0, 0));
}

/// How often the endpoint saw the message that it saw most often.
fn most_asked(endpoint: &Endpoint) -> usize {
    let mut asked: BTreeMap<String, usize> = BTreeMap::new();
    for request in endpoint.requests() {
        *asked.entry(request.header("postrider-message-id")).or_default() += 1;
    }
    asked.into_values().max().unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_the_endpoint_refuses_is_dead_and_the_rest_goes_on() {
    let world = World::new();
    let endpoint = Endpoint::new(|_, request| match request.text().as_str() {
        "poison" => (StatusCode::UNPROCESSABLE_ENTITY, "amount is missing".to_owned()),
        _ => ok(),
    })
    .await;
    let mut all = messages(50, 2);
    all.insert(30, Message::new(TOPIC, "poison"));
    world.publish(&all).await;
    let running = world.start(world.group(http(&endpoint)));
    world.processed(100).await;
    until(|| async { running.status().dead == 1 }).await;
    running.drain().await;

    let dead = world.store.parked(GROUP, ALL).await.unwrap().items;
    assert_eq!(dead.len(), 1);
    assert!(dead[0].dead && dead[0].arrival.message.id == all[30].id);
    assert!(
        dead[0].error.contains("422") && dead[0].error.contains("amount is missing"),
        "{}",
        dead[0].error
    );
    let poisoned = endpoint.requests().iter().filter(|request| request.text() == "poison").count();
    assert_eq!(poisoned, 1, "it is not tried again");
}

#[tokio::test(flavor = "multi_thread")]
async fn followers_of_a_message_that_failed_wait_and_come_in_order() {
    let world = World::new();
    let failures = AtomicUsize::new(0);
    let endpoint = Endpoint::new(move |_, request| {
        let first_of_k0 = request.header("postrider-key") == "k0" && request.text() == "0";
        if first_of_k0 && failures.fetch_add(1, Ordering::SeqCst) < 2 {
            return (StatusCode::INTERNAL_SERVER_ERROR, "not yet".to_owned());
        }
        ok()
    })
    .await;
    world.publish(&messages(3, 8)).await;
    let running = world.start(world.group(http(&endpoint)));
    world.processed(24).await;
    running.drain().await;

    let mut by_key: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for request in endpoint.requests() {
        by_key.entry(request.header("postrider-key")).or_default().push(request.text());
    }
    let in_order: Vec<_> = (0..8).map(|number| number.to_string()).collect();
    assert_eq!(by_key["k1"], in_order);
    assert_eq!(by_key["k2"], in_order);
    assert_eq!(by_key["k0"][..2], ["0", "0"], "two failures");
    assert_eq!(by_key["k0"][2..], in_order);
    assert_eq!(world.counts().await.parked, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_exit_code_of_a_command_decides() {
    let world = World::new();
    let script =
        r#"case "$(cat)" in dead) echo no such order >&2; exit 65;; later) exit 75;; *) exit 0;; esac"#;
    let group = world.group(Handler::Command(CommandHandler::new("sh", ["-c", script])));
    let arrivals = ["fine", "dead", "later", "fine"].map(|text| arrival(Message::new(TOPIC, text)));
    let receipts = group.process(arrivals.to_vec()).await.unwrap();
    assert_eq!((&receipts[0], &receipts[3]), (&Receipt::Done, &Receipt::Done));
    assert!(matches!(&receipts[1], Receipt::Dead { error } if error.contains("no such order")));
    assert!(matches!(&receipts[2], Receipt::Parked { error } if error.contains("75")));
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_stay_in_order_while_sixteen_messages_are_handled_at_once() {
    let world = World::new();
    let done: Arc<Mutex<BTreeMap<String, Vec<usize>>>> = Arc::default();
    let (at_once, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let handler = {
        let (done, at_once, most) = (Arc::clone(&done), Arc::clone(&at_once), Arc::clone(&most));
        Handler::closure(move |message: Message| {
            let (done, at_once, most) = (Arc::clone(&done), Arc::clone(&at_once), Arc::clone(&most));
            async move {
                most.fetch_max(at_once.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                // Work of uneven length, so that order does not come about by chance.
                tokio::time::sleep(Duration::from_micros(u64::from(message.id.0.as_bytes()[15]) * 20)).await;
                let number = std::str::from_utf8(&message.payload).unwrap().parse().unwrap();
                done.lock().unwrap().entry(message.key.unwrap()).or_default().push(number);
                at_once.fetch_sub(1, Ordering::SeqCst);
                Ok::<_, String>(())
            }
        })
    };
    world.publish(&messages(40, 15)).await;
    let running = world.start(world.group(handler));
    world.processed(600).await;
    running.drain().await;
    let expected: Vec<usize> = (0..15).collect();
    let done = done.lock().unwrap();
    assert_eq!(done.len(), 40);
    assert!(done.values().all(|numbers| *numbers == expected), "{done:?}");
    let most = most.load(Ordering::SeqCst);
    assert!((2..=16).contains(&most), "{most} at once");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_closure_that_panics_fails_its_message_only() {
    let world = World::new();
    let tries = Arc::new(AtomicUsize::new(0));
    let seen = Arc::clone(&tries);
    let handler = Handler::closure(move |message: Message| {
        let seen = Arc::clone(&seen);
        async move {
            let first = &message.payload[..] == b"odd" && seen.fetch_add(1, Ordering::SeqCst) == 0;
            assert!(!first, "an odd message");
            Ok::<_, String>(())
        }
    });
    let group = world.group(handler);
    let odd = arrival(Message::new(TOPIC, "odd"));
    let receipts = group.process(vec![odd, arrival(Message::new(TOPIC, "even"))]).await.unwrap();
    assert!(
        matches!(&receipts[0], Receipt::Parked { error } if error.contains("an odd message")),
        "{receipts:?}"
    );
    assert_eq!(receipts[1], Receipt::Done);
    let running = world.start(group);
    world.processed(2).await;
    running.drain().await;
    assert_eq!(tries.load(Ordering::SeqCst), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drained_consumer_leaves_nothing_for_the_next_one() {
    let world = World::new();
    world.publish(&messages(10, 10)).await;
    let first = world.start(world.group(Handler::Log));
    world.processed(100).await;
    first.drain().await;

    let second = world.start(world.group(Handler::Log));
    world.publish(&messages(1, 1)).await;
    world.processed(101).await;
    assert_eq!(second.status().received, 1);
    second.drain().await;
    assert_eq!(world.counts().await.duplicates, 0);
}

/// The payloads that came to a second consumer after the first died in the middle of its first message.
async fn handled_after_a_crash(promising: fn(&World, Handler) -> Group) -> Vec<String> {
    let world = World::with_partitions(1);
    let group = |handler| promising(&world, handler).lease(Duration::from_secs(1));
    let (begin, mut begun) = tokio::sync::mpsc::unbounded_channel();
    let process = tokio::runtime::Runtime::new().unwrap();
    let first = group(Handler::closure(move |message: Message| {
        let begin = begin.clone();
        async move {
            begin.send(message.id).expect("the test waits");
            std::future::pending::<Result<(), String>>().await
        }
    }));
    let first = {
        let _inside = process.enter();
        world.start(first)
    };
    world.publish(&[Message::new(TOPIC, "first").key("k")]).await;
    begun.recv().await.expect("the handler begins");
    process.shutdown_background();
    drop(first);

    let (note, mut seen) = tokio::sync::mpsc::unbounded_channel();
    let second = world.start(group(Handler::closure(move |message: Message| {
        note.send(String::from_utf8_lossy(&message.payload).into_owned()).expect("the test waits");
        async { Ok::<_, String>(()) }
    })));
    world.publish(&[Message::new(TOPIC, "second").key("k")]).await;
    let mut handled = Vec::new();
    while handled.last().is_none_or(|payload| payload != "second") {
        handled.push(seen.recv().await.expect("the consumer goes on"));
    }
    second.drain().await;
    handled
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_begun_at_most_once_is_not_begun_again_after_a_crash() {
    let once = handled_after_a_crash(|world, handler| world.group(handler).at_most_once()).await;
    assert_eq!(once, ["second"], "its broker had heard that it was taken");
    let never_again =
        handled_after_a_crash(|world, handler| world.fleeting_group(handler).at_most_once()).await;
    assert_eq!(never_again, ["second"], "without a memory just the same");
    assert_eq!(handled_after_a_crash(World::group).await, ["first", "second"], "others get it again");
    let tried = handled_after_a_crash(World::fleeting_group).await;
    assert_eq!(tried, ["first", "second"], "the broker hears of it when the handler has answered");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_that_remembers_nothing_tries_once_and_goes_on() {
    let world = World::with_partitions(1);
    let endpoint = Endpoint::new(|_, request| match request.text().as_str() {
        "never" => (StatusCode::BAD_REQUEST, "no".to_owned()),
        "not now" => (StatusCode::INTERNAL_SERVER_ERROR, "sorry".to_owned()),
        _ => ok(),
    })
    .await;
    let message = |payload: &'static str| Message::new(TOPIC, payload).key("k");
    for promising in
        [World::fleeting_group, |world: &World, handler| world.fleeting_group(handler).at_most_once()]
    {
        let before = endpoint.requests().len();
        let running = world.start(promising(&world, http(&endpoint)));
        let again = message("fine");
        world.publish(&[message("never"), message("not now"), again.clone(), again, message("last")]).await;
        until(|| async { running.status().done + running.status().lost == 5 }).await;
        let status = running.status();
        assert_eq!((status.done, status.lost, status.parked, status.dead), (3, 2, 0, 0));
        running.drain().await;
        let mut seen: Vec<_> = endpoint.requests()[before..].iter().map(world::Request::text).collect();
        seen.sort();
        assert_eq!(
            seen,
            ["fine", "fine", "last", "never", "not now"],
            "no second try, and what comes twice is done twice"
        );
    }
    assert_eq!(world.counts().await, InboxCounts::default(), "the store has heard of none of it");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_tried_once_waits_in_the_broker_while_its_handler_is_down() {
    let world = World::with_partitions(1);
    let down = Arc::new(AtomicBool::new(true));
    let is_down = Arc::clone(&down);
    let endpoint = Endpoint::new(move |_, _| match is_down.load(Ordering::SeqCst) {
        true => (StatusCode::SERVICE_UNAVAILABLE, String::new()),
        false => ok(),
    })
    .await;
    let running = world.start(world.fleeting_group(http(&endpoint)));
    world.publish(&messages(4, 5)).await;
    until(|| async { matches!(running.status().condition, Condition::Paused { .. }) }).await;
    down.store(false, Ordering::SeqCst);
    until(|| async { running.status().done == 20 }).await;
    assert_eq!((running.status().lost, running.status().condition), (0, Condition::Running));
    running.drain().await;
}

#[tokio::test]
async fn work_in_the_store_is_refused_by_an_inbox_that_remembers_nothing() {
    let world = World::new();
    let group = world.fleeting_group(Handler::Sql("SELECT 1".to_owned()));
    let error = group.process(vec![arrival(Message::new(TOPIC, "{}"))]).await.unwrap_err();
    assert!(error.to_string().contains("no store in which sql could work"), "{error}");
}
