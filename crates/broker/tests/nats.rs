//! What is peculiar to NATS JetStream, on a real server: streams that vanish or would lose messages, confirmations and
//! deliveries that are lost on the way, and duplicates.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use async_nats::jetstream;
use async_nats::jetstream::context::Context;
use async_nats::jetstream::stream::{Config as Stream, DiscardPolicy, RetentionPolicy, StorageType};
use broker::nats::{Broker, Config};
use broker::{
    Delivery, Examine, Health, Outcome, Outgoing, Plan, Position, Publisher, ReceiveError, Subscriber,
    Subscription,
};
use message::Message;
use testkit::servers::{Own, url};
use testkit::{Line, within};
use uuid::Uuid;

/// Long enough for anything that happens at all.
const PATIENCE: Duration = Duration::from_secs(30);

/// A prefix that nobody else uses.
fn prefix() -> String {
    format!("t{}", Uuid::new_v4().simple())
}

fn open(server: &str, prefix: &str, more: &str) -> Broker {
    let url = format!("{server}?prefix={prefix}&partitions=4&timeout=2s&lease=1s{more}");
    Broker::open(Config::from_url(&url).expect("it is one")).expect("it can be opened")
}

/// A line to the server, and the URL of whoever comes by it.
async fn line_to(server: &str) -> (Line, String) {
    let line = Line::to(server.trim_start_matches("nats://")).await;
    let url = format!("nats://{}", line.place());
    (line, url)
}

async fn server(url: &str) -> Context {
    jetstream::new(async_nats::connect(url).await.expect("the server is there"))
}

async fn stored(server: &Context, stream: &str) -> u64 {
    let mut stream = server.get_stream(stream).await.expect("it is there");
    stream.info().await.expect("it can be looked at").state.messages
}

fn outgoing(seq: i64) -> Outgoing {
    let key = format!("key-{}", seq % 10);
    Outgoing::new(Message::new("orders", seq.to_string()).key(key), seq)
}

fn batch(from: i64, count: i64) -> Vec<Outgoing> {
    (from..from + count).map(outgoing).collect()
}

fn all_confirmed(outcomes: &[Outcome]) -> bool {
    outcomes.iter().all(|outcome| *outcome == Outcome::Confirmed)
}

async fn subscribe(broker: &Broker, group: &str) -> Box<dyn Subscription> {
    broker.subscribe(group, &["orders".to_owned()]).await.expect("the group can be joined")
}

async fn receive(subscription: &mut Box<dyn Subscription>, count: usize) -> Vec<Delivery> {
    let mut deliveries = Vec::new();
    while deliveries.len() < count {
        let more = tokio::time::timeout(PATIENCE, subscription.receive(count - deliveries.len())).await;
        let more = more.unwrap_or_else(|_| panic!("{} of {count} came", deliveries.len()));
        deliveries.extend(more.expect("messages can be received"));
    }
    deliveries
}

fn positions(deliveries: &[Delivery]) -> Vec<Position> {
    deliveries.iter().map(|delivery| delivery.position).collect()
}

fn numbers(deliveries: &[Delivery]) -> Vec<i64> {
    let mut numbers: Vec<i64> = deliveries.iter().filter_map(|delivery| delivery.seq).collect();
    numbers.sort_unstable();
    numbers
}

#[tokio::test]
async fn what_is_confirmed_after_the_stream_was_deleted_is_in_the_stream() {
    let (server_url, prefix) = (url("nats"), prefix());
    let (server, broker) = (server(&server_url).await, open(&server_url, &prefix, ""));
    for round in 0..20 {
        assert!(all_confirmed(&broker.publish(batch(round * 100, 100)).await), "round {round}");
        assert_eq!(stored(&server, &prefix).await, 100, "round {round}");
        server.delete_stream(&prefix).await.expect("it can be deleted");
    }
}

