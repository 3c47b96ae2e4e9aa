//! Bad input of every kind: a clear problem, and nothing stored.

use axum::body::Body;
use axum::http::{Method, StatusCode, header};

use crate::service::{BODY_LIMIT, Service, call, json, request};

#[tokio::test]
async fn what_cannot_be_sent_is_refused_by_name() {
    let service = Service::start();
    let cases: &[(&str, &str, &str)] = &[
        ("", "bad-json", "no body"),
        ("{", "bad-json", "not valid JSON"),
        ("[]", "bad-json", "must be a JSON object, not a list"),
        ("\"x\"", "bad-json", "must be a JSON object, not a string"),
        ("null", "bad-json", "must be a JSON object, not null"),
        ("{'topic':'a'}", "bad-json", "not valid JSON"),
        (r#"{"topic":"user-events","message":1} trailing"#, "bad-json", "not valid JSON"),
        (r#"{"message":1}"#, "missing-field", "`topic` is missing"),
        (r#"{"topic":"user-events"}"#, "missing-field", "`message` is missing"),
        (r#"{"topic":null,"message":1}"#, "missing-field", "`topic` is missing"),
        (r#"{"topic":"user-events","message":null}"#, "wrong-type", "`message` must be"),
        (r#"{"topic":7,"message":1}"#, "wrong-type", "`topic` must be a string; it is a number"),
        (
            r#"{"topic":"user-events","message":1,"key":{}}"#,
            "wrong-type",
            "`key` must be a string; it is an object",
        ),
        (
            r#"{"topic":"user-events","message":1,"headers":{"a":1}}"#,
            "wrong-type",
            "whose values are strings",
        ),
        (r#"{"topic":"user-events","message":1,"headers":[]}"#, "wrong-type", "it is a list"),
        (r#"{"topic":"user-events","message":1,"idFrom":5}"#, "wrong-type", "\"content\" or a list"),
        (r#"{"topic":"user-events","mesage":1}"#, "unknown-field", "did you mean `message`?"),
        (
            r#"{"topic":"user-events","message":1,"consumergroup":"x"}"#,
            "unknown-field",
            "did you mean `consumerGroup`?",
        ),
        (r#"{"topic":"user-events","message":1,"message":2}"#, "repeated-field", "`message` is given twice"),
        (r#"{"topic":"no-route","message":1}"#, "unknown-topic", "the routes take `*-events`"),
        (r#"{"topic":"a b-events","message":1}"#, "bad-topic", "letters, digits"),
        (r#"{"topic":"","message":1}"#, "bad-topic", "cannot be a topic"),
        (r#"{"topic":"a\u0000-events","message":1}"#, "bad-topic", "cannot be a topic"),
        (r#"{"topic":"user-events","message":1,"key":"a\u0000b"}"#, "control-character", "`key`"),
        (r#"{"topic":"user-events","message":1,"type":"a\nb"}"#, "control-character", "`type`"),
        (r#"{"topic":"user-events","message":1,"headers":{"a b":"c"}}"#, "bad-header", "header name"),
        (
            r#"{"topic":"user-events","message":1,"headers":{"a":"b\r\nc: d"}}"#,
            "bad-header",
            "control character",
        ),
        (
            r#"{"topic":"user-events","message":1,"consumerGroup":"nobody"}"#,
            "unknown-group",
            "`default-consumer-group`",
        ),
        (
            r#"{"topic":"other-events","message":1,"consumerGroup":"nobody"}"#,
            "unknown-group",
            "No consumer group listens",
        ),
        (r#"{"topic":"user-events","message":1,"messageId":"order-7"}"#, "bad-id", "`idFrom`"),
        (
            r#"{"topic":"user-events","message":1,"messageId":"019a8f6e-5c1d-7b33-9f00-2b6d0f1c4e55","idFrom":"content"}"#,
            "two-ids",
            "leave one of them out",
        ),
    ];
    for (body, code, says) in cases {
        let answer = service.send(body).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{body}: {}", answer.text);
        assert_eq!(answer.problem(), *code, "{body}: {}", answer.text);
        assert!(answer.detail().contains(says), "{body}: {} should say {says}", answer.detail());
    }
    let deep = format!(r#"{{"topic":"user-events","message":{}{}}}"#, "[".repeat(5000), "]".repeat(5000));
    assert_eq!(service.send(&deep).await.problem(), "too-deep");
    let long = format!(r#"{{"topic":"user-events","message":1,"key":"{}"}}"#, "k".repeat(2000));
    assert_eq!(service.send(&long).await.problem(), "too-long");
    assert_eq!(service.get("/api/counts").await.json()["pending"], 0);
}

#[tokio::test]
async fn bytes_that_are_not_text_are_refused() {
    let service = Service::start();
    let mut body = br#"{"topic":"user-events","message":"x"}"#.to_vec();
    let at = body.len() - 3;
    body[at] = 0xff;
    assert_eq!(service.post("/api/messages/send", body.clone()).await.problem(), "bad-json");
    body[at] = 0;
    assert_eq!(service.post("/api/messages/send", body).await.problem(), "bad-json");
}

#[tokio::test]
async fn too_much_is_refused_with_its_limit() {
    let service = Service::start();
    let large = format!(r#"{{"topic":"user-events","message":"{}"}}"#, "x".repeat(BODY_LIMIT));
    let answer = service.send(&large).await;
    assert_eq!((answer.status, answer.problem().as_str()), (StatusCode::PAYLOAD_TOO_LARGE, "body-too-large"));
    assert!(answer.detail().contains("1048576"));

    let chunks = large
        .into_bytes()
        .chunks(8192)
        .map(|chunk| Ok::<_, std::io::Error>(chunk.to_vec()))
        .collect::<Vec<_>>();
    let unmeasured = Body::from_stream(futures::stream::iter(chunks));
    let answer = service.post("/api/messages/send", unmeasured).await;
    assert_eq!((answer.status, answer.problem().as_str()), (StatusCode::PAYLOAD_TOO_LARGE, "body-too-large"));

    let headers =
        format!(r#"{{"topic":"user-events","message":1,"headers":{{"a":"{}"}}}}"#, "x".repeat(20_000));
    let answer = service.send(&headers).await;
    assert_eq!(answer.status, StatusCode::PAYLOAD_TOO_LARGE);
    assert_eq!(answer.problem(), "message-headers-too-large");

    let mut request = request(Method::GET, "/api/messages/pending", Body::empty());
    request.headers_mut().insert("x-large", "x".repeat(20_000).parse().expect("a header value"));
    let answer = call(&service.producer, request).await;
    assert_eq!(answer.status, StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE);
    assert_eq!(answer.problem(), "headers-too-large");
}

#[tokio::test]
async fn a_body_that_breaks_off_is_not_called_too_large() {
    let service = Service::start();
    let broken = futures::stream::iter([Ok("{"), Err(std::io::Error::other("gone"))]);
    let answer = service.post("/api/messages/send", Body::from_stream(broken)).await;
    assert_eq!((answer.status, answer.problem().as_str()), (StatusCode::BAD_REQUEST, "broken-body"));
}

#[tokio::test]
async fn a_body_must_be_declared_as_json() {
    let service = Service::start();
    let body = r#"{"topic":"user-events","message":1}"#;
    for declared in
        [None, Some("application/x-www-form-urlencoded"), Some("text/plain"), Some("application/jsonx")]
    {
        let mut request = request(Method::POST, "/api/messages/send", body);
        if let Some(declared) = declared {
            request.headers_mut().insert(header::CONTENT_TYPE, declared.parse().expect("a media type"));
        }
        let answer = call(&service.producer, request).await;
        assert_eq!(
            (answer.status, answer.problem().as_str()),
            (StatusCode::UNSUPPORTED_MEDIA_TYPE, "not-json")
        );
    }
    let mut declared = json(Method::POST, "/api/messages/send", body);
    declared
        .headers_mut()
        .insert(header::CONTENT_TYPE, "Application/JSON; charset=utf-8".parse().expect("a type"));
    assert_eq!(call(&service.producer, declared).await.status, StatusCode::ACCEPTED);
}

#[tokio::test]
async fn idempotency_keys_that_cannot_be_are_refused() {
    let service = Service::start();
    for key in ["", "a b", &"k".repeat(256)] {
        let answer = service.send_once(key, r#"{"topic":"user-events","message":1}"#).await;
        assert_eq!(
            (answer.status, answer.problem().as_str()),
            (StatusCode::BAD_REQUEST, "bad-idempotency-key")
        );
    }
    let mut twice = json(Method::POST, "/api/messages/send", r#"{"topic":"user-events","message":1}"#);
    twice.headers_mut().append("idempotency-key", "a".parse().expect("a value"));
    twice.headers_mut().append("idempotency-key", "b".parse().expect("a value"));
    assert_eq!(call(&service.producer, twice).await.problem(), "bad-idempotency-key");
}

#[tokio::test]
async fn paths_and_methods_that_do_not_exist_are_problems_too() {
    let service = Service::start();
    for path in ["/nothing", "/api", "/api/messages/status/a/b"] {
        let answer = service.get(path).await;
        assert_eq!(
            (answer.status, answer.problem().as_str()),
            (StatusCode::NOT_FOUND, "unknown-path"),
            "{path}"
        );
    }
    let answer = service.get("/api/messages/send").await;
    assert_eq!((answer.status, answer.problem().as_str()), (StatusCode::METHOD_NOT_ALLOWED, "wrong-method"));
    assert_eq!(answer.headers[header::ALLOW], "POST");
    assert_eq!(service.get("/api/messages/status/%ff").await.problem(), "bad-path");
    assert_eq!(service.get("/api/messages/status/not-an-id").await.problem(), "bad-id");
    let unknown = service.get("/api/messages/status/019a8f6e-5c1d-7b33-9f00-2b6d0f1c4e55").await;
    assert_eq!((unknown.status, unknown.problem().as_str()), (StatusCode::NOT_FOUND, "unknown-message"));
}

#[tokio::test]
async fn parameters_are_checked() {
    let service = Service::start();
    for (query, code) in [
        ("limit=0", "bad-limit"),
        ("limit=1001", "bad-limit"),
        ("limit=-1", "bad-parameter"),
        ("limit=many", "bad-parameter"),
        ("after=x", "bad-cursor"),
        ("limt=5", "unknown-parameter"),
        ("limit=5&limit=6", "repeated-parameter"),
    ] {
        let answer = service.get(&format!("/api/messages/pending?{query}")).await;
        assert_eq!((answer.status, answer.problem().as_str()), (StatusCode::BAD_REQUEST, code), "{query}");
    }
    assert!(service.get("/api/messages/pending?limt=5").await.detail().contains("did you mean `limit`?"));
    assert_eq!(service.get("/api/messages?status=Lost").await.problem(), "bad-status");
}

#[tokio::test]
async fn a_foreign_host_is_refused_because_of_dns_rebinding() {
    let service = Service::start();
    for (host, allowed) in
        [("localhost:5299", true), ("127.0.0.1:5299", true), ("[::1]:5299", true), ("evil.example", false)]
    {
        let mut request = request(Method::GET, "/api/counts", Body::empty());
        request.headers_mut().insert(header::HOST, host.parse().expect("a host"));
        let answer = call(&service.producer, request).await;
        assert_eq!(answer.status, if allowed { StatusCode::OK } else { StatusCode::FORBIDDEN }, "{host}");
        if !allowed {
            assert_eq!(answer.problem(), "foreign-host");
        }
    }
}

#[tokio::test]
async fn a_page_of_another_origin_may_not_write() {
    let service = Service::start();
    for (name, value, allowed) in [
        ("origin", "http://localhost:5299", true),
        ("origin", "http://localhost:3000", false),
        ("origin", "https://evil.example", false),
        ("origin", "null", false),
        ("sec-fetch-site", "cross-site", false),
        ("sec-fetch-site", "same-origin", true),
    ] {
        let mut request = json(Method::POST, "/api/messages/send", r#"{"topic":"user-events","message":1}"#);
        request.headers_mut().insert(name, value.parse().expect("a value"));
        let answer = call(&service.producer, request).await;
        assert_eq!(
            answer.status,
            if allowed { StatusCode::ACCEPTED } else { StatusCode::FORBIDDEN },
            "{name}: {value}"
        );
        if !allowed {
            assert_eq!(answer.problem(), "foreign-origin");
        }
    }
}
