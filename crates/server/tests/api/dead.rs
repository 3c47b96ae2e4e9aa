//! Dead letters by HTTP.

use axum::http::StatusCode;
use serde_json::json;

use crate::service::Service;

#[tokio::test]
async fn a_dead_letter_is_listed_and_shown_with_its_tries() {
    let service = Service::start();
    let id = service.dead(r#"{"topic":"order-events","message":{"n":1},"key":"7"}"#).await;
    let list = service.get("/api/dead?topic=order-events&key=7").await.json();
    assert_eq!(list["items"][0]["messageId"], id);
    assert_eq!(list["items"][0]["deadReason"], "MaxAttempts(10) exceeded");
    assert_eq!(service.get("/api/dead?topic=user-events").await.json()["items"], json!([]));

    let shown = service.get(&format!("/api/dead/{id}")).await.json();
    assert_eq!(shown["message"]["status"], "Dead");
    assert_eq!(shown["history"][0]["error"], "the topic does not exist");
    let holds = service.get("/api/holds").await.json();
    assert_eq!(
        holds["items"][0],
        json!({"topic": "order-events", "key": "7", "messageId": id, "status": "Dead"})
    );

    let alive = service.sent(r#"{"topic":"user-events","message":1}"#).await;
    let answer = service.get(&format!("/api/dead/{alive}")).await;
    assert_eq!((answer.status, answer.problem().as_str()), (StatusCode::CONFLICT, "not-dead"));
}

#[tokio::test]
async fn a_dead_letter_can_be_requeued_once() {
    let service = Service::start();
    let id = service.dead(r#"{"topic":"order-events","message":1}"#).await;
    let answer = service.post(&format!("/api/dead/{id}/requeue"), "").await;
    assert_eq!(answer.json(), json!({"messageId": id, "action": "requeued", "status": "Pending"}));
    let again = service.post(&format!("/api/dead/{id}/requeue"), "").await;
    assert_eq!((again.status, again.problem().as_str()), (StatusCode::CONFLICT, "not-dead"));
    let status = service.get(&format!("/api/messages/status/{id}")).await.json();
    assert_eq!((&status["status"], &status["deliveryEpoch"]), (&json!("Pending"), &json!(1)));
}

#[tokio::test]
async fn a_dead_letter_older_than_its_consumers_remember_is_requeued_only_by_those_who_mean_it() {
    let service = Service::start();
    let id = service.dead(r#"{"topic":"order-events","message":1}"#).await;
    let eight_days = 8 * 24 * 60 * 60 * 1_000;
    rusqlite::Connection::open(service.store.path())
        .and_then(|file| file.execute("UPDATE outbox_events SET written_at = written_at - ?1", [eight_days]))
        .expect("it grows old");
    let path = format!("/api/dead/{id}/requeue");
    let asked = service.post(&path, "").await;
    assert_eq!((asked.status, asked.problem().as_str()), (StatusCode::CONFLICT, "ids-forgotten"));
    assert!(asked.detail().contains("remembers for 7days"), "{}", asked.detail());
    let many = service.post("/api/dead/requeue", r#"{"all":true}"#).await.json();
    assert_eq!((&many["matched"], &many["done"]), (&json!(1), &json!(0)));
    assert_eq!(service.post(&format!("{path}?anyway=true"), "").await.status, StatusCode::OK);
}

#[tokio::test]
async fn a_dead_letter_can_be_mended_and_sent_again() {
    let service = Service::start();
    let id = service.dead(r#"{"topic":"order-events","message":{"price":-1}}"#).await;
    let path = format!("/api/dead/{id}");
    for (body, code) in [
        ("{}", "empty-edit"),
        (r#"{"payload":{"price":1},"header":{}}"#, "unknown-field"),
        (r#"{"payload":5,"payloadEncoding":"text"}"#, "wrong-type"),
        (r#"{"payload":"!","payloadEncoding":"base64"}"#, "wrong-type"),
        (r#"{"payload":1,"payloadEncoding":"rot13"}"#, "wrong-type"),
        (r#"{"headers":{"a b":"c"}}"#, "bad-header"),
    ] {
        assert_eq!(service.put(&path, body).await.problem(), code, "{body}");
    }
    let answer = service.put(&path, r#"{"payload":{"price":1},"headers":{"mended":"yes"}}"#).await;
    assert_eq!(answer.json(), json!({"messageId": id, "action": "edited", "status": "Pending"}));
    let status = service.get(&format!("/api/messages/status/{id}")).await.json();
    assert_eq!(status["payload"], json!({"price": 1}));
    assert_eq!(status["headers"], json!({"mended": "yes"}));
    let audit = service.get("/api/audit").await;
    assert_eq!(audit.json()["items"][0]["action"], "edit");
}

#[tokio::test]
async fn a_dead_letter_can_be_given_up() {
    let service = Service::start();
    let id = service.dead(r#"{"topic":"order-events","message":1}"#).await;
    let answer = service.post(&format!("/api/dead/{id}/discard"), "").await;
    assert_eq!(answer.json(), json!({"messageId": id, "action": "discarded", "status": null}));
    assert_eq!(service.get(&format!("/api/dead/{id}")).await.status, StatusCode::NOT_FOUND);
    assert_eq!(service.get("/api/audit").await.json()["items"][0]["action"], "discard");
}

#[tokio::test]
async fn many_are_mended_together_but_never_by_an_empty_request() {
    let service = Service::start();
    for n in 0..3 {
        service.sent(&format!(r#"{{"topic":"user-events","message":{n}}}"#)).await;
    }
    service.dead(r#"{"topic":"order-events","message":1}"#).await;
    assert_eq!(service.post("/api/dead/requeue", "{}").await.problem(), "which-messages");
    let rehearsal =
        service.post("/api/dead/requeue", r#"{"topic":"user-events","dryRun":true}"#).await.json();
    assert_eq!(rehearsal, json!({"matched": 3, "done": 0, "dryRun": true, "refused": []}));
    let done = service.post("/api/dead/requeue", r#"{"topic":"user-events"}"#).await.json();
    assert_eq!(done, json!({"matched": 3, "done": 3, "dryRun": false, "refused": []}));
    let rest = service.post("/api/dead/discard", r#"{"all":true}"#).await.json();
    assert_eq!((&rest["matched"], &rest["done"]), (&json!(1), &json!(1)));
    let counts = service.get("/api/counts").await.json();
    assert_eq!((&counts["pending"], &counts["dead"]), (&json!(3), &json!(0)));
}