#[tokio::test]
async fn a_stream_that_is_deleted_and_not_to_be_made_is_misconfigured_until_it_is_there_again() {
    let (server_url, prefix) = (url("nats"), prefix());
    let server = server(&server_url).await;
    assert!(all_confirmed(&open(&server_url, &prefix, "").publish(batch(0, 1)).await));
    let strict = open(&server_url, &prefix, "&create=false");
    assert!(all_confirmed(&strict.publish(batch(1, 1)).await));
    server.delete_stream(&prefix).await.expect("it can be deleted");
    let outcomes = strict.publish(batch(2, 3)).await;
    for outcome in &outcomes {
        let Outcome::Misconfigured { error } = outcome else { panic!("{outcomes:?}") };
        assert!(error.contains(&prefix) && error.contains("create=true"), "{error}");
    }
    let Err(ReceiveError::Misconfigured(error)) = strict.subscribe("billing", &["orders".to_owned()]).await
    else {
        panic!("there is nothing to listen to")
    };
    assert!(error.contains(&prefix), "{error}");
    let made = Stream { name: prefix.clone(), subjects: vec![format!("{prefix}.>")], ..Stream::default() };
    server.create_stream(made).await.expect("a stream can be made");
    assert!(all_confirmed(&strict.publish(batch(2, 3)).await));
    assert_eq!(stored(&server, &prefix).await, 3);
}

#[tokio::test]
async fn a_topic_that_the_stream_does_not_keep_is_misconfigured_even_where_somebody_listens_to_everything() {
    let (server_url, prefix) = (url("nats"), prefix());
    let server = server(&server_url).await;
    let subjects = vec![format!("{prefix}.orders.*")];
    let made = Stream { name: prefix.clone(), subjects, ..Stream::default() };
    server.create_stream(made).await.expect("a stream can be made");
    // With a listener there is no "no responders", and no answer either.
    let listener = server.client().subscribe(format!("{prefix}.>")).await.expect("everybody may listen");
    let lost = Outgoing::new(Message::new("refunds", "1"), 1);
    let outcomes = open(&server_url, &prefix, "").publish(vec![lost, outgoing(2)]).await;
    let Outcome::Misconfigured { error } = &outcomes[0] else { panic!("{outcomes:?}") };
    assert!(error.contains("refunds"), "{error}");
    assert_eq!(outcomes[1], Outcome::Confirmed);
    drop(listener);
}

#[tokio::test]
async fn a_message_is_stored_twice_only_when_the_window_is_over_or_it_is_sent_again_on_purpose() {
    let (server_url, prefix) = (url("nats"), prefix());
    let (server, broker) = (server(&server_url).await, open(&server_url, &prefix, "&duplicates=2s"));
    let first = outgoing(1);
    let sent = Instant::now();
    for _ in 0..3 {
        assert_eq!(broker.publish(vec![first.clone()]).await, [Outcome::Confirmed]);
    }
    assert_eq!(stored(&server, &prefix).await, 1, "a duplicate is stored once and confirmed each time");
    assert_eq!(broker.guarantees().deduplication, Some(Duration::from_secs(2)));
    let again = Outgoing { delivery: 1, ..first.clone() };
    assert_eq!(broker.publish(vec![again]).await, [Outcome::Confirmed]);
    assert_eq!(stored(&server, &prefix).await, 2, "another delivery is another message");
    within(PATIENCE, "the window is over", || async {
        assert_eq!(broker.publish(vec![first.clone()]).await, [Outcome::Confirmed]);
        (stored(&server, &prefix).await == 3).then_some(())
    })
    .await;
    assert!(sent.elapsed() >= Duration::from_secs(2), "after {:?}", sent.elapsed());
    let mut subscription = subscribe(&broker, "billing").await;
    let came = receive(&mut subscription, 3).await;
    assert_eq!(came.iter().map(|delivery| delivery.delivery).collect::<Vec<_>>(), [0, 1, 0]);
    assert!(came.iter().all(|delivery| delivery.message == *first.message), "all are the same message");
}

#[tokio::test]
async fn a_message_whose_confirmation_was_lost_is_stored_once() {
    let (server_url, prefix) = (url("nats"), prefix());
    let server = server(&server_url).await;
    let (line, line_url) = line_to(&server_url).await;
    let broker = open(&line_url, &prefix, "");
    assert!(all_confirmed(&broker.publish(batch(0, 1)).await));
    line.deafen();
    let lost: Vec<Outgoing> =
        (1..=1000).map(|seq| Outgoing::new(Message::new("orders", seq.to_string()), seq)).collect();
    let outcomes = broker.publish(lost.clone()).await;
    let unconfirmed = |outcome: &Outcome| matches!(outcome, Outcome::Unconfirmed { .. });
    assert!(outcomes.iter().all(unconfirmed), "{:?}", outcomes[0]);
    assert_eq!(stored(&server, &prefix).await, 1001, "they were stored, and nobody knows");
    line.cut();
    within(PATIENCE, "the publisher goes on", || async {
        all_confirmed(&broker.publish(lost.clone()).await).then_some(())
    })
    .await;
    assert_eq!(stored(&server, &prefix).await, 1001);
}

