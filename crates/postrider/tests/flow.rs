//! Routes whose flow is watched: what flowed and stops is told, in the log, on health and as a metric.

#![cfg(unix)]

mod harness;
#[cfg(feature = "redis")]
#[path = "harness/place.rs"]
mod place;

use std::sync::atomic::{AtomicBool, Ordering};

use harness::{Folder, Server, raw, until};

const WATCHED: &str = "[routes.default]\ntopics = [\"*\"]\nwatch = { window = \"1s\", drop = 0.5 }\n\
                       [consumers.billing]\ntopics = [\"order-events\"]\n";

/// A number that is scraped, if it is there.
fn scraped(listener: &str, name: &str) -> Option<f64> {
    let text = raw(listener, "GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ').map(str::to_owned));
    line?.parse().ok()
}

fn send(server: &Server) {
    let body = r#"{ "topic": "order-events", "message": 1 }"#;
    let (status, answer) = server.post(&format!("{}/api/messages/send", server.producer), body);
    assert_eq!(status, 202, "{answer}");
}

fn detail(server: &Server, url: &str, component: &str) -> String {
    let (_, health) = server.get(url);
    let components = health["components"].as_array().expect("components").clone();
    let found = components.iter().find(|one| one["name"] == component);
    let found = found.unwrap_or_else(|| panic!("{component} is not in {health}"));
    assert_eq!(found["ok"], true, "nothing is broken");
    found["detail"].as_str().expect("a text").to_owned()
}

#[test]
fn a_flow_that_stops_is_told_everywhere() {
    let folder = Folder::with(WATCHED);
    let server = folder.serve(&[]);
    let of_route = |name: &str| scraped(&server.producer, &format!("outbox_{name}{{route=\"default\"}}"));
    let of_group = |name: &str| {
        scraped(&server.consumer, &format!("inbox_{name}{{group=\"billing\",route=\"default\"}}"))
    };
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                send(&server);
            }
        });
        let known =
            until(|| of_route("route_flow_usual").is_some() && of_group("route_flow_usual").is_some());
        stop.store(true, Ordering::Relaxed);
        assert!(known.is_ok(), "nothing became usual: {}", server.said());
    });
    let dropped = || [of_route("route_flow_dropped"), of_group("route_flow_dropped")] == [Some(1.0); 2];
    assert!(until(dropped).is_ok(), "nobody noticed: {}", server.said());
    assert!(of_route("route_flow") < of_route("route_flow_usual"));
    for words in
        ["flow of route default dropped: ", "flow of route default to billing dropped: ", "/min, usually "]
    {
        assert!(server.said().contains(words), "{words}: {}", server.said());
    }
    let producer = format!("{}/api/messages/health", server.producer);
    assert!(detail(&server, &producer, "flow of route default").starts_with("dropped: "));
    let consumer = format!("{}/api/consumer/health", server.consumer);
    assert!(detail(&server, &consumer, "flow of route default to billing").starts_with("dropped: "));
    // As many were done as were sent: what was expected came.
    let all =
        || of_route("route_total").is_some_and(|sent| sent > 0.0 && of_group("route_total") == Some(sent));
    assert!(until(all).is_ok(), "{:?} {:?}", of_route("route_total"), of_group("route_total"));
}

/// Whether a group acknowledges after its mark is committed, and not with it.
#[cfg(feature = "redis")]
fn acknowledges_afterwards(settings: &str, dedup: &str) -> bool {
    let folder = Folder::with(&format!("{settings}\n{WATCHED}{dedup}"));
    let folder = folder.variable("POSTRIDER__LOG__LEVEL", "info,inbox=debug");
    let mut server = folder.serve(&[]);
    let body = r#"{ "topic": "order-events", "message": 1 }"#;
    let (_, answer) = server.post(&format!("{}/api/messages/send", server.producer), body);
    let id = answer["messageId"].as_str().expect("an id");
    server.until(&format!("{}/api/messages/status/{id}", server.producer), |view| {
        !view["acknowledgements"][0]["acknowledgedAt"].is_null()
    });
    // What is said of it is said by the end.
    server.signal("TERM");
    assert_eq!(server.wait(), Some(0), "{}", server.said());
    server.said().contains("acknowledged to the producer's store")
}

#[cfg(feature = "redis")]
#[test]
fn a_group_that_is_watched_acknowledges_with_its_mark_unless_that_is_in_another_place() {
    let place = place::redis();
    let store = format!("[store]\n{}", place.settings);
    assert!(!acknowledges_afterwards(&store, ""), "messages and marks are in one Redis");
    let marks = format!("[consumer]\nredis = \"{}\"", testkit::servers::url("redis"));
    assert!(acknowledges_afterwards(&marks, "dedup = \"redis\"\n"), "messages are in a file");
}

