//! Sending, and sending once.

use std::sync::{Arc, Mutex};

use admin::Express;
use axum::http::StatusCode;
use futures::future::join_all;
use message::Message;
use serde_json::json;

use crate::service::Service;

/// The documented call, as it stands.
const DOCUMENTED: &str = r#"{ "topic": "user-events", "message": "A user created an account", "consumerGroup": "default-consumer-group" }"#;

#[tokio::test]
async fn the_documented_call_is_taken_in_and_shown_as_it_was_sent() {
    let service = Service::start();
    let answer = service.send(DOCUMENTED).await;
    assert_eq!(answer.status, StatusCode::ACCEPTED);
    let sent = answer.json();
    assert_eq!(sent["status"], "Pending");
    let fields: Vec<_> = sent.as_object().expect("an object").keys().cloned().collect();
    assert_eq!(fields, ["messageId", "status"]);

    let id = sent["messageId"].as_str().expect("an id");
    let shown = service.get(&format!("/api/messages/status/{id}")).await;
    assert_eq!(shown.status, StatusCode::OK);
    let shown = shown.json();
    assert_eq!(shown["messageId"], id);
    assert_eq!(shown["payload"], "A user created an account");
    assert_eq!(shown["payloadEncoding"], "json");
    assert_eq!(shown["contentType"], "application/json");
    assert_eq!(shown["consumerGroups"], json!(["default-consumer-group"]));
    assert_eq!(
        shown["acknowledgements"],
        json!([{"consumerGroup": "default-consumer-group", "acknowledgedAt": null}])
    );
}