#[tokio::test]
async fn messages_whose_acknowledgements_were_lost_come_again() {
    let (server_url, prefix) = (url("nats"), prefix());
    let (line, line_url) = line_to(&server_url).await;
    let (near, far) = (open(&server_url, &prefix, ""), open(&line_url, &prefix, ""));
    assert!(all_confirmed(&near.publish(batch(0, 1000)).await));
    let mut first = subscribe(&far, "billing").await;
    let came = receive(&mut first, 1000).await;
    line.silence();
    let refused = first.acknowledge(&positions(&came)).await;
    assert!(matches!(refused, Err(ReceiveError::Unreachable(_))), "{refused:?}");
    drop(first);
    let mut second = subscribe(&near, "billing").await;
    let again = receive(&mut second, 1000).await;
    assert_eq!(numbers(&again), (0..1000).collect::<Vec<_>>());
    second.acknowledge(&positions(&again)).await.expect("an acknowledgement is taken");
    assert!(
        tokio::time::timeout(Duration::from_millis(300), second.receive(1)).await.is_err(),
        "all are done"
    );
}

#[tokio::test]
async fn an_acknowledgement_that_was_not_confirmed_is_said_again_with_the_next() {
    let (server_url, prefix) = (url("nats"), prefix());
    let (line, line_url) = line_to(&server_url).await;
    let (near, far) = (open(&server_url, &prefix, "&lease=30s"), open(&line_url, &prefix, "&lease=30s"));
    assert!(all_confirmed(&near.publish(batch(0, 20)).await));
    let mut subscription = subscribe(&far, "billing").await;
    let came = receive(&mut subscription, 20).await;
    line.silence();
    assert!(subscription.acknowledge(&positions(&came[..10])).await.is_err());
    line.cut();
    let mut tries = 0;
    while subscription.acknowledge(&positions(&came)).await.is_err() {
        tries += 1;
        assert!(tries < 20, "it cannot be said");
    }
    subscription.close().await;
    let mut second = subscribe(&near, "billing").await;
    assert!(tokio::time::timeout(Duration::from_secs(1), second.receive(1)).await.is_err(), "all are done");
}

#[tokio::test]
async fn nothing_overtakes_a_delivery_that_was_lost_on_its_way() {
    let (server_url, prefix) = (url("nats"), prefix());
    let (line, line_url) = line_to(&server_url).await;
    let (near, far) = (open(&server_url, &prefix, ""), open(&line_url, &prefix, "&lease=3s"));
    let mut subscription = subscribe(&far, "billing").await;
    let publishing = tokio::spawn(async move {
        for round in 0..40 {
            let outcomes = near.publish(batch(round * 50, 50)).await;
            assert!(all_confirmed(&outcomes), "{outcomes:?}");
        }
    });
    let mut last: BTreeMap<String, i64> = BTreeMap::new();
    let mut seen = BTreeSet::new();
    let begun = Instant::now();
    let mut cut = 0;
    while seen.len() < 2000 {
        assert!(begun.elapsed() < 3 * PATIENCE, "{} came", seen.len());
        match tokio::time::timeout(PATIENCE, subscription.receive(100)).await.expect("something comes") {
            Ok(deliveries) => {
                for delivery in &deliveries {
                    let (key, seq) =
                        (delivery.message.key.clone().expect("a key"), delivery.seq.expect("a number"));
                    if seen.insert(seq) {
                        let before = last.insert(key.clone(), seq);
                        assert!(before.is_none_or(|before| before < seq), "{key}: {seq} after {before:?}");
                    }
                }
                let _ = subscription.acknowledge(&positions(&deliveries)).await;
            }
            Err(ReceiveError::Unreachable(_)) => {
                subscription.close().await;
                subscription = within(PATIENCE, "it can be joined again", || async {
                    far.subscribe("billing", &["orders".to_owned()]).await.ok()
                })
                .await;
            }
            Err(error) => panic!("{error}"),
        }
        if seen.len() / 250 > cut {
            cut = seen.len() / 250;
            line.cut();
        }
    }
    publishing.await.expect("all were published");
}

