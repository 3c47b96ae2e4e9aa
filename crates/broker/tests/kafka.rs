//! The traps of Kafka, each against a real server, and other people's clients on both ends.

mod kafka_faults;
mod kafka_world;

use std::collections::BTreeMap;
use std::process::Command;
use std::time::Duration;

use broker::kafka::{Broker, Config};
use broker::{Examine, Health, Outcome, Outgoing, Plan, Publisher, Subscriber};
use kafka_world::{World, confirmed, java, said};
use message::Message;
use rdkafka::producer::{BaseProducer, BaseRecord, Producer};

/// Long enough for anything that happens at all.
const PATIENCE: Duration = Duration::from_secs(30);

fn outgoing(topic: &str, key: &str, seq: i64) -> Outgoing {
    Outgoing::new(Message::new(topic, seq.to_string()).key(key), seq)
}

#[tokio::test]
async fn one_of_a_thousand_that_is_too_large_is_rejected_and_the_rest_are_unharmed() {
    let world = World::new();
    // The limit of the topic, not ours, and one that a batch of a few dozen messages already exceeds.
    world.make("orders", 4, &[("max.message.bytes", "20000")]).await;
    let broker = world.broker("");
    let message = |seq: i64| {
        let size = if seq == 500 { 25_000 } else { 350 };
        Outgoing::new(Message::new("orders", vec![b'x'; size]).key(format!("key-{seq}")), seq)
    };
    let outcomes = broker.publish((0..1_000).map(message).collect()).await;
    let Outcome::Rejected { error } = &outcomes[500] else { panic!("{:?}", outcomes[500]) };
    assert!(error.contains("20000") && error.contains("max.message.bytes"), "{error}");
    let others = outcomes.iter().enumerate().filter(|(seq, _)| *seq != 500);
    assert!(others.clone().all(|(_, outcome)| *outcome == Outcome::Confirmed), "{:?}", outcomes[0]);
    assert_eq!(world.read("orders", 999).len(), 999);
}

#[tokio::test]
async fn a_topic_that_vanishes_stops_alone_and_can_come_back() {
    let world = World::new();
    for topic in ["orders", "refunds"] {
        world.make(topic, 1, &[]).await;
    }
    let broker = world.broker("&create=false&timeout=6s");
    confirmed(&broker.publish(vec![outgoing("orders", "a", 1), outgoing("refunds", "a", 1)]).await);
    world.delete("orders").await;
    let gone = testkit::eventually(PATIENCE, || async {
        let outcomes = broker.publish(vec![outgoing("orders", "a", 2), outgoing("refunds", "a", 2)]).await;
        assert_eq!(outcomes[1], Outcome::Confirmed, "{outcomes:?}");
        matches!(outcomes[0], Outcome::Misconfigured { .. })
    });
    assert!(gone.await, "nobody noticed that the topic is gone");
    world.make("orders", 1, &[]).await;
    let back = testkit::eventually(PATIENCE, || async {
        broker.publish(vec![outgoing("orders", "a", 3)]).await == [Outcome::Confirmed]
    });
    assert!(back.await, "nobody noticed that the topic is back");
}

#[tokio::test]
async fn a_message_without_a_key_is_rejected_alone_by_a_compacted_topic() {
    let world = World::new();
    world.make("state", 1, &[("cleanup.policy", "compact")]).await;
    let broker = world.broker("");
    let keyless = Outgoing::new(Message::new("state", "1"), 1);
    let outcomes = broker.publish(vec![outgoing("state", "a", 1), keyless, outgoing("state", "b", 2)]).await;
    assert_eq!([&outcomes[0], &outcomes[2]], [&Outcome::Confirmed; 2]);
    assert!(
        matches!(&outcomes[1], Outcome::Rejected { error } if error.contains("compacted")),
        "{outcomes:?}"
    );
}

