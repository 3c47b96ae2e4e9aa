//! A listener on a real socket.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::service::Service;

async fn listen(service: &Service) -> (SocketAddr, oneshot::Sender<()>, JoinHandle<std::io::Result<()>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("an address");
    let (stop, stopped) = oneshot::channel::<()>();
    let shutdown = async move {
        let _ = stopped.await;
    };
    let running = tokio::spawn(server::serve(listener, service.producer.clone(), shutdown));
    (address, stop, running)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_documented_calls_work_over_a_socket() {
    let service = Service::start();
    let (address, stop, running) = listen(&service).await;
    let client = reqwest::Client::new();
    let sent: serde_json::Value = client
        .post(format!("http://{address}/api/messages/send"))
        .header("content-type", "application/json")
        .body(r#"{ "topic": "user-events", "message": "A user created an account", "consumerGroup": "default-consumer-group" }"#)
        .send()
        .await
        .expect("an answer")
        .json()
        .await
        .expect("JSON");
    let id = sent["messageId"].as_str().expect("an id");
    for path in [format!("/api/messages/status/{id}"), "/api/messages/pending".to_owned()] {
        let answer = client.get(format!("http://{address}{path}")).send().await.expect("an answer");
        assert_eq!(answer.status(), 200, "{path}");
        assert!(answer.text().await.expect("text").contains(id));
    }
    stop.send(()).expect("it runs");
    running.await.expect("no panic").expect("a clean end");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_open_page_does_not_keep_the_listener_from_stopping() {
    let service = Service::start();
    let (address, stop, running) = listen(&service).await;
    let mut page = reqwest::get(format!("http://{address}/events")).await.expect("a stream");
    page.chunk().await.expect("bytes").expect("an event");
    let asked = Instant::now();
    stop.send(()).expect("it runs");
    running.await.expect("no panic").expect("a clean end");
    assert!(asked.elapsed() < Duration::from_secs(3), "it took {:?}", asked.elapsed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_megabytes_of_headers_or_body_are_refused_and_the_service_goes_on() {
    let service = Service::start();
    let (address, stop, running) = listen(&service).await;
    let answer = tokio::task::spawn_blocking(move || {
        let mut stream = TcpStream::connect(address).expect("a connection");
        let head = format!(
            "GET /api/counts HTTP/1.1\r\nhost: localhost\r\nx-large: {}\r\n\r\n",
            "x".repeat(10 << 20)
        );
        // The other side hangs up before it has read all of that, which is the point.
        let _ = stream.write_all(head.as_bytes());
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        String::from_utf8_lossy(&answer).into_owned()
    })
    .await
    .expect("no panic");
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 431"), "{answer}");

    let large = reqwest::Client::new()
        .post(format!("http://{address}/api/messages/send"))
        .header("content-type", "application/json")
        .body(vec![b'x'; 10 << 20])
        .send()
        .await
        .expect("an answer");
    assert_eq!(large.status(), 413);
    let well = reqwest::get(format!("http://{address}/api/counts")).await.expect("an answer");
    assert_eq!(well.status(), 200);
    stop.send(()).expect("it runs");
    running.await.expect("no panic").expect("a clean end");
}