#[tokio::test]
async fn a_stream_that_would_lose_messages_or_confirm_none_is_refused_and_a_doubtful_one_is_named() {
    let server_url = url("nats");
    let server = server(&server_url).await;
    let plain = || Stream { storage: StorageType::File, ..Stream::default() };
    let refused: [(Stream, &str); 2] = [
        (Stream { no_ack: true, ..plain() }, "no_ack"),
        (Stream { storage: StorageType::Memory, ..plain() }, "memory"),
    ];
    for (stream, expected) in refused {
        let prefix = prefix();
        let stream = Stream { name: prefix.clone(), subjects: vec![format!("{prefix}.>")], ..stream };
        server.create_stream(stream).await.expect("a stream can be made");
        let broker = open(&server_url, &prefix, "");
        let outcomes = broker.publish(batch(0, 1)).await;
        let [Outcome::Misconfigured { error }] = &outcomes[..] else { panic!("{expected}: {outcomes:?}") };
        assert!(error.contains(expected), "{error}");
        let worst = broker.examine(&Plan::default()).await.into_iter().max_by_key(|finding| finding.health);
        let worst = worst.expect("something was found");
        assert!(worst.health == Health::Broken && worst.text.contains(expected), "{worst:?}");
        assert!(worst.fix.is_some());
    }
    let doubtful: [(Stream, &str); 4] = [
        (Stream { max_bytes: 1 << 20, discard: DiscardPolicy::Old, ..plain() }, "discard old"),
        (Stream { retention: RetentionPolicy::Interest, ..plain() }, "interest"),
        (Stream { max_age: Duration::from_secs(3600), ..plain() }, "after 1h"),
        (Stream { duplicate_window: Duration::from_secs(60), ..plain() }, "duplicates for 1m"),
    ];
    for (stream, expected) in doubtful {
        let prefix = prefix();
        let stream = Stream { name: prefix.clone(), subjects: vec![format!("{prefix}.>")], ..stream };
        server.create_stream(stream).await.expect("a stream can be made");
        let plan = Plan { horizon: Duration::from_secs(24 * 3600), max_payload: 1024, ..Plan::default() };
        let findings = open(&server_url, &prefix, "").examine(&plan).await;
        let found = findings.iter().find(|finding| finding.text.contains(expected));
        let found = found.unwrap_or_else(|| panic!("{expected} is not among {findings:#?}"));
        assert!(found.health == Health::Doubtful && found.fix.is_some(), "{found:?}");
    }
}

#[tokio::test]
async fn a_stream_of_others_that_forgets_too_early_is_told_before_anything_is_sent() {
    let (server_url, prefix) = (url("nats"), prefix());
    let server = server(&server_url).await;
    let stream = |seconds| Stream {
        name: prefix.clone(),
        subjects: vec![format!("{prefix}.>")],
        duplicate_window: Duration::from_secs(seconds),
        ..Stream::default()
    };
    server.create_stream(stream(60)).await.expect("a stream can be made");
    let (line, line_url) = line_to(&server_url).await;
    let broker = open(&line_url, &prefix, "&duplicates=1d&timeout=1s");
    let hour = Duration::from_secs(3_600);
    assert_eq!(broker.guarantees().deduplication, Some(24 * hour), "nobody has looked yet");
    line.silence();
    let unheard = broker.recognises(hour).await;
    assert!(matches!(unheard, Err(Outcome::Unreachable { .. })), "{unheard:?}");
    line.cut();
    let refused = within(PATIENCE, "the line is back", || async {
        match broker.recognises(hour).await {
            Err(Outcome::Misconfigured { error }) => Some(error),
            Err(Outcome::Unreachable { .. }) => None,
            other => panic!("{other:?}"),
        }
    })
    .await;
    let plan = Plan { recognised: Some(hour), ..Plan::default() };
    let findings = broker.examine(&plan).await;
    let found =
        findings.iter().find(|finding| finding.text.contains("duplicates for 1m")).expect("the doctor");
    assert_eq!(found.health, Health::Broken);
    for words in [&found.text, found.fix.as_ref().expect("a fix")] {
        assert!(refused.contains(words.as_str()), "the doctor says {words:?}, and the publisher {refused:?}");
    }
    server.update_stream(stream(7_200)).await.expect("it can be raised");
    assert_eq!(broker.recognises(hour).await, Ok(()), "what was mended is seen");
}