#[tokio::test]
async fn a_server_that_is_not_there_is_unreachable_in_time_and_the_password_stays_secret() {
    let config = Config::from_url("kafka://ann:hush@127.0.0.1:9?timeout=1s").expect("the URL is right");
    let broker = Broker::open(config).expect("it need not be there");
    assert!(!format!("{broker:?}").contains("hush"));
    let outcomes = broker.publish(vec![outgoing("orders", "a", 1)]).await;
    let Outcome::Unreachable { error } = &outcomes[0] else { panic!("{outcomes:?}") };
    assert!(!error.contains("hush"), "{error}");
    let refused = broker.subscribe("billing", &["orders".to_owned()]).await.err().expect("nobody is there");
    assert!(matches!(refused, broker::ReceiveError::Unreachable(_)), "{refused:?}");
}

#[tokio::test]
async fn only_what_a_transaction_committed_is_received() {
    let world = World::new();
    world.make("orders", 1, &[]).await;
    let topic = world.name("orders");
    let mut settings = world.client();
    let producer: BaseProducer =
        settings.set("transactional.id", &topic).create().expect("a producer can be made");
    producer.init_transactions(PATIENCE).expect("transactions can be used");
    for (payload, commit) in [("aborted", false), ("committed", true)] {
        producer.begin_transaction().expect("a transaction can be begun");
        producer.send(BaseRecord::to(&topic).key("a").payload(payload)).expect("it is queued");
        producer.flush(PATIENCE).expect("it is sent");
        let ended = match commit {
            true => producer.commit_transaction(PATIENCE),
            false => producer.abort_transaction(PATIENCE),
        };
        ended.expect("a transaction can be ended");
    }
    let came = world.receive(&world.broker(""), "orders", 1).await;
    assert_eq!(&came[0].message.payload[..], b"committed");
}

