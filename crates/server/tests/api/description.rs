//! The API description: complete, and true to what the listeners answer.

use std::collections::BTreeSet;

use axum::Router;
use axum::body::Body;
use axum::http::{Method, StatusCode};
use serde_json::Value;

use crate::service::{Service, call, request};

async fn described(router: &Router) -> Value {
    let answer = call(router, request(Method::GET, "/openapi.json", Body::empty())).await;
    assert_eq!(answer.status, StatusCode::OK);
    answer.json()
}

fn operations(description: &Value) -> BTreeSet<String> {
    let paths = description["paths"].as_object().expect("paths");
    paths
        .iter()
        .flat_map(|(path, methods)| {
            methods.as_object().expect("methods").keys().map(move |method| format!("{method} {path}"))
        })
        .collect()
}

#[tokio::test]
async fn every_endpoint_is_described() {
    let service = Service::start();
    let expected = [
        "post /api/messages/send",
        "post /api/messages/acknowledge",
        "get /api/messages/status/{id}",
        "get /api/messages",
        "get /api/messages/pending",
        "get /api/messages/consumer-group/{group}",
        "get /api/messages/unacknowledged/{group}",
        "delete /api/messages/{id}",
        "get /api/messages/health",
        "get /api/dead",
        "get /api/dead/{id}",
        "put /api/dead/{id}",
        "post /api/dead/{id}/requeue",
        "post /api/dead/{id}/discard",
        "post /api/dead/requeue",
        "post /api/dead/discard",
        "get /api/lanes",
        "put /api/lanes",
        "get /api/routes",
        "get /api/holds",
        "get /api/audit",
        "get /api/contract",
        "get /api/counts",
    ];
    let expected: BTreeSet<String> = expected.map(str::to_owned).into();
    assert_eq!(operations(&described(&service.producer).await), expected);
    let expected = [
        "get /api/consumer/processed/{group}",
        "get /api/consumer/parked/{group}",
        "post /api/consumer/parked/{group}/{id}/requeue",
        "post /api/consumer/parked/{group}/{id}/discard",
        "post /api/consumer/test-process",
        "get /api/consumer/health",
    ];
    let expected: BTreeSet<String> = expected.map(str::to_owned).into();
    assert_eq!(operations(&described(&service.consumer).await), expected);
}

#[tokio::test]
async fn every_reference_leads_somewhere_and_every_operation_is_explained() {
    let service = Service::start();
    for router in [&service.producer, &service.consumer] {
        let description = described(router).await;
        assert!(description["openapi"].as_str().is_some_and(|version| version.starts_with("3.")));
        check_references(&description, &description);
        for (path, methods) in description["paths"].as_object().expect("paths") {
            for (method, operation) in methods.as_object().expect("methods") {
                assert!(operation["summary"].is_string(), "{method} {path}");
                assert!(
                    operation["responses"].as_object().is_some_and(|all| !all.is_empty()),
                    "{method} {path}"
                );
                let named = operation["parameters"]
                    .as_array()
                    .into_iter()
                    .flatten()
                    .filter(|one| one["in"] == "path");
                assert_eq!(named.count(), path.matches('{').count(), "{method} {path}");
            }
        }
    }
}

fn check_references(whole: &Value, part: &Value) {
    match part {
        Value::Object(fields) => {
            if let Some(reference) = fields.get("$ref").and_then(Value::as_str) {
                let pointer = reference.strip_prefix('#').expect("a reference within the description");
                assert!(whole.pointer(pointer).is_some(), "{reference} leads nowhere");
            }
            fields.values().for_each(|field| check_references(whole, field));
        }
        Value::Array(items) => items.iter().for_each(|item| check_references(whole, item)),
        _ => {}
    }
}

#[tokio::test]
async fn an_answer_has_exactly_the_fields_that_are_described() {
    let service = Service::start();
    let id = service.sent(r#"{"topic":"user-events","message":1}"#).await;
    let shown = service.get(&format!("/api/messages/status/{id}")).await.json();
    let description = described(&service.producer).await;
    let schema = &description["components"]["schemas"]["MessageView"]["properties"];
    let keys = |value: &Value| -> BTreeSet<String> {
        value.as_object().expect("an object").keys().cloned().collect()
    };
    assert_eq!(keys(&shown), keys(schema));
}