#[tokio::test]
async fn a_sealed_stream_is_refused() {
    let (server_url, prefix) = (url("nats"), prefix());
    let (server, broker) = (server(&server_url).await, open(&server_url, &prefix, ""));
    assert!(all_confirmed(&broker.publish(batch(0, 1)).await));
    let mut stream = server.get_stream(&prefix).await.expect("it is there");
    let sealed = Stream { sealed: true, ..stream.info().await.expect("it can be looked at").config.clone() };
    server.update_stream(sealed).await.expect("it can be sealed");
    // Found out by the answer, and then by looking.
    for _ in 0..2 {
        let outcomes = broker.publish(batch(1, 1)).await;
        let [Outcome::Misconfigured { error }] = &outcomes[..] else { panic!("{outcomes:?}") };
        assert!(error.contains("sealed"), "{error}");
    }
}

#[tokio::test]
async fn a_full_stream_blames_no_message() {
    let (server_url, prefix) = (url("nats"), prefix());
    let server = server(&server_url).await;
    let made = Stream {
        name: prefix.clone(),
        subjects: vec![format!("{prefix}.>")],
        max_messages: 10,
        discard: DiscardPolicy::New,
        ..Stream::default()
    };
    server.create_stream(made).await.expect("a stream can be made");
    let broker = open(&server_url, &prefix, "");
    assert!(all_confirmed(&broker.publish(batch(0, 10)).await));
    let outcomes = broker.publish(batch(10, 1)).await;
    assert!(matches!(&outcomes[..], [Outcome::Unreachable { .. }]), "{outcomes:?}");
    server.get_stream(&prefix).await.expect("it is there").purge().await.expect("it can be emptied");
    assert!(all_confirmed(&broker.publish(batch(10, 1)).await));
}

#[tokio::test]
async fn the_number_of_partitions_cannot_be_changed_by_mistake() {
    let (server_url, prefix) = (url("nats"), prefix());
    assert!(all_confirmed(&open(&server_url, &prefix, "").publish(batch(0, 1)).await));
    let config = Config::from_url(&format!("{server_url}?prefix={prefix}&partitions=8")).expect("it is one");
    let outcomes = Broker::open(config).expect("it can be opened").publish(batch(1, 1)).await;
    let [Outcome::Misconfigured { error }] = &outcomes[..] else { panic!("{outcomes:?}") };
    assert!(error.contains("4 partitions"), "{error}");
}

#[tokio::test]
async fn a_new_group_begins_where_it_is_told_to() {
    let (server_url, prefix) = (url("nats"), prefix());
    let (server, broker) = (server(&server_url).await, open(&server_url, &prefix, ""));
    for seq in 0..10 {
        assert!(all_confirmed(&broker.publish(batch(seq, 1)).await));
    }
    let replay = open(&server_url, &prefix, "&start=seq:6");
    let mut subscription = subscribe(&replay, "from-six").await;
    assert_eq!(numbers(&receive(&mut subscription, 5).await), [5, 6, 7, 8, 9]);
    let stream = server.get_stream(&prefix).await.expect("it is there");
    let eighth = stream.get_raw_message(8).await.expect("it is kept").time;
    let since = chrono::DateTime::from_timestamp_nanos(
        i64::try_from(eighth.unix_timestamp_nanos()).expect("soon enough"),
    );
    let since = since.to_rfc3339_opts(chrono::SecondsFormat::Nanos, true);
    let replay = open(&server_url, &prefix, &format!("&start=time:{since}"));
    let mut subscription = subscribe(&replay, "since-the-eighth").await;
    assert_eq!(numbers(&receive(&mut subscription, 3).await), [7, 8, 9]);
}