#[tokio::test]
async fn kcat_reads_what_we_publish_and_we_read_what_it_produces() {
    let world = World::new();
    let broker = world.broker("&partitions=1");
    let message = Message::new("orders", r#"{"total":42}"#).key("customer-7").kind("Placed");
    let message = message.header("traceparent", "00-1-2-01");
    confirmed(&broker.publish(vec![Outgoing::new(message.clone(), 7)]).await);
    let topic = world.name("orders");
    let kcat = || {
        let mut kcat = Command::new("kcat");
        kcat.args(["-b", world.servers(), "-t", &topic]);
        kcat
    };
    let read = said(kcat().args(["-C", "-e", "-q", "-o", "beginning", "-f", "%k|%s|%h\n"]), "");
    assert!(read.starts_with(r#"customer-7|{"total":42}|"#), "{read}");
    let id = format!("postrider-id={}", message.id);
    for header in [
        &id,
        "postrider-seq=7",
        "postrider-type=Placed",
        "traceparent=00-1-2-01",
        "content-type=application/json",
    ] {
        assert!(read.contains(header), "{header}: {read}");
    }
    said(
        kcat().args(["-P", "-K", ":", "-H", "tenant=x", "-H", "content-type=text/plain"]),
        "customer-8:hello\n",
    );
    let came = world.receive(&broker, "orders", 2).await;
    assert_eq!(came[0].message, message);
    let theirs = &came[1].message;
    assert_eq!((theirs.key.as_deref(), &theirs.payload[..]), (Some("customer-8"), &b"hello"[..]));
    assert_eq!((theirs.headers["tenant"].as_str(), theirs.content_type.as_str()), ("x", "text/plain"));
    let again = world.receive(&broker, "orders", 2).await;
    assert_eq!(again[1].message.id, theirs.id, "a redelivery is the same message");
}

#[tokio::test]
async fn javas_clients_put_a_key_where_we_do_and_read_our_headers() {
    let world = World::new();
    let broker = world.broker("&partitions=16");
    let keys: Vec<String> = (0..40).map(|n| format!("customer-{n} ö")).collect();
    let ours = keys.iter().zip(0..).map(|(key, seq)| outgoing("orders", key, seq));
    confirmed(&broker.publish(ours.collect()).await);
    let (topic, servers) = (world.name("orders"), world.servers());
    let lines: String = keys.iter().map(|key| format!("{key}|theirs\n")).collect();
    let mut produce = java("org.apache.kafka.tools.ConsoleProducer");
    produce.args(["--bootstrap-server", servers, "--topic", &topic, "--property", "parse.key=true"]);
    said(produce.args(["--property", "key.separator=|"]), &lines);
    let mut partitions: BTreeMap<String, Vec<i32>> = BTreeMap::new();
    for (key, partition) in world.read("orders", 80) {
        partitions.entry(key).or_default().push(partition);
    }
    assert_eq!(partitions.len(), 40);
    assert!(partitions.values().all(|found| found.len() == 2 && found[0] == found[1]), "{partitions:?}");
    let mut consume = java("org.apache.kafka.tools.consumer.ConsoleConsumer");
    consume.args([
        "--bootstrap-server",
        servers,
        "--topic",
        &topic,
        "--from-beginning",
        "--max-messages",
        "80",
    ]);
    let read = said(consume.args(["--property", "print.headers=true", "--property", "print.key=true"]), "");
    assert!(read.contains("postrider-seq:39") && read.contains("customer-39 ö"), "{read}");
    assert_eq!(read.matches("theirs").count(), 40);
    let came = world.receive(&broker, "orders", 80).await;
    assert_eq!(came.iter().filter(|delivery| delivery.seq.is_none()).count(), 40, "theirs came too");
}

#[tokio::test]
async fn what_is_given_back_comes_before_all_that_was_already_fetched() {
    let world = World::new();
    let broker = world.broker("&partitions=1");
    confirmed(&broker.publish((0..5_000).map(|seq| outgoing("orders", "a", seq)).collect()).await);
    let mut reader = broker.subscribe("billing", &["orders".to_owned()]).await.expect("it can be joined");
    let mut expected = 0;
    while expected < 5_000 {
        let came = tokio::time::timeout(PATIENCE, reader.receive(300)).await.expect("in time");
        let came = came.expect("messages can be received");
        let seqs: Vec<i64> = came.iter().filter_map(|delivery| delivery.seq).collect();
        assert_eq!(seqs, (expected..).take(seqs.len()).collect::<Vec<_>>(), "in order, without a gap");
        let middle = came.len() / 2;
        let positions: Vec<_> = came.iter().map(|delivery| delivery.position).collect();
        reader.acknowledge(&positions[..=middle]).await.expect("it is taken");
        expected = seqs[middle] + 1;
        if let Some(back) = positions.get(middle + 1) {
            reader.give_back(&[*back]).await.expect("it can be given back");
        }
    }
    reader.close().await;
}

#[tokio::test]
async fn the_doctor_says_what_is_unsafe_and_how_to_mend_it() {
    let world = World::new();
    world.make("orders", 3, &[("max.message.bytes", "20000")]).await;
    let broker = world.broker("&create=false");
    let topics = vec!["orders".to_owned(), "lost".to_owned()];
    let plan = Plan { topics, max_payload: 100_000, ..Plan::default() };
    let findings = broker.examine(&plan).await;
    let about = |name: &str, text: &str| {
        let named = findings.iter().filter(|finding| finding.about.contains(name));
        named
            .into_iter()
            .find(|finding| finding.text.contains(text))
            .unwrap_or_else(|| panic!("{findings:?}"))
    };
    assert_eq!(about("cluster", "answer").health, Health::Good);
    assert_eq!(about("lost", "not there").health, Health::Broken);
    assert_eq!(about("orders", "one copy").health, Health::Doubtful);
    let fix = about("orders", "20000 bytes").fix.clone().expect("there is one");
    assert!(fix.contains("max.message.bytes=165536"), "{fix}");
    let nobody = Config::from_url("kafka://127.0.0.1:9?timeout=1s").expect("the URL is right");
    let findings = Broker::open(nobody).expect("it need not be there").examine(&plan).await;
    assert_eq!(findings[0].health, Health::Broken, "{findings:?}");
}

#[tokio::test]
async fn a_new_topic_of_ours_takes_the_largest_payload_that_we_do() {
    let world = World::new();
    let broker = world.broker("&max_payload=3MB");
    let large = Message::new("films", vec![b'x'; 3_000_000]).key("a");
    confirmed(&broker.publish(vec![Outgoing::new(large, 1)]).await);
}
