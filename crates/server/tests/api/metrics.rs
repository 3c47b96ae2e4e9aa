//! What a scrape reads.

use axum::body::Body;
use axum::http::{Method, header};
use store::Verdict;

use crate::service::{Service, call, json, request};

fn value(text: &str, name: &str) -> f64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("{name} is missing in\n{text}")).parse().expect("a number")
}

#[tokio::test]
async fn the_outbox_is_measured_under_the_names_that_were_asked_for() {
    let service = Service::start();
    service.sent(r#"{"topic":"user-events","message":1}"#).await;
    service.deliver().await;
    service.sent(r#"{"topic":"order-events","message":2}"#).await;
    service.sent(r#"{"topic":"user-events","message":3}"#).await;
    service
        .settle(|topic| match topic {
            "order-events" => Verdict::Failed {
                error: "refused".into(),
                retry_after: std::time::Duration::from_secs(60),
                hold: false,
            },
            _ => Verdict::Dead { reason: "poison".into(), error: "bad".into(), attempted: true, hold: false },
        })
        .await;
    service.sent(r#"{"topic":"user-events","message":4}"#).await;

    let answer = service.get("/metrics").await;
    assert_eq!(answer.headers[header::CONTENT_TYPE], "text/plain; version=0.0.4; charset=utf-8");
    let text = &answer.text;
    assert_eq!(value(text, "outbox_pending_count"), 2.0);
    assert!(value(text, "outbox_oldest_age") >= 0.0);
    assert_eq!(value(text, "outbox_publish_success_total"), 1.0);
    assert_eq!(value(text, "outbox_publish_failure_total"), 2.0);
    assert_eq!(value(text, "outbox_dead_total"), 1.0);
    assert_eq!(value(text, "outbox_lost_total{route=\"fleeting\"}"), 3.0);
    assert_eq!(value(text, "outbox_overdue{group=\"analytics\"}"), 7.0);
    assert_eq!(value(text, "outbox_unprocessed{group=\"analytics\"}"), 2.0);
    assert_eq!(value(text, "outbox_redelivered_total{group=\"analytics\"}"), 9.0);
    assert_eq!(value(text, "outbox_transactions_total{broker=\"kafka\",end=\"committed\"}"), 5.0);
    assert_eq!(value(text, "outbox_transactions_total{broker=\"kafka\",end=\"rolled_back\"}"), 1.0);
    assert_eq!(value(text, "outbox_transaction_seconds_count{broker=\"kafka\"}"), 1.0);
    assert_eq!(value(text, "outbox_route_total{route=\"orders\"}"), 40.0);
    assert_eq!(value(text, "outbox_route_flow{route=\"orders\"}"), 2.5);
    assert_eq!(value(text, "outbox_route_flow_usual{route=\"orders\"}"), 8.0);
    assert_eq!(value(text, "outbox_route_flow_dropped{route=\"orders\"}"), 1.0);
    assert_eq!(value(text, "outbox_route_total{route=\"users\"}"), 40.0);
    assert!(!text.contains("outbox_route_flow_dropped{route=\"users\"}"), "nobody watches it");
    assert_eq!(value(text, "outbox_write_to_sent_seconds_count"), 1.0);
    assert_eq!(value(text, "outbox_write_to_sent_seconds_bucket{le=\"+Inf\"}"), 1.0);
    assert_eq!(value(text, "outbox_sent_to_acknowledged_seconds_count"), 0.0);
    for name in [
        "outbox_pending_count gauge",
        "outbox_oldest_age gauge",
        "outbox_publish_success_total counter",
        "outbox_publish_failure_total counter",
        "outbox_dead_total counter",
        "outbox_write_to_sent_seconds histogram",
        "outbox_sent_to_acknowledged_seconds histogram",
    ] {
        assert!(text.contains(&format!("# TYPE {name}\n")), "{name}");
    }
    assert_buckets_rise(text, "outbox_write_to_sent_seconds_bucket");
}

fn assert_buckets_rise(text: &str, name: &str) {
    let counts: Vec<u64> = text
        .lines()
        .filter(|line| line.starts_with(name))
        .map(|line| line.rsplit(' ').next().and_then(|count| count.parse().ok()).expect("a count"))
        .collect();
    assert_eq!(counts.len(), store::Latency::BOUNDS.len() + 1);
    assert!(counts.is_sorted(), "{counts:?}");
}

#[tokio::test]
async fn inboxes_are_measured_by_group() {
    let service = Service::start();
    let body = r#"{"topic":"user-events","message":1,"consumerGroup":"default-consumer-group","messageId":"019a8f6e-5c1d-7b33-9f00-2b6d0f1c4e55"}"#;
    for _ in 0..3 {
        call(&service.consumer, json(Method::POST, "/api/consumer/test-process", body)).await;
    }
    let text = call(&service.consumer, request(Method::GET, "/metrics", Body::empty())).await.text;
    assert_eq!(value(&text, "inbox_processed_total{group=\"default-consumer-group\"}"), 1.0);
    assert_eq!(value(&text, "inbox_duplicates_total{group=\"default-consumer-group\"}"), 2.0);
    assert_eq!(value(&text, "inbox_parked{group=\"analytics-group\"}"), 0.0);
    assert_eq!(value(&text, "inbox_dead{group=\"analytics-group\"}"), 0.0);
    assert_eq!(value(&text, "inbox_dead_letters_total{group=\"billing\"}"), 2.0);
    assert_eq!(
        value(&text, "inbox_ids{group=\"default-consumer-group\"}"),
        1.0,
        "duplicates are not kept twice"
    );
    assert!(value(&text, "inbox_ids_bytes{group=\"default-consumer-group\"}") > 16.0);
    assert_eq!(value(&text, "inbox_ids{group=\"analytics-group\"}"), 0.0);
    // The handlers of this service write to the log: question and mark are one call, three times.
    let labels = "group=\"default-consumer-group\",step=\"process\"";
    assert_eq!(value(&text, &format!("inbox_deduplication_seconds_count{{{labels}}}")), 3.0);
    assert!(value(&text, &format!("inbox_deduplication_seconds_sum{{{labels}}}")) > 0.0);
    assert_eq!(value(&text, &format!("inbox_deduplication_seconds_bucket{{{labels},le=\"+Inf\"}}")), 3.0);
    assert!(text.contains("# TYPE inbox_deduplication_seconds histogram\n"), "{text}");
}