#[tokio::test]
async fn messages_of_other_clients_are_read_and_are_the_same_when_they_come_again() {
    let (server_url, prefix) = (url("nats"), prefix());
    let (server, broker) = (server(&server_url).await, open(&server_url, &prefix, ""));
    let mut first = subscribe(&broker, "billing").await;
    let mut headers = async_nats::HeaderMap::new();
    headers.insert("tenant", "x");
    headers.insert("Nats-Msg-Id", "theirs");
    let sent = server.publish_with_headers(format!("{prefix}.orders.3"), headers, "{}".into()).await;
    sent.expect("it can be sent").await.expect("it is stored");
    server
        .publish(format!("{prefix}.orders.3"), "bare".into())
        .await
        .expect("it can be sent")
        .await
        .expect("it is stored");
    let came = receive(&mut first, 2).await;
    assert_eq!(came[0].message.headers.iter().collect::<Vec<_>>(), [(&"tenant".to_owned(), &"x".to_owned())]);
    assert_eq!((came[0].seq, came[0].message.key.as_deref()), (None, None));
    assert_eq!(&came[1].message.payload[..], b"bare");
    first.close().await;
    let mut second = subscribe(&broker, "billing").await;
    let again = receive(&mut second, 2).await;
    let messages =
        |deliveries: &[Delivery]| deliveries.iter().map(|one| one.message.clone()).collect::<Vec<_>>();
    assert_eq!(messages(&came), messages(&again));
}

/// The client that the nats command is made of, in Go, built on first use.
fn go_client(folder: &Path) -> PathBuf {
    let client = folder.join("nats_client");
    let mut go = Command::new("go");
    go.args(["build", "-o"]).arg(&client).arg(".").env("CGO_ENABLED", "0");
    go.current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/nats_client"));
    assert!(go.status().expect("go is installed").success(), "the client cannot be built");
    client
}

#[tokio::test]
async fn the_go_client_reads_what_we_publish_and_we_read_what_it_publishes() {
    let (server_url, prefix) = (url("nats"), prefix());
    let broker = open(&server_url, &prefix, "");
    let folder = tempfile::tempdir().expect("a folder for the client");
    let client = go_client(folder.path());
    let run = |words: &[&str]| {
        let output = Command::new(&client).arg(&server_url).args(words).output().expect("it can be run");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("it speaks UTF-8")
    };
    let message = Message::new("orders", r#"{"total":42}"#).key("customer-7").kind("Placed");
    let message = message.header("traceparent", "00-1-2-01");
    assert!(all_confirmed(&broker.publish(vec![Outgoing::new(message.clone(), 7)]).await));
    let read = run(&["sub", &format!("{prefix}.orders.*"), "1"]);
    assert!(read.starts_with(&format!("{prefix}.orders.")) && read.contains(r#" {"total":42}"#), "{read}");
    for header in [
        &format!("postrider-id: {}", message.id),
        "postrider-seq: 7",
        "postrider-key: customer-7",
        "postrider-type: Placed",
        "content-type: application/json",
        "traceparent: 00-1-2-01",
    ] {
        assert!(read.contains(&format!("  {header}\n")), "{header}: {read}");
    }
    let theirs = ["pub", &format!("{prefix}.orders.0"), "hello", "postrider-key=customer-8", "tenant=x"];
    run(&theirs);
    let came = receive(&mut subscribe(&broker, "billing").await, 2).await;
    let find = |key: &str| {
        let of_key = |delivery: &&Delivery| delivery.message.key.as_deref() == Some(key);
        &came.iter().find(of_key).expect("it came").message
    };
    assert_eq!(find("customer-7"), &message);
    let theirs = find("customer-8");
    assert_eq!((&theirs.payload[..], theirs.headers["tenant"].as_str()), (&b"hello"[..], "x"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_away_at_the_start_is_found_when_it_comes() {
    let own = tokio::task::spawn_blocking(|| Own::start("nats")).await.expect("it starts");
    tokio::task::block_in_place(|| own.stop());
    let broker = open(own.url(), &prefix(), "");
    let outcomes = broker.publish(batch(0, 11)).await;
    assert!(outcomes[..10].iter().all(|one| matches!(one, Outcome::Unreachable { .. })), "{outcomes:?}");
    assert_eq!(outcomes[10], Outcome::Held);
    let joined = broker.subscribe("billing", &["orders".to_owned()]).await;
    assert!(matches!(joined, Err(ReceiveError::Unreachable(_))));
    let findings = broker.examine(&Plan::default()).await;
    assert!(matches!(&findings[..], [finding] if finding.health == Health::Broken), "{findings:?}");
    tokio::task::block_in_place(|| own.resume());
    within(PATIENCE, "the server is found", || async {
        all_confirmed(&broker.publish(batch(0, 11)).await).then_some(())
    })
    .await;
}