#[test]
fn of_a_route_past_the_store_it_is_known_how_many_of_how_many_were_lost() {
    let folder = Folder::with(
        "[brokers.main]\nurl = \"embedded://?max_payload=40B\"\n[routes.default]\ntopics = [\"*\"]\n\
         semantics = \"best-effort\"\n[consumers]\n",
    );
    let server = folder.serve(&[]);
    let lost = |count| scraped(&server.producer, "outbox_lost_total{route=\"default\"}") == Some(count);
    assert!(lost(0.0), "a counter is there before it counts");
    send(&server);
    let large = format!(r#"{{ "topic": "order-events", "message": "{}" }}"#, "x".repeat(64));
    assert_eq!(server.post(&format!("{}/api/messages/send", server.producer), &large).0, 202);
    let total = || scraped(&server.producer, "outbox_route_total{route=\"default\"}") == Some(1.0);
    assert!(until(|| total() && lost(1.0)).is_ok(), "{}", server.said());
    let producer = format!("{}/api/messages/health", server.producer);
    let said = detail(&server, &producer, "route default");
    assert!(said.starts_with("1 of 2 lost since the start"), "{said}");
}

#[test]
fn groups_that_promise_nothing_are_counted_and_nobody_waits_for_them() {
    let folder = Folder::with(
        "[consumers.kept]\ntopics = [\"order-events\"]\n\
         [consumers.quick]\ntopics = [\"order-events\"]\nsemantics = \"none\"\n\
         [consumers.tried]\ntopics = [\"order-events\"]\nsemantics = \"best-effort\"\n\
         handler = { command = [\"sh\", \"-c\", \"exit 3\"] }\n\
         [routes.default]\ntopics = [\"*\"]\n[routes.orders]\ntopics = [\"order-events\"]\nwatch = {}\n",
    );
    let server = folder.serve(&[]);
    folder.run(&["contract"]).answered(&[
        "a message that comes is tried once; nothing else.",
        "the broker may forget it when its handler has answered.",
    ]);
    for group in ["quick", "tried"] {
        let lost = scraped(&server.consumer, &format!("inbox_lost_total{{group=\"{group}\"}}"));
        assert_eq!(lost, Some(0.0), "a counter is there before it counts");
    }
    let body = r#"{ "topic": "order-events", "message": 1 }"#;
    let (_, answer) = server.post(&format!("{}/api/messages/send", server.producer), body);
    let id = answer["messageId"].as_str().expect("an id");
    let view = server.until(&format!("{}/api/messages/status/{id}", server.producer), |view| {
        view["status"] == "Acknowledged" || !view["acknowledgements"][0]["acknowledgedAt"].is_null()
    });
    assert_eq!(view["consumerGroups"], serde_json::json!(["kept"]), "{view}");
    let is = |name: &str, count| scraped(&server.consumer, name) == Some(count);
    let counted = || {
        is("inbox_lost_total{group=\"tried\"}", 1.0)
            && is("inbox_processed_total{group=\"quick\"}", 1.0)
            && is("inbox_processed_total{group=\"kept\"}", 1.0)
            && is("inbox_route_total{group=\"quick\",route=\"orders\"}", 1.0)
    };
    assert!(until(counted).is_ok(), "{}", server.said());
    let processed = server.get(&format!("{}/api/consumer/processed/quick", server.consumer));
    assert_eq!(processed.1["items"], serde_json::json!([]), "nothing is remembered");
    let trial = r#"{ "topic": "order-events", "message": 2, "consumerGroup": "tried" }"#;
    let (_, trial) = server.post(&format!("{}/api/consumer/test-process", server.consumer), trial);
    assert_eq!(trial["result"], "failed", "{trial}");
    assert!(
        trial["detail"].as_str().is_some_and(|detail| detail.starts_with("Nobody keeps it: ")),
        "{trial}"
    );
}

#[test]
fn what_cannot_be_watched_is_refused_with_what_can() {
    let check = |watch: &str| {
        let folder = Folder::with(&format!("[routes.default]\ntopics = [\"*\"]\nwatch = {watch}\n"));
        folder.run(&["config", "check"])
    };
    check("{ window = \"100ms\" }").failed(2, &["routes.default.watch.window", "use 1s to 1d"]);
    check("{ drop = 2 }").failed(2, &["routes.default.watch.drop", "between 0 and 1"]);
    check("{ drop = 1.5 }").failed(2, &["between 0 and 1"]);
    check("{ drop = \"half\" }").failed(2, &["expected a share such as 0.5, found a text"]);
    check("{ windw = \"5m\" }").failed(2, &["did you mean `window`?"]);
    check("true").failed(2, &["expected a table"]);
    check("{}").answered(&[]);
    let folder = Folder::with("[routes.default]\ntopics = [\"*\"]\nwatch = {}\n");
    folder.run(&["config", "show"]).answered(&["watch = { window = \"5m\", drop = 0.5 }"]);
    let plain = Folder::with("[routes.default]\ntopics = [\"*\"]\n");
    assert!(!plain.run(&["config", "show"]).out.contains("watch"), "it is off unless it is asked for");
}
