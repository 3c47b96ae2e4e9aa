//! The overview page and its stream.

use axum::body::Body;
use axum::http::{Method, StatusCode, header};
use futures::StreamExt;
use serde_json::Value;
use tower::ServiceExt;

use crate::service::{Service, request};

#[tokio::test]
async fn the_page_and_its_files_run_nothing_that_is_not_theirs() {
    let service = Service::start();
    for (path, media) in [
        ("/", "text/html; charset=utf-8"),
        ("/assets/overview.css", "text/css; charset=utf-8"),
        ("/assets/overview.js", "text/javascript; charset=utf-8"),
        ("/favicon.svg", "image/svg+xml"),
    ] {
        let answer = service.get(path).await;
        assert_eq!(answer.status, StatusCode::OK);
        assert_eq!(answer.headers[header::CONTENT_TYPE], media);
        let policy = answer.headers[header::CONTENT_SECURITY_POLICY].to_str().expect("text").to_owned();
        assert!(policy.starts_with("default-src 'none'") && !policy.contains("unsafe"), "{policy}");
        assert_eq!(answer.headers[header::X_CONTENT_TYPE_OPTIONS], "nosniff");
        assert!(answer.text.len() > 100);
    }
    let page = service.get("/").await.text;
    assert!(!page.contains("style=") && !page.contains("<style") && !page.contains(" on"), "inline code");
    let script = service.get("/assets/overview.js").await.text;
    assert!(!script.contains("innerHTML") && !script.contains("insertAdjacentHTML"), "markup from text");
}

async fn first_event(service: &Service) -> Value {
    let request = request(Method::GET, "/events", Body::empty());
    let response = service.producer.clone().oneshot(request).await.expect("an answer");
    assert_eq!(response.headers()[header::CONTENT_TYPE], "text/event-stream");
    let mut chunks = response.into_body().into_data_stream();
    let chunk = chunks.next().await.expect("an event").expect("bytes");
    let text = std::str::from_utf8(&chunk).expect("text");
    serde_json::from_str(text.strip_prefix("data: ").expect("data").trim()).expect("JSON")
}

#[tokio::test]
async fn the_stream_shows_counts_lanes_held_keys_and_dead_letters() {
    let service = Service::start();
    let id =
        service.dead(r#"{"topic":"order-events","message":"<script>alert(1)</script>","key":"7"}"#).await;
    let shown = first_event(&service).await;
    assert_eq!(shown["counts"]["dead"], 1);
    assert_eq!(shown["dead"][0]["messageId"], id);
    assert_eq!(shown["dead"][0]["payload"], "\"<script>alert(1)</script>\"");
    assert_eq!(shown["holds"][0]["key"], "7");
    assert_eq!(shown["components"][0]["name"], "relay");
    assert!(!shown["lanes"].as_array().expect("lanes").is_empty());
}

#[tokio::test]
async fn pages_share_one_question_to_the_store() {
    let service = Service::start();
    let shown = futures::future::join_all((0..20).map(|_| first_event(&service))).await;
    // The moment of the snapshot tells whether it was the same one.
    assert!(shown.iter().all(|one| one["at"] == shown[0]["at"]), "several snapshots were taken");
}
