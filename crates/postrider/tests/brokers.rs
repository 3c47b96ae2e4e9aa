//! The whole command on every broker: what is sent is published, received, handled and acknowledged, and the doctor has
//! something to say.

#![cfg(all(
    unix,
    feature = "kafka",
    feature = "rabbitmq",
    feature = "nats",
    feature = "sqs",
    feature = "pubsub",
    feature = "redis-streams"
))]

mod harness;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicU32, Ordering};

use harness::{Folder, Server};

/// The servers, and what their URLs need beside a prefix of the test's own.
const BROKERS: [(&str, &str); 6] = [
    ("kafka", ""),
    ("rabbitmq", ""),
    ("nats", ""),
    ("redis", ""),
    ("sqs", "&fifo=true"),
    ("pubsub", "&groups=ledger"),
];

fn url(name: &str, parameters: &str) -> String {
    static MADE: AtomicU32 = AtomicU32::new(0);
    let server = testkit::servers::url(name);
    let joint = if server.contains('?') { '&' } else { '?' };
    let number = MADE.fetch_add(1, Ordering::Relaxed);
    format!("{server}{joint}prefix=command{}x{number}{parameters}", std::process::id())
}

/// Everything in one process, on SQLite and this broker.
fn serve(url: &str, more: &str) -> (Folder, Server) {
    let folder = Folder::with(&format!(
        "[brokers.main]\nurl = \"{url}\"\n{more}\n[consumers.ledger]\ntopics = [\"order-events\"]\n"
    ));
    let server = folder.serve(&[]);
    (folder, server)
}

fn send(server: &Server, key: &str) -> String {
    let body = format!(r#"{{ "topic": "order-events", "message": {{"total": 10}}, "key": "{key}" }}"#);
    let (status, answer) = server.post(&format!("{}/api/messages/send", server.producer), &body);
    assert_eq!(status, 202, "{answer}");
    answer["messageId"].as_str().expect("an id").to_owned()
}

#[test]
fn a_message_is_sent_received_handled_and_acknowledged_on_every_broker() {
    for (name, parameters) in BROKERS {
        let (folder, server) = serve(&url(name, parameters), "");
        let id = send(&server, "7");
        let view = server.until(&format!("{}/api/messages/status/{id}", server.producer), |view| {
            view["status"] == "Sent" && !view["acknowledgements"][0]["acknowledgedAt"].is_null()
        });
        assert_eq!(view["key"], "7", "{name}");
        let health = server.get(&format!("{}/api/messages/health", server.producer));
        assert_eq!(health.0, 200, "{name}: {}", health.1);
        let found = folder.run(&["doctor"]);
        assert_eq!(found.code, 0, "{name}: {found:?}");
        assert!(found.out.contains("BROKER MAIN"), "{name}: {found:?}");
    }
}

#[test]
fn messages_travel_as_cloud_events_where_a_route_says_so() {
    for mode in ["binary", "structured"] {
        let route = format!("[routes.all]\ntopics = [\"*\"]\ncloudevents = \"{mode}\"\nsource = \"/shop\"");
        let (_folder, server) = serve(&url("nats", ""), &route);
        let id = send(&server, "7");
        let processed = format!("{}/api/consumer/processed/ledger", server.consumer);
        let view = server.until(&processed, |view| !view["items"].as_array().is_none_or(Vec::is_empty));
        assert_eq!(view["items"][0]["messageId"], id.as_str());
        assert_eq!(view["items"][0]["key"], "7");
    }
}

#[test]
fn a_webhook_gets_the_message_with_its_signature() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    let secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
    let folder = Folder::with(&format!(
        "[brokers.hook]\nurl = \"http://{address}/in?allow_loopback=true&secret={secret}\"\n[consumers]\n"
    ));
    let server = folder.serve(&[]);
    let id = send(&server, "7");
    let (mut connection, _) = listener.accept().expect("the relay comes");
    let mut request = Vec::new();
    while !String::from_utf8_lossy(&request).contains("{\"total\": 10}") {
        let mut part = [0; 4_096];
        let read = connection.read(&mut part).expect("a request");
        assert!(read > 0, "the request ended early: {}", String::from_utf8_lossy(&request));
        request.extend_from_slice(&part[..read]);
    }
    connection.write_all(b"HTTP/1.1 204 No Content\r\n\r\n").expect("an answer");
    let request = String::from_utf8(request).expect("text").to_lowercase();
    assert!(request.starts_with("post /in http/1.1"), "our own parameters stay here: {request}");
    for expected in [&format!("webhook-id: {id}"), "webhook-signature: v1,", "postrider-key: 7"] {
        assert!(request.contains(expected), "{expected} is missing: {request}");
    }
    server.until(&format!("{}/api/messages/status/{id}", server.producer), |view| view["status"] == "Sent");
    let shown = folder.run(&["config", "show"]);
    assert!(!format!("{shown:?}{}", server.said()).contains("MfKQ9r8"), "the secret is shown");
}