#[tokio::test]
async fn a_status_has_every_field_of_the_record() {
    let service = Service::start();
    let id = service
        .sent(r#"{"topic":"order-events","message":{"n":12345678901234567890.10},"type":"OrderPlaced","key":"7","headers":{"a":"b"}}"#)
        .await;
    let answer = service.get(&format!("/api/messages/status/{id}")).await;
    assert!(answer.text.contains(r#""payload":{"n":12345678901234567890.10}"#), "{}", answer.text);
    let shown = answer.json();
    for field in [
        "messageId",
        "type",
        "topic",
        "consumerGroups",
        "key",
        "payload",
        "payloadEncoding",
        "contentType",
        "headers",
        "occurredAt",
        "status",
        "attempts",
        "nextAttemptAt",
        "lockedUntil",
        "lastError",
        "sentAt",
        "deadReason",
        "seq",
        "writtenAt",
        "deliveryEpoch",
        "held",
        "acknowledgements",
    ] {
        assert!(shown.get(field).is_some(), "{field} is missing in {shown}");
    }
    assert_eq!(shown["type"], "OrderPlaced");
    assert_eq!(shown["key"], "7");
    assert_eq!(shown["headers"], json!({"a": "b"}));
}

#[tokio::test]
async fn a_key_repeats_its_answer_and_refuses_another_request() {
    let service = Service::start();
    let body = r#"{"topic":"order-events","message":{"order":12345}}"#;
    let first = service.send_once("order-12345-payment-1", body).await;
    let again = service
        .send_once("order-12345-payment-1", r#"{ "message" : {"order": 12345}, "topic": "order-events" }"#)
        .await;
    assert_eq!((first.status, &first.text), (again.status, &again.text));
    assert_eq!(first.status, StatusCode::ACCEPTED);

    let other = service
        .send_once("order-12345-payment-1", r#"{"topic":"order-events","message":{"order":12346}}"#)
        .await;
    assert_eq!(other.status, StatusCode::CONFLICT);
    assert_eq!(other.problem(), "idempotency-key-taken");
    assert_eq!(service.get("/api/messages/pending").await.json()["items"].as_array().map(Vec::len), Some(1));
}

#[tokio::test]
async fn fifty_parallel_sends_with_one_key_are_one_message() {
    let service = Service::start();
    let answers =
        join_all((0..50).map(|_| service.send_once("k", r#"{"topic":"user-events","message":1}"#))).await;
    for answer in &answers {
        assert_eq!((answer.status, &answer.text), (StatusCode::ACCEPTED, &answers[0].text));
    }
    assert_eq!(service.get("/api/counts").await.json()["pending"], 1);
}

#[tokio::test]
async fn a_chosen_id_is_taken_once() {
    let service = Service::start();
    let id = "019a8f6e-5c1d-7b33-9f00-2b6d0f1c4e55";
    let body = |message: u8| format!(r#"{{"topic":"user-events","message":{message},"messageId":"{id}"}}"#);
    assert_eq!(service.sent(&body(1)).await, id);
    assert_eq!(service.sent(&body(1)).await, id);
    let other = service.send(&body(2)).await;
    assert_eq!((other.status, other.problem().as_str()), (StatusCode::CONFLICT, "id-taken"));
    assert!(other.detail().contains(id));
}

#[tokio::test]
async fn equal_content_is_the_same_message_when_the_sender_says_so() {
    let service = Service::start();
    let one = service.sent(r#"{"topic":"user-events","message":{"a":1},"idFrom":"content"}"#).await;
    assert_eq!(one, service.sent(r#"{"topic":"user-events","message":{ "a": 1 },"idFrom":"content"}"#).await);
    assert_ne!(one, service.sent(r#"{"topic":"user-events","message":{"a":2},"idFrom":"content"}"#).await);
}

#[tokio::test]
async fn an_id_of_fields_needs_them() {
    let service = Service::start();
    let body = |fields: &str| {
        format!(r#"{{"topic":"order-events","message":{{"order":1,"pay":{{"try":2}}}},"idFrom":{fields}}}"#)
    };
    let id = service.sent(&body(r#"["order","pay.try"]"#)).await;
    assert_eq!(id, service.sent(&body(r#"["order","pay.try"]"#)).await);
    for fields in [r#"["order","pay.no"]"#, "[]"] {
        assert_eq!(service.send(&body(fields)).await.problem(), "bad-id-from");
    }
}

#[tokio::test]
async fn without_a_group_every_configured_group_of_the_topic_must_acknowledge() {
    let service = Service::start();
    let groups = async |topic: &str| {
        let id = service.sent(&format!(r#"{{"topic":"{topic}","message":1}}"#)).await;
        service.get(&format!("/api/messages/status/{id}")).await.json()["consumerGroups"].clone()
    };
    assert_eq!(groups("order-events").await, json!(["default-consumer-group"]));
    assert_eq!(groups("analytics-events").await, json!(["analytics-group"]));
    assert_eq!(groups("other-events").await, json!([]));
}

#[tokio::test]
async fn parallel_senders_all_get_their_own_message() {
    let service = Service::start();
    let answers = join_all((0..200).map(|n| {
        let body = format!(r#"{{"topic":"user-events","message":{n},"key":"k{}"}}"#, n % 7);
        let service = &service;
        async move { service.sent(&body).await }
    }))
    .await;
    let ids: std::collections::BTreeSet<_> = answers.into_iter().collect();
    assert_eq!(ids.len(), 200);
    assert_eq!(service.get("/api/counts").await.json()["pending"], 200);
}

/// A way past the store that has room for so many.
struct Narrow(Mutex<(usize, Vec<(String, Message)>)>);

impl Express for Narrow {
    fn send(&self, route: &str, message: Message) -> Result<(), String> {
        let (room, taken) = &mut *self.0.lock().expect("no panic");
        if taken.len() == *room {
            return Err("its queue is full".to_owned());
        }
        taken.push((route.to_owned(), message));
        Ok(())
    }
}

#[tokio::test]
async fn what_keeps_nothing_goes_past_the_store_and_says_so_and_says_when_it_cannot() {
    let narrow = Arc::new(Narrow(Mutex::new((1, Vec::new()))));
    let service = Service::at(|desk| desk.with_express(narrow.clone()));
    let taken = service.send(r#"{"topic":"clicks","message":1}"#).await;
    assert_eq!(taken.status, StatusCode::ACCEPTED);
    assert_eq!((&taken.json()["status"], &taken.json()["stored"]), (&json!("InFlight"), &json!(false)));
    let id = taken.json()["messageId"].as_str().expect("an id").to_owned();
    assert_eq!(service.get(&format!("/api/messages/status/{id}")).await.status, StatusCode::NOT_FOUND);
    let (route, message) = narrow.0.lock().expect("no panic").1[0].clone();
    assert_eq!((route.as_str(), message.id.to_string()), ("fleeting", id));

    let full = service.send(r#"{"topic":"clicks","message":2}"#).await;
    assert_eq!((full.status, full.problem().as_str()), (StatusCode::SERVICE_UNAVAILABLE, "not-taken"));
    assert!(full.detail().contains("its queue is full"), "{}", full.text);

    // What must happen once is remembered, so it is stored.
    let once = service.send_once("a-key", r#"{"topic":"clicks","message":3}"#).await;
    assert_eq!((once.status, &once.json()["status"]), (StatusCode::ACCEPTED, &json!("Pending")));
    let kept = service.sent(r#"{"topic":"user-events","message":4}"#).await;
    assert_eq!(service.get(&format!("/api/messages/status/{kept}")).await.status, StatusCode::OK);
}

#[tokio::test]
async fn a_schedule_is_kept_with_the_message_and_nonsense_is_refused() {
    let service = Service::start();
    let body = r#"{"topic":"user-events","message":1,"deliverAfter":"10m","expiresAfter":"1h 30m"}"#;
    let id = service.sent(body).await;
    let shown = service.get(&format!("/api/messages/status/{id}")).await.json();
    let time = |value: &serde_json::Value| {
        chrono::DateTime::parse_from_rfc3339(value.as_str().expect("a text")).expect("a time")
    };
    let happened = time(&shown["occurredAt"]);
    for (header, minutes) in [("postrider-deliver-at", 10), ("postrider-expires-at", 90)] {
        assert_eq!((time(&shown["headers"][header]) - happened).num_minutes(), minutes, "{shown}");
    }
    for (body, code, word) in [
        (r#"{"topic":"user-events","message":1,"deliverAfter":"soon"}"#, "bad-duration", "such as 30s"),
        (
            r#"{"topic":"user-events","message":1,"deliverAfter":"100000000days"}"#,
            "bad-duration",
            "100 years at most",
        ),
        (
            r#"{"topic":"user-events","message":1,"deliverAfter":"2h","expiresAfter":"1h"}"#,
            "bad-schedule",
            "expires before it may be sent",
        ),
        (r#"{"topic":"user-events","message":1,"priority":9}"#, "unknown-field", "priority"),
    ] {
        let refused = service.send(body).await;
        assert_eq!((refused.status, refused.problem().as_str()), (StatusCode::BAD_REQUEST, code));
        assert!(refused.detail().contains(word), "{}", refused.text);
    }
}
