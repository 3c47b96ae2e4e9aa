//! `reconcile` on real stores and brokers: what agrees, what does not, and what nobody can know any more.

#![cfg(all(unix, feature = "embedded"))]

mod harness;

use std::path::PathBuf;

use broker::{Outcome, Outgoing, Publisher};
use harness::{Folder, Server};
use message::Message;
use rusqlite::Connection;
use serde_json::Value;

const SETTINGS: &str = "[consumers.billing]\ntopics = [\"order-events\"]\n";

/// All up to now, judged without patience.
const ALL: [&str; 5] = ["reconcile", "--until", "0s", "--patience", "0s"];

fn send(server: &Server, topic: &str, key: &str) -> String {
    let body = format!(r#"{{ "topic": "{topic}", "message": {{"total": 10}}, "key": "{key}" }}"#);
    let (status, answer) = server.post(&format!("{}/api/messages/send", server.producer), &body);
    assert_eq!(status, 202, "{answer}");
    answer["messageId"].as_str().expect("an id").to_owned()
}

fn until_counts(server: &Server, field: &str, count: usize) {
    server.until(&format!("{}/api/counts", server.producer), |counts| counts[field] == count);
}

/// Twelve messages of two keys that are sent and done, one after another, and their ids.
fn done() -> (Folder, Vec<String>) {
    let folder = Folder::with(SETTINGS);
    let mut server = folder.serve(&[]);
    let mut ids = Vec::new();
    for number in 0..12 {
        ids.push(send(&server, "order-events", &format!("key-{}", number % 2)));
        until_counts(&server, "acknowledgedTotal", number + 1);
    }
    server.signal("TERM");
    assert_eq!(server.wait(), Some(0));
    (folder, ids)
}

fn file(folder: &Folder, name: &str) -> PathBuf {
    folder.path().join("postrider-data").join(name)
}

fn change(folder: &Folder, name: &str, statement: &str) -> usize {
    let file = Connection::open(file(folder, name)).expect("the file can be opened");
    file.execute(statement, []).unwrap_or_else(|error| panic!("{statement}: {error}"))
}

/// What it says when it ends with `code`.
fn compared(folder: &Folder, code: i32, more: &[&str]) -> Value {
    let mut arguments = vec!["--json"];
    arguments.extend(ALL);
    arguments.extend(more);
    let run = folder.run(&arguments);
    assert_eq!(run.code, code, "{run:?}");
    serde_json::from_str(&run.out).unwrap_or_else(|error| panic!("{error}: {run:?}"))
}

fn ids(difference: &Value) -> Vec<&str> {
    let messages = difference["messages"].as_array().expect("a list");
    assert_eq!(difference["count"], messages.len(), "{difference}");
    messages.iter().map(|message| message["messageId"].as_str().expect("an id")).collect()
}

fn publish(folder: &Folder, messages: Vec<Outgoing>) {
    let config = broker::embedded::Config::new(file(folder, "broker.db"));
    let broker = broker::embedded::Broker::open(config).expect("the broker can be opened");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let outcomes = runtime.block_on(broker.publish(messages));
    assert!(outcomes.iter().all(|outcome| *outcome == Outcome::Confirmed), "{outcomes:?}");
}

#[test]
fn sides_that_agree_are_said_to_agree() {
    let (folder, _) = done();
    let view = compared(&folder, 0, &[]);
    assert_eq!(view["agrees"], true, "{view}");
    assert_eq!(view["outbox"]["sent"], 12, "{view}");
    assert_eq!(view["brokers"][0]["stored"], 12, "{view}");
    let group = &view["groups"][0];
    assert_eq!((&group["sent"], &group["processed"]), (&12.into(), &12.into()), "{view}");
    folder.run(&ALL).answered(&["OUTBOX", "12 written, 12 sent", "BROKER main", "GROUP billing"]);
    // What is not a minute old is not judged, unless somebody asks for it.
    assert_eq!(folder.json(&["reconcile"])["outbox"]["written"], 0);
    assert_eq!(compared(&folder, 0, &["--topic", "other-events"])["outbox"]["written"], 0);
    assert_eq!(compared(&folder, 0, &["--topic", "order-events"])["outbox"]["written"], 12);
}

#[test]
fn what_the_broker_lost_is_missing() {
    let (folder, ids_sent) = done();
    let lost = ids_sent[5].replace('-', "");
    let gone =
        change(&folder, "broker.db", &format!("DELETE FROM broker_blocks WHERE instr(data, x'{lost}') > 0"));
    assert_eq!(gone, 1);
    let view = compared(&folder, 1, &[]);
    assert_eq!(ids(&view["brokers"][0]["missing"]), [ids_sent[5].as_str()], "{view}");
    assert_eq!(view["groups"][0]["missing"]["count"], 0, "the group has done it: {view}");
    let run = folder.run(&ALL);
    run.failed(1, &["1 missing, 0 extra, 0 duplicate"]);
    assert!(run.out.contains("missing in the broker main") && run.out.contains(&ids_sent[5]), "{run:?}");
}

#[test]
fn what_nobody_wrote_is_extra_and_what_lies_there_twice_is_duplicate() {
    let (folder, ids_sent) = done();
    let stranger = Message::new("order-events", "1").key("key-0");
    let copy =
        Message { id: ids_sent[3].parse().expect("an id"), ..Message::new("order-events", "1").key("key-1") };
    let id = stranger.id.to_string();
    // A second delivery is meant, and no duplicate.
    let meant = Outgoing { delivery: 1, ..Outgoing::new(copy.clone(), 4) };
    publish(&folder, vec![Outgoing::new(stranger, 99), Outgoing::new(copy, 4), meant]);
    let view = compared(&folder, 1, &[]);
    let broker = &view["brokers"][0];
    assert_eq!(ids(&broker["extra"]), [id.as_str()], "{view}");
    assert_eq!(ids(&broker["duplicate"]), [ids_sent[3].as_str()], "{view}");
    assert_eq!(ids(&broker["missing"]), [""; 0], "{view}");
}

#[test]
fn what_a_group_passed_over_is_missing() {
    let (folder, ids_sent) = done();
    let passed = &ids_sent[4];
    assert_eq!(change(&folder, "postrider.db", &format!("DELETE FROM inbox_ids WHERE id = '{passed}'")), 1);
    assert!(compared(&folder, 0, &[])["agrees"] == true, "it has acknowledged it");
    let acknowledged = format!(
        "DELETE FROM outbox_acknowledgements WHERE seq = (SELECT seq FROM outbox_events WHERE id = '{passed}')"
    );
    assert_eq!(change(&folder, "postrider.db", &acknowledged), 1);
    let view = compared(&folder, 1, &[]);
    let group = &view["groups"][0];
    assert_eq!(ids(&group["missing"]), [passed.as_str()], "{view}");
    assert_eq!(group["missing"]["messages"][0]["why"], "a later one of its key was done", "{view}");
    assert_eq!(view["brokers"][0]["missing"]["count"], 0, "{view}");
}

#[test]
fn what_is_sent_and_not_done_straggles_and_is_no_failure() {
    let folder = Folder::with(SETTINGS);
    let mut server = folder.serve(&["--only", "producer,relay"]);
    let id = send(&server, "order-events", "a");
    until_counts(&server, "sent", 1);
    server.signal("TERM");
    assert_eq!(server.wait(), Some(0));
    let view = compared(&folder, 0, &[]);
    assert_eq!(ids(&view["groups"][0]["straggling"]), [id.as_str()], "{view}");
    let mut patient = ALL.to_vec();
    patient[4] = "1h";
    let run = folder.run(&patient);
    run.answered(&["on the way"]);
    folder.run(&ALL).answered(&["straggling by the group billing", &id, "it takes long"]);
}

#[test]
fn what_the_sides_have_forgotten_is_not_missing() {
    let (folder, ids_sent) = done();
    folder.write("postrider.toml", &format!("{SETTINGS}[store]\nretention = {{ sent = \"1h\" }}\n"));
    // Two hours pass for the first six, and the store deletes what it need not keep.
    let aged = |ids: &[String]| ids.iter().map(|id| format!("'{id}'")).collect::<Vec<_>>().join(", ");
    let old = aged(&ids_sent[..6]);
    change(&folder, "postrider.db", &format!("DELETE FROM outbox_events WHERE id IN ({old})"));
    for id in &ids_sent[..6] {
        let bytes = id.replace('-', "");
        let older = format!(
            "UPDATE broker_blocks SET stored_at = stored_at - 7200000 WHERE instr(data, x'{bytes}') > 0"
        );
        assert_eq!(change(&folder, "broker.db", &older), 1);
    }
    let view = compared(&folder, 0, &["--since", "3h"]);
    assert_eq!(
        (&view["outbox"]["sent"], &view["brokers"][0]["extra"]["count"]),
        (&6.into(), &0.into()),
        "{view}"
    );
    let from = view["brokers"][0]["topics"][0]["from"].as_str().expect("a time");
    assert!(from > view["since"].as_str().expect("a time"), "{view}");
    let mut since = ALL.to_vec();
    since.extend(["--since", "3h"]);
    folder.run(&since).answered(&["compared from", "is not kept on both sides"]);
}

/// Two topics, and a message of each that is sent and done.
fn orders_and_clicks() -> (Folder, [String; 2]) {
    let folder = Folder::with("[consumers.billing]\ntopics = [\"clicks\", \"order-events\"]\n");
    let mut server = folder.serve(&[]);
    let ids = ["order-events", "clicks"].map(|topic| send(&server, topic, "a"));
    until_counts(&server, "acknowledgedTotal", 2);
    server.signal("TERM");
    assert_eq!(server.wait(), Some(0));
    (folder, ids)
}

#[test]
fn what_is_forgotten_of_one_topic_hides_nothing_of_another_and_is_not_said_to_agree() {
    let (folder, [order, click]) = orders_and_clicks();
    let settings = std::fs::read_to_string(folder.path().join("postrider.toml")).expect("it is there");
    folder.write("postrider.toml", &format!("{settings}[brokers.main]\nurl = \"embedded://?retain=0s\"\n"));
    let remove = |id: &str| {
        let bytes = id.replace('-', "");
        let remove = format!("DELETE FROM broker_blocks WHERE instr(data, x'{bytes}') > 0");
        assert_eq!(change(&folder, "broker.db", &remove), 1);
    };
    // The broker forgets the click, as it may.
    remove(&click);
    let clicks = "(SELECT id FROM broker_topics WHERE name = 'clicks')";
    let forget = format!("UPDATE broker_partitions SET first = next WHERE topic = {clicks}");
    assert!(change(&folder, "broker.db", &forget) > 0);
    let view = compared(&folder, 1, &[]);
    assert_eq!((&view["agrees"], view["outbox"]["sent"].as_u64()), (&false.into(), Some(2)), "{view}");
    let topics = &view["brokers"][0]["topics"];
    assert_eq!((&topics[0]["topic"], &topics[0]["compared"]), (&"clicks".into(), &false.into()), "{view}");
    assert_eq!(
        (&topics[1]["topic"], &topics[1]["compared"]),
        (&"order-events".into(), &true.into()),
        "{view}"
    );
    let nothing = "nothing could be compared of the topic `clicks` in the broker main";
    let run = folder.run(&ALL);
    run.failed(1, &["nobody can tell whether the sides agree: ", nothing]);
    assert!(run.out.contains("the topic clicks, not compared: nothing of that time is kept"), "{run:?}");
    compared(&folder, 0, &["--topic", "order-events"]);
    // And loses the order, as it may not.
    remove(&order);
    let view = compared(&folder, 1, &[]);
    assert_eq!(ids(&view["brokers"][0]["missing"]), [order.as_str()], "{view}");
    folder.run(&ALL).failed(1, &["1 missing, 0 extra, 0 duplicate; ", nothing]);
}

#[test]
fn a_time_that_all_sides_have_forgotten_is_not_said_to_agree() {
    let (folder, _) = orders_and_clicks();
    // Sent records and marks are kept for seven days.
    let long_ago = ["reconcile", "--since", "9d", "--until", "8d"];
    let run = folder.run(&long_ago);
    run.failed(1, &["nobody can tell", "the topic `order-events` in the broker main, the group billing"]);
    for word in ["BROKER main embedded://, not compared: ", "GROUP billing at main, not compared: "] {
        assert!(run.out.contains(word), "{word}: {run:?}");
    }
    let run = folder.run(&[&["--json"], &long_ago[..]].concat());
    let view: Value = serde_json::from_str(&run.out).expect("an answer");
    assert_eq!((&view["agrees"], &view["groups"][0]["compared"]), (&false.into(), &false.into()), "{view}");
}

/// Bills each order of 10, and gives up the others.
#[cfg(feature = "kafka")]
const BILL: &str = r#"read order; test "$order" = 10 || exit 65; echo '{"topic":"bills","message":10}'"#;

#[cfg(feature = "kafka")]
#[test]
fn what_a_group_made_is_not_extra_and_is_compared_with_what_the_groups_have_done() {
    let prefix = format!("made{}.", std::process::id());
    let folder = Folder::with(&format!(
        "[brokers.main]\nurl = \"{}?prefix={prefix}&partitions=4\"\n[routes.all]\ntopics = [\"*\"]\n\
         [consumers.billing]\ntopics = [\"orders\"]\nsemantics = \"exactly-once\"\n\
         handler = {{ command = [\"sh\", \"-c\", '''{BILL}'''] }}\n\
         [consumers.books]\ntopics = [\"bills\", \"billing-dead\"]\n",
        testkit::servers::url("kafka")
    ));
    let server = folder.serve(&[]);
    for order in [10, 10, 7] {
        let body = format!(r#"{{ "topic": "orders", "message": {order}, "key": "a" }}"#);
        let (status, answer) = server.post(&format!("{}/api/messages/send", server.producer), &body);
        assert_eq!(status, 202, "{answer}");
    }
    // Three orders, two bills and a dead letter, which has the id of its order. While topics are made they cannot be read.
    let look = || folder.run(&[&["--json"], &ALL[..]].concat());
    harness::until(|| {
        let view: Value = serde_json::from_str(&look().out).unwrap_or_default();
        view["brokers"][0]["stored"] == 6 && view["groups"][0]["processed"] == 2
    })
    .unwrap_or_else(|()| panic!("{:?}: {}", look(), server.said()));
    let (view, group) = (compared(&folder, 0, &[]), "books");
    assert_eq!(view["outbox"]["sent"], 3, "{view}");
    assert_eq!(
        (&view["groups"][0]["group"], &view["groups"][0]["sent"]),
        (&group.into(), &2.into()),
        "{view}"
    );
}

#[test]
fn what_goes_past_the_store_is_compared_with_what_the_groups_have_done() {
    let folder = Folder::with(&format!(
        "{SETTINGS}[routes.default]\ntopics = [\"*\"]\n[routes.quick]\ntopics = [\"order-events\"]\nsemantics = \"best-effort\"\n"
    ));
    let server = folder.serve(&[]);
    let id = send(&server, "order-events", "a");
    harness::until(|| compared(&folder, 0, &[])["groups"][0]["processed"] == 1)
        .unwrap_or_else(|()| panic!("{id} was never done: {}", compared(&folder, 0, &[])));
    let view = compared(&folder, 0, &[]);
    assert_eq!((&view["outbox"]["written"], &view["brokers"][0]["stored"]), (&0.into(), &1.into()), "{view}");
}

#[test]
fn a_broker_that_cannot_be_read_is_named() {
    let folder = Folder::with(
        "[brokers.hook]\nurl = \"http://127.0.0.1:9/?allow_loopback=true\"\n\
         [routes.hooks]\ntopics = [\"hooks\"]\n[consumers]\n",
    );
    folder.run(&["send", "hooks", "1"]).answered(&[]);
    folder.run(&ALL).answered(&[
        "BROKER hook",
        "cannot be read: outbox and inbox compared alone",
        "1 not yet",
    ]);
}

#[test]
fn what_cannot_be_asked_is_refused_with_what_can() {
    let folder = Folder::with(
        "[routes.orders]\ntopics = [\"order-*\"]\n[consumers.billing]\ntopics = [\"order-events\"]\n",
    );
    folder.run(&["reconcile"]).failed(5, &["there is no store"]);
    folder.run(&["send", "order-events", "1"]).answered(&[]);
    folder.run(&["reconcile", "--since", "yesterday"]).failed(2, &["2026-05-01T08:00:00Z"]);
    folder.run(&["reconcile", "--since", "1h", "--until", "2h"]).failed(2, &["let it begin before it ends"]);
    folder.run(&["reconcile", "--topic", "users"]).failed(2, &["No route takes the topic `users`"]);
}
