//! Groups whose work is messages, on a real Kafka.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod kafka_place;
mod world;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use axum::http::StatusCode;
use inbox::{CommandHandler, Condition, HttpHandler, Maker};
use kafka_place::{GROUP, Place, bill, billing, number, shared};
use message::Message;
use world::{Endpoint, until};

#[tokio::test(flavor = "multi_thread")]
async fn each_order_has_one_bill_and_those_of_a_key_are_in_order() {
    let place = Place::new(4);
    place.order(0..500).await;
    let running = place.start(billing());
    place.check(500).await;
    until(|| async { running.status().done == 500 }).await;
    assert_eq!(running.status().condition, Condition::Running);
    running.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn members_come_and_go_and_each_order_has_one_bill() {
    let place = Place::new(6);
    place.order(0..200).await;
    let first = place.start(billing());
    place.read("bills", 50).await;
    let second = place.start(billing());
    place.order(200..400).await;
    place.read("bills", 300).await;
    first.drain().await;
    place.order(400..600).await;
    place.check(600).await;
    until(|| async { second.status().done > 0 }).await;
    second.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_fails_is_asked_again_and_holds_its_partition_only() {
    let place = Place::new(4);
    let (fails, asked) = (shared::<AtomicBool>(), shared::<AtomicUsize>());
    fails.0.store(true, Ordering::SeqCst);
    let maker = Maker::closure(move |order: Message| {
        let failing = number(&order) == 0 && fails.1.load(Ordering::SeqCst);
        let asked = std::sync::Arc::clone(&asked.1);
        async move {
            if number(&order) == 0 {
                asked.fetch_add(1, Ordering::SeqCst);
            }
            if failing { Err("not yet") } else { Ok(vec![bill(&order)]) }
        }
    });
    place.order(0..100).await;
    // More tries than there is time for, however slow the machine.
    let running = place.start_trying(maker, 10_000);
    // Others pass while it waits.
    place.read("bills", 1).await;
    until(|| async { asked.0.load(Ordering::SeqCst) >= 2 }).await;
    let is_told = |condition: &Condition| {
        matches!(condition, Condition::Paused { error, .. }
            if error.contains("holds its partition") && error.contains("not yet"))
    };
    until(|| async { is_told(&running.status().condition) }).await;
    fails.0.store(false, Ordering::SeqCst);
    place.check(100).await;
    until(|| async { running.status().condition == Condition::Running }).await;
    running.drain().await;
    assert_eq!(place.count("billing-dead").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_given_up_is_a_dead_letter_with_the_reason_and_the_rest_goes_on() {
    let place = Place::new(2);
    let maker = Maker::closure(|order: Message| async move {
        if number(&order) == 5 { Err("no such customer") } else { Ok(vec![bill(&order)]) }
    });
    place.order(0..50).await;
    let running = place.start(maker);
    let dead = place.read("billing-dead", 1).await.remove(0);
    assert_eq!((number(&dead), dead.key.as_deref()), (5, Some("k5")));
    assert_eq!(dead.headers["dead-reason"], "no such customer");
    assert_eq!((dead.headers["dead-topic"].as_str(), dead.headers["dead-group"].as_str()), ("orders", GROUP));
    assert_eq!(dead.headers["dead-attempts"], "3");
    assert_eq!(place.read("bills", 49).await.len(), 49);
    until(|| async { running.status().dead == 1 && running.status().done == 49 }).await;
    running.drain().await;
    assert_eq!((place.count("bills").await, place.count("billing-dead").await), (49, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_sent_makes_a_dead_letter_of_what_it_was_made_of() {
    let place = Place::new(1);
    let maker = Maker::closure(|order: Message| async move {
        let large = Message::new("bills", vec![b'x'; 2_000_000]);
        Ok::<_, String>(if number(&order) == 1 { vec![bill(&order), large] } else { vec![bill(&order)] })
    });
    place.order(0..3).await;
    let running = place.start(maker);
    let dead = place.read("billing-dead", 1).await.remove(0);
    assert!(
        dead.headers["dead-reason"].contains("cannot be sent: the payload has 2000000 bytes"),
        "{dead:?}"
    );
    let bills: Vec<i64> = place.read("bills", 2).await.iter().map(number).collect();
    assert_eq!(bills, [0, 2], "none of what was made with it");
    running.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_that_is_too_large_for_its_topic_goes_without_what_is_too_large() {
    let place = Place::new(1);
    place.make_small("billing-dead", 4_000).await;
    let large = Message::new("orders", vec![b'x'; 100_000]).key("k1").header("a", "b");
    let mut heavy = Message::new("orders", "x").key("k2").kind("paid");
    heavy.headers.insert("long".to_owned(), "x".repeat(10_000));
    place.order(0..1).await;
    place.publish(large.clone()).await;
    place.publish(heavy.clone()).await;
    place.order(1..50).await;
    let maker = Maker::closure(|order: Message| async move {
        if order.payload.starts_with(b"x") { Err("no number") } else { Ok(vec![bill(&order)]) }
    });
    let running = place.start(maker);
    let dead = place.read("billing-dead", 2).await;
    let (without_payload, bare) = (&dead[0], &dead[1]);
    assert_eq!((without_payload.id, without_payload.key.as_deref()), (large.id, Some("k1")));
    assert!(without_payload.payload.is_empty());
    let said = |letter: &Message, name: &str| letter.headers.get(name).cloned().unwrap_or_default();
    assert_eq!(said(without_payload, "dead-payload"), "left out, 100000 bytes");
    assert_eq!(said(without_payload, "dead-reason"), "no number");
    assert_eq!(
        ["a", "dead-topic", "dead-partition", "dead-offset"].map(|name| said(without_payload, name)),
        ["b", "orders", "0", "1"]
    );
    assert_eq!((bare.id, bare.key.as_deref()), (heavy.id, Some("k2")));
    assert_eq!(said(bare, "dead-headers"), "left out, 10004 bytes");
    assert_eq!(said(bare, "dead-offset"), "2");
    assert_eq!(place.read("bills", 50).await.len(), 50);
    until(|| async { running.status().dead == 2 && running.status().done == 50 }).await;
    running.drain().await;
    assert_eq!(place.count("billing-dead").await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_endpoint_answers_with_messages() {
    let place = Place::new(2);
    let endpoint = Endpoint::new(|_, request| match request.text().as_str() {
        "0" => (StatusCode::NO_CONTENT, String::new()),
        "1" => (StatusCode::OK, "billed".to_owned()),
        order => {
            let bill = format!(r#"{{"topic":"bills","key":"k","message":{order},"headers":{{"a":"b"}}}}"#);
            (StatusCode::OK, format!(r#"{{"messages":[{bill},{bill}]}}"#))
        }
    })
    .await;
    place.order(0..3).await;
    let running = place.start(Maker::http(HttpHandler::new(&endpoint.url()).unwrap()));
    let bills = place.read("bills", 2).await;
    assert_eq!((number(&bills[0]), bills[0].headers["a"].as_str()), (2, "b"));
    assert_ne!(bills[0].id, bills[1].id);
    let dead = place.read("billing-dead", 1).await.remove(0);
    assert!(dead.headers["dead-reason"].contains("the answer is not messages (expected value"), "{dead:?}");
    assert_eq!(
        endpoint.requests().iter().filter(|request| request.text() == "1").count(),
        3,
        "it was asked again"
    );
    running.drain().await;
    assert_eq!(place.count("bills").await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_endpoint_that_is_down_costs_no_attempt() {
    let place = Place::new(2);
    // The port stays reserved while nobody listens on it, so that no other test can take it.
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let url = format!("http://{}/in", socket.local_addr().unwrap());
    place.order(0..20).await;
    let running = place.start(Maker::http(HttpHandler::new(&url).unwrap()));
    until(|| async { matches!(running.status().condition, Condition::Paused { .. }) }).await;
    let answer = |_: usize, request: &world::Request| {
        let (key, order) = (request.header("postrider-key"), request.text());
        let bill = format!(r#"{{"topic":"bills","key":"{key}","message":{order}}}"#);
        (StatusCode::OK, format!(r#"{{"messages":[{bill}]}}"#))
    };
    let _endpoint = Endpoint::on(socket.listen(64).unwrap(), std::sync::Arc::new(answer));
    place.check(20).await;
    until(|| async { running.status().condition == Condition::Running }).await;
    assert_eq!(running.status().dead, 0);
    running.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_writes_a_message_a_line() {
    let place = Place::new(1);
    let script = r#"order=$(cat); test "$order" = 1 && exit 65
        echo "{\"topic\":\"bills\",\"key\":\"$POSTRIDER_KEY\",\"message\":$order}"; echo"#;
    place.order(0..3).await;
    let running = place.start(Maker::command(CommandHandler::new("sh", ["-c", script])));
    let bills: Vec<i64> = place.read("bills", 2).await.iter().map(number).collect();
    assert_eq!(bills, [0, 2]);
    let dead = place.read("billing-dead", 1).await.remove(0);
    assert_eq!(dead.headers["dead-reason"], "`sh` ended with code 65");
    running.drain().await;
}
