//! The whole command with a group that makes messages of messages, and dies while it does.

#![cfg(all(unix, feature = "kafka"))]

mod harness;

use std::process::{Command, id};

use harness::{Folder, Server, until};
use serde_json::json;

const ORDERS: usize = 200;

/// One line for each order, and a note of the work beside it.
const BILL: &str = r#"order=$(cat); echo $order >> handled
echo "{\"topic\":\"bills\",\"key\":\"$POSTRIDER_KEY\",\"message\":$order}""#;

/// Settings of a shop that bills its orders.
fn shop(prefix: &str) -> String {
    let server = testkit::servers::url("kafka");
    // A member that was killed is missed soon.
    let url = format!("{server}?prefix={prefix}&partitions=4&session=6s");
    format!(
        "[brokers.main]\nurl = \"{url}\"\n[routes.orders]\ntopics = [\"orders\"]\nsemantics = \"exactly-once\"\n\
         [consumers.billing]\ntopics = [\"orders\"]\nsemantics = \"exactly-once\"\n\
         handler = {{ command = [\"sh\", \"-c\", '''{BILL}'''] }}\n"
    )
}

/// What a reader of what is committed sees.
fn bills(prefix: &str) -> Vec<usize> {
    let servers = testkit::servers::url("kafka");
    let servers = servers.trim_start_matches("kafka://");
    let mut kcat = Command::new("kcat");
    kcat.args(["-b", servers, "-t", &format!("{prefix}bills"), "-C", "-e", "-q", "-o", "beginning"]);
    let read = kcat.args(["-X", "isolation.level=read_committed", "-f", "%s\n"]).output();
    let read = read.expect("kcat is installed").stdout;
    let mut bills: Vec<usize> =
        String::from_utf8_lossy(&read).lines().map(|bill| bill.parse().expect("a number")).collect();
    bills.sort_unstable();
    bills
}

fn send(server: &Server, order: usize) {
    let body = json!({ "topic": "orders", "key": format!("k{}", order % 20), "message": order });
    let (status, answer) = server.post(&format!("{}/api/messages/send", server.producer), &body.to_string());
    assert_eq!(status, 202, "{answer}");
}

#[test]
fn whenever_it_is_killed_each_order_has_one_bill() {
    let prefix = format!("transforming{}.", id());
    let folder = Folder::with(&shop(&prefix));
    let handled =
        || std::fs::read_to_string(folder.path().join("handled")).unwrap_or_default().lines().count();
    for round in 0..4 {
        let server = folder.serve(&[]);
        let before = handled();
        for order in (0..ORDERS).skip(round).step_by(4) {
            send(&server, order);
        }
        // In the middle of it, sooner or later: the process is killed, with whatever it has in hand.
        until(|| handled() >= before + 5 + round * 10)
            .unwrap_or_else(|()| panic!("nothing is handled: {}", server.said()));
        drop(server);
    }
    let server = folder.serve(&[]);
    let mut found = Vec::new();
    until(|| {
        found = bills(&prefix);
        found.len() >= ORDERS
    })
    .unwrap_or_else(|()| panic!("{} bills: {}", found.len(), server.said()));
    assert_eq!(found, (0..ORDERS).collect::<Vec<_>>());
    assert!(handled() >= ORDERS);
    let health = server.get(&format!("{}/api/consumer/health", server.consumer));
    assert_eq!(health.0, 200, "{}", health.1);
    folder.run(&["contract"]).answered(&[
        "exactly-once",
        "`billing-dead`",
        "is in the log once",
        "it runs again",
    ]);
}

#[test]
fn a_promise_that_cannot_be_kept_is_refused_with_the_nearest_that_can() {
    let group = "[consumers.billing]\ntopics = [\"orders\"]\nsemantics = \"exactly-once\"\n";
    let nearest = "the nearest that can is \"effectively-once\"";
    Folder::with(group).run(&["serve"]).failed(2, &["log makes none", nearest]);
    let elsewhere = format!("{group}handler = {{ command = \"bill\" }}\n");
    Folder::with(&elsewhere).run(&["serve"]).failed(2, &["cannot be had of `main`", nearest]);
}