#[test]
fn what_a_broker_cannot_do_is_refused_at_the_start() {
    let queue = url("sqs", "");
    let settings = format!(
        "[brokers.main]\nurl = \"{queue}\"\n[consumers.a]\ntopics = [\"t\"]\n[consumers.b]\ntopics = [\"t\"]\n"
    );
    Folder::with(&settings).run(&["serve"]).failed(2, &["does not keep the order of keys", "is one queue"]);
    let hook = "[brokers.main]\nurl = \"https://example.com/in\"\n[consumers.a]\ntopics = [\"t\"]\n";
    Folder::with(hook).run(&["serve"]).failed(2, &["only takes messages"]);
}

/// A route that promises exactly once by the memory of the broker: at least as long as a message may be sent again.
fn exactly_once(url: &str) -> String {
    format!(
        "[brokers.main]\nurl = \"{url}&duplicates=2h\"\n[routes.all]\ntopics = [\"*\"]\nsemantics = \"exactly-once\"\n\
         retry = {{ give_up_after = \"1h\" }}\n[consumers]\n"
    )
}

/// The words of the doctor and of those who refuse.
const TOO_SHORT: [&str; 2] =
    ["recognises duplicates for 1m, and a message may be sent again for 1h", "raise duplicate_window"];

/// A stream that somebody else made, with a memory of a minute.
fn others_stream() -> String {
    let url = url("nats", "");
    let (_folder, server) = serve(&format!("{url}&duplicates=1m"), "");
    let id = send(&server, "7");
    server.until(&format!("{}/api/messages/status/{id}", server.producer), |view| view["status"] == "Sent");
    url
}

#[test]
fn exactly_once_by_a_stream_of_others_that_forgets_too_early_is_refused_at_the_start() {
    let url = others_stream();
    let folder = Folder::with(&exactly_once(&url));
    assert_eq!(folder.run(&["config", "check"]).code, 0, "nobody is connected to");
    let refused = folder.run(&["serve"]);
    refused.failed(2, &TOO_SHORT);
    refused.failed(2, &["routes.all.semantics", "\"effectively-once\""]);
    let found = folder.run(&["doctor"]);
    assert!(found.code == 4 && TOO_SHORT.iter().all(|words| found.out.contains(words)), "{found:?}");
}

#[test]
fn exactly_once_by_a_stream_that_could_not_be_asked_at_the_start_sends_nothing_before_it_was() {
    let url = others_stream();
    let server_at = url.trim_start_matches("nats://").split('?').next().expect("an address").to_owned();
    // Nobody answers at the door yet.
    let door = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = door.local_addr().expect("an address");
    let folder = Folder::with(&exactly_once(&url.replacen(&server_at, &address.to_string(), 1)));
    let server = folder.serve(&[]);
    assert!(server.said().contains("nothing is sent before it is"), "{}", server.said());
    let id = send(&server, "8");

    std::thread::spawn(move || {
        // It ends with the process of the test.
        for client in door.incoming().flatten() {
            let Ok(server) = TcpStream::connect(&server_at) else { continue };
            for (mut from, mut to) in [
                (client.try_clone().expect("a socket"), server.try_clone().expect("a socket")),
                (server, client),
            ] {
                std::thread::spawn(move || std::io::copy(&mut from, &mut to));
            }
        }
    });
    let health = format!("{}/api/messages/health", server.producer);
    let told = harness::until(|| {
        let said = server.get(&health).1.to_string();
        TOO_SHORT.iter().all(|words| said.contains(words))
    });
    told.unwrap_or_else(|()| panic!("{:?} {}", server.get(&health), server.said()));
    let view = server.get(&format!("{}/api/messages/status/{id}", server.producer)).1;
    assert_ne!(view["status"], "Sent", "{view}");
}

#[test]
fn a_broker_that_is_away_is_broken_for_the_doctor_and_no_password_is_told() {
    let urls = [
        "kafkas://ann:hush@127.0.0.1:1",
        "amqp://ann:hush@127.0.0.1:1",
        "nats://ann:hush@127.0.0.1:1",
        "redis://:hush@127.0.0.1:1",
    ];
    for url in urls {
        let folder = Folder::with(&format!("[brokers.main]\nurl = \"{url}\"\n"));
        assert_eq!(folder.run(&["migrate"]).code, 0);
        let found = folder.run(&["doctor"]);
        assert_eq!(found.code, 4, "{url}: {found:?}");
        assert!(!format!("{found:?}").contains("hush"), "{found:?}");
    }
}
