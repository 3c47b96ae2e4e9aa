//! The consumer's listener.

use axum::body::Body;
use axum::http::{Method, StatusCode};
use serde_json::json;

use crate::service::{self, Answer, Service, call, request};

async fn get(service: &Service, path: &str) -> Answer {
    call(&service.consumer, request(Method::GET, path, Body::empty())).await
}

async fn test(service: &Service, body: &str) -> Answer {
    call(&service.consumer, service::json(Method::POST, "/api/consumer/test-process", body.to_owned())).await
}

const ID: &str = "019a8f6e-5c1d-7b33-9f00-2b6d0f1c4e55";

#[tokio::test]
async fn a_message_tried_twice_is_done_once() {
    let service = Service::start();
    let body = format!(
        r#"{{"topic":"user-events","message":"hello","consumerGroup":"default-consumer-group","messageId":"{ID}"}}"#
    );
    let first = test(&service, &body).await;
    assert_eq!(first.status, StatusCode::OK, "{}", first.text);
    assert_eq!(first.json()["result"], "new");
    assert_eq!(test(&service, &body).await.json()["result"], "duplicate");

    let done = get(&service, "/api/consumer/processed/default-consumer-group").await;
    assert_eq!(done.status, StatusCode::OK);
    let items = done.json()["items"].as_array().cloned().expect("items");
    assert_eq!(items.len(), 1);
    assert_eq!(items[0]["messageId"], ID);
    assert_eq!(items[0]["topic"], "user-events");
}

#[tokio::test]
async fn a_handler_that_cannot_work_is_said_to_be_unavailable() {
    let service = Service::start();
    let body = r#"{"topic":"analytics-events","message":1,"consumerGroup":"analytics-group"}"#;
    let answer = test(&service, body).await;
    assert_eq!(answer.json()["result"], "unavailable");
    assert!(answer.detail().contains("no_such_table"), "{}", answer.text);
}

#[tokio::test]
async fn what_cannot_be_tried_is_refused_by_name() {
    let service = Service::start();
    for (body, status, code) in [
        (
            r#"{"topic":"user-events","message":1,"consumerGroup":"nobody"}"#,
            StatusCode::NOT_FOUND,
            "unknown-group",
        ),
        (r#"{"topic":"user-events","message":1}"#, StatusCode::BAD_REQUEST, "missing-field"),
        (
            r#"{"topic":"analytics-events","message":1,"consumerGroup":"default-consumer-group"}"#,
            StatusCode::BAD_REQUEST,
            "unknown-topic",
        ),
        (
            r#"{"topic":"user-events","message":1,"consumerGroup":"default-consumer-group","messageId":"x"}"#,
            StatusCode::BAD_REQUEST,
            "bad-id",
        ),
        (
            r#"{"topic":"user-events","message":1,"consumerGroup":"default-consumer-group","topik":1}"#,
            StatusCode::BAD_REQUEST,
            "unknown-field",
        ),
    ] {
        let answer = test(&service, body).await;
        assert_eq!((answer.status, answer.problem().as_str()), (status, code), "{body}");
    }
    let unknown = get(&service, "/api/consumer/processed/nobody").await;
    assert_eq!((unknown.status, unknown.problem().as_str()), (StatusCode::NOT_FOUND, "unknown-group"));
    assert_eq!(get(&service, "/api/consumer/parked/nobody").await.problem(), "unknown-group");
}

#[tokio::test]
async fn what_is_parked_can_be_seen_and_given_up() {
    use store::{Arrival, Handled, Inbox, InboxRules, Reservation};

    let service = Service::start();
    let rules = InboxRules {
        retry: message::RetryPolicy::default(),
        ordered: true,
        hold_dead: true,
        acknowledge: false,
    };
    let arrival = Arrival {
        message: message::Message::new("user-events", "{\"n\":1}").key("7"),
        seq: Some(3),
        delivery: 0,
    };
    let group = "default-consumer-group";
    let lease = std::time::Duration::from_secs(30);
    let reserved =
        service.store.reserve(group, vec![arrival.clone()], lease, &rules).await.expect("a reservation");
    let [Reservation::Granted(token)] = reserved[..] else { panic!("{reserved:?}") };
    let dead = Handled::Dead { error: "no such customer".into() };
    service.store.conclude(group, vec![(arrival.clone(), token, dead)], &rules).await.expect("a conclusion");

    let parked = get(&service, "/api/consumer/parked/default-consumer-group").await.json();
    let item = &parked["items"][0];
    assert_eq!(item["messageId"], arrival.message.id.to_string());
    assert_eq!(
        (&item["dead"], &item["lastError"], &item["payload"]),
        (&json!(true), &json!("no such customer"), &json!({"n": 1}))
    );

    let path = format!("/api/consumer/parked/{group}/{}/discard", arrival.message.id);
    let dropped = call(&service.consumer, request(Method::POST, &path, Body::empty())).await;
    assert_eq!(dropped.json()["action"], "discarded");
    let again = call(&service.consumer, request(Method::POST, &path, Body::empty())).await;
    assert_eq!(again.status, StatusCode::CONFLICT);
    let path = format!("/api/consumer/parked/{group}/{}/requeue", arrival.message.id);
    let gone = call(&service.consumer, request(Method::POST, &path, Body::empty())).await;
    assert_eq!(gone.status, StatusCode::CONFLICT);
}

#[tokio::test]
async fn health_has_the_store_and_every_part() {
    let health = get(&Service::start(), "/api/consumer/health").await;
    assert_eq!(health.status, StatusCode::OK);
    let names: Vec<_> = health.json()["components"]
        .as_array()
        .expect("components")
        .iter()
        .map(|component| component["name"].as_str().expect("a name").to_owned())
        .collect();
    assert_eq!(names, ["store", "relay"]);
}
