//! Lists, acknowledgements, deletion, health.

use std::collections::BTreeSet;

use axum::http::StatusCode;
use message::{MessageId, Secrets, prove};
use serde_json::{Value, json};
use server::Component;

use crate::service::Service;

fn ids(list: &Value) -> Vec<String> {
    let items = list["items"].as_array().expect("items");
    items.iter().map(|item| item["messageId"].as_str().expect("an id").to_owned()).collect()
}

#[tokio::test]
async fn pages_show_every_message_once_in_the_order_of_writing() {
    let service = Service::start();
    let mut sent = Vec::new();
    for n in 0..25 {
        sent.push(service.sent(&format!(r#"{{"topic":"user-events","message":{n}}}"#)).await);
    }
    let (mut seen, mut path) = (Vec::new(), "/api/messages/pending?limit=10".to_owned());
    loop {
        let page = service.get(&path).await.json();
        assert!(ids(&page).len() <= 10);
        seen.extend(ids(&page));
        let Some(next) = page["next"].as_str() else { break };
        path = format!("/api/messages/pending?limit=10&after={next}");
    }
    assert_eq!(seen, sent);
    let newest =
        service.get("/api/messages?newestFirst=true&limit=1&status=Pending,Failed&topic=user-events").await;
    assert_eq!(ids(&newest.json()), [sent[24].clone()]);
}

#[tokio::test]
async fn pending_shows_what_is_in_flight_with_its_status_and_not_what_is_sent() {
    let service = Service::start();
    service.sent(r#"{"topic":"user-events","message":1}"#).await;
    service.deliver().await;
    let waiting = service.sent(r#"{"topic":"user-events","message":2}"#).await;
    let batches = service.claim().await;
    assert_eq!(batches.len(), 1);
    let late = service.sent(r#"{"topic":"user-events","message":3}"#).await;
    let list = service.get("/api/messages/pending").await.json();
    assert_eq!(ids(&list), [waiting, late]);
    assert_eq!(list["items"][0]["status"], "InFlight");
    assert!(list["items"][0]["lockedUntil"].is_string());
    assert_eq!(list["items"][1]["status"], "Pending");
}

#[tokio::test]
async fn a_group_sees_its_messages_and_those_it_has_not_acknowledged() {
    let service = Service::start();
    let mine = service.sent(r#"{"topic":"user-events","message":1}"#).await;
    service.sent(r#"{"topic":"analytics-events","message":2}"#).await;
    let list = service.get("/api/messages/consumer-group/default-consumer-group").await.json();
    assert_eq!(ids(&list), std::slice::from_ref(&mine));
    service.deliver().await;
    let path = "/api/messages/unacknowledged/default-consumer-group";
    assert!(ids(&service.get(path).await.json()).contains(&mine));

    let body = json!({"messageId": mine, "consumerGroup": "default-consumer-group"}).to_string();
    let first = service.post("/api/messages/acknowledge", body.clone()).await;
    assert_eq!(first.status, StatusCode::OK, "{}", first.text);
    let again = service.post("/api/messages/acknowledge", body).await;
    assert_eq!((again.status, &again.text), (first.status, &first.text));
    assert!(!ids(&service.get(path).await.json()).contains(&mine));
    let status = service.get(&format!("/api/messages/status/{mine}")).await.json();
    assert!(status["acknowledgements"][0]["acknowledgedAt"].is_string());

    let unknown = service.get("/api/messages/consumer-group/nobody").await;
    assert_eq!((unknown.status, unknown.problem().as_str()), (StatusCode::NOT_FOUND, "unknown-group"));
    assert!(unknown.detail().contains("`default-consumer-group`, `analytics-group`"));
}

#[tokio::test]
async fn only_what_was_sent_can_be_acknowledged_and_only_by_those_who_were_asked() {
    let service = Service::start();
    let id = service.sent(r#"{"topic":"user-events","message":1}"#).await;
    let acknowledge = async |id: &str, group: &str| {
        let body = json!({"messageId": id, "consumerGroup": group}).to_string();
        service.post("/api/messages/acknowledge", body).await
    };
    let early = acknowledge(&id, "default-consumer-group").await;
    assert_eq!((early.status, early.problem().as_str()), (StatusCode::CONFLICT, "not-sent"));
    service.deliver().await;
    let foreign = acknowledge(&id, "analytics-group").await;
    assert_eq!((foreign.status, foreign.problem().as_str()), (StatusCode::CONFLICT, "group-not-asked"));
    let unknown = acknowledge("019a8f6e-5c1d-7b33-9f00-2b6d0f1c4e55", "default-consumer-group").await;
    assert_eq!((unknown.status, unknown.problem().as_str()), (StatusCode::NOT_FOUND, "unknown-message"));
    assert_eq!(acknowledge("x", "default-consumer-group").await.problem(), "bad-id");
    assert_eq!(acknowledge(&id, "a b").await.problem(), "bad-group");
}

#[tokio::test]
async fn with_secrets_only_who_received_a_message_can_acknowledge_it() {
    let secrets = Secrets::new(&["a secret of this test"]).expect("long enough").expect("there is one");
    let other = Secrets::new(&["a secret of somebody else"]).expect("long enough").expect("there is one");
    let service = Service::at(|desk| desk.with_secrets(Some(secrets.clone())));
    let id = service.sent(r#"{"topic":"user-events","message":1}"#).await;
    let message: MessageId = id.parse().expect("an id");
    service.deliver().await;
    let group = "default-consumer-group";
    let acknowledge = async |proof: Option<&str>| {
        let mut body = json!({"messageId": id, "consumerGroup": group});
        if let Some(proof) = proof {
            body["proof"] = proof.into();
        }
        service.post("/api/messages/acknowledge", body.to_string()).await
    };
    let plain = acknowledge(None).await;
    assert_eq!((plain.status, plain.problem().as_str()), (StatusCode::FORBIDDEN, "no-proof"));
    for forged in 0..1_000_u32 {
        // Made up, of another secret, for another message, and for another group, in turn.
        let proof = match forged % 4 {
            0 => format!("0.{forged:032x}"),
            1 => prove(&other.capability(message, forged), group).expect("a capability"),
            2 => prove(&secrets.capability(MessageId::new(), 0), group).expect("a capability"),
            _ => prove(&secrets.capability(message, 0), "analytics-group").expect("a capability"),
        };
        let refused = acknowledge(Some(&proof)).await;
        assert_eq!((refused.status, refused.problem().as_str()), (StatusCode::FORBIDDEN, "bad-proof"));
    }
    let status = service.get(&format!("/api/messages/status/{id}")).await.json();
    assert!(status["acknowledgements"][0]["acknowledgedAt"].is_null());
    let proof = prove(&secrets.capability(message, 0), group).expect("a capability");
    assert_eq!(acknowledge(Some(&proof)).await.status, StatusCode::OK);
    assert_eq!(acknowledge(Some(&proof)).await.status, StatusCode::OK, "and again");
}

#[tokio::test]
async fn a_record_can_be_deleted_unless_it_is_in_flight() {
    let service = Service::start();
    let gone = service.sent(r#"{"topic":"user-events","message":1}"#).await;
    let answer = service.delete(&format!("/api/messages/{gone}")).await;
    assert_eq!(answer.status, StatusCode::OK);
    assert_eq!(answer.json(), json!({"messageId": gone, "action": "deleted", "status": null}));
    assert_eq!(service.delete(&format!("/api/messages/{gone}")).await.status, StatusCode::NOT_FOUND);
    let audit = service.get("/api/audit").await.json();
    assert_eq!(audit["items"][0]["actor"], "api");
    assert_eq!(audit["items"][0]["action"], "delete");
    assert_eq!(audit["items"][0]["messageId"], gone);

    let held = service.sent(r#"{"topic":"user-events","message":2}"#).await;
    service.claim().await;
    let answer = service.delete(&format!("/api/messages/{held}")).await;
    assert_eq!((answer.status, answer.problem().as_str()), (StatusCode::CONFLICT, "in-flight"));
}

#[tokio::test]
async fn lanes_can_be_seen_and_their_number_asked_for() {
    let service = Service::start();
    let lanes = service.get("/api/lanes").await.json();
    let count = lanes["count"].as_u64().expect("a count");
    assert_eq!(lanes["lanes"].as_array().map(Vec::len), usize::try_from(count).ok());
    let answer = service.put("/api/lanes", r#"{"count":4}"#).await;
    assert_eq!(answer.json(), json!({"count": 4, "inForce": true}));
    assert_eq!(service.get("/api/lanes").await.json()["count"], 4);
    for body in [r#"{"count":3}"#, r#"{"count":2048}"#, r#"{"count":0}"#] {
        assert_eq!(service.put("/api/lanes", body).await.problem(), "bad-lanes", "{body}");
    }
    assert_eq!(service.put("/api/lanes", r#"{"count":"4"}"#).await.problem(), "wrong-type");
}

#[tokio::test]
async fn what_is_promised_is_answered_for_each_route() {
    let contract = Service::start().get("/api/contract").await.json();
    assert_eq!(contract["routes"][0]["name"], "default");
    assert_eq!(contract["routes"][0]["semantics"], "effectively-once");
    assert!(
        contract["routes"][0]["promises"][0].as_str().is_some_and(|text| text.contains("stays in the store"))
    );
}

#[tokio::test]
async fn routes_and_consumers_are_shown_as_configured() {
    let routes = Service::start().get("/api/routes").await.json();
    assert_eq!(routes["routes"][0]["topics"], json!(["*-events"]));
    assert_eq!(routes["routes"][0]["semantics"], "effectively-once");
    assert_eq!(routes["routes"][0]["retry"]["maxAttempts"], 10);
    let groups: BTreeSet<_> =
        routes["consumers"].as_array().expect("a list").iter().map(|c| c["group"].as_str()).collect();
    assert_eq!(groups, BTreeSet::from([Some("analytics-group"), Some("default-consumer-group")]));
}

#[tokio::test]
async fn health_says_what_is_wrong() {
    let well = Service::start().get("/api/messages/health").await;
    assert_eq!(well.status, StatusCode::OK);
    assert_eq!(well.json()["status"], "ok");
    assert_eq!(well.json()["components"][0], json!({"name": "store", "ok": true, "detail": "answers"}));

    let detail = "broker main: the disk is full";
    let service =
        Service::with(vec![Component { name: "broker main".into(), ok: false, detail: detail.into() }]);
    let ill = service.get("/api/messages/health").await;
    assert_eq!(ill.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(ill.json()["status"], "failing");
    assert_eq!(ill.json()["components"][1]["detail"], detail);
}
