//! The traps of SQS, on a server that speaks it.

#[path = "sqs/proxy.rs"]
mod proxy;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use broker::sqs::{Broker, Config};
use broker::{
    Delivery, Examine, Format, Health, Outcome, Outgoing, Plan, Position, Publisher, ReceiveError,
    Subscriber, Subscription,
};
use message::Message;
use serde_json::{Value, json};
use uuid::Uuid;

/// Long enough for anything that happens at all.
const PATIENCE: Duration = Duration::from_secs(30);

fn config() -> Config {
    let config = Config::from_url(&testkit::servers::url("sqs")).expect("the server's URL can be read");
    Config { prefix: format!("t{}-", Uuid::new_v4().simple()), ..config }
}

fn open(config: &Config) -> Broker {
    Broker::open(config.clone()).expect("the settings make sense")
}

/// The same queues by way of somebody who meddles.
async fn meddled(config: &Config, meddle: Arc<proxy::Meddle>) -> Broker {
    let endpoint = config.endpoint.as_deref().expect("the server has an endpoint");
    let endpoint = Some(proxy::start(endpoint, meddle).await);
    open(&Config { endpoint, ..config.clone() })
}

/// A client of the same server that knows nothing of Postrider.
async fn stranger(config: &Config) -> aws_sdk_sqs::Client {
    let login = config.login.as_ref().expect("the server's URL has a login");
    let credentials =
        aws_sdk_sqs::config::Credentials::new(&login.key, login.secret.reveal(), None, None, "test");
    let loaded = aws_config::defaults(aws_config::BehaviorVersion::latest())
        .region(aws_sdk_sqs::config::Region::new(config.region.clone()))
        .endpoint_url(config.endpoint.as_deref().expect("the server has an endpoint"))
        .credentials_provider(credentials)
        .load()
        .await;
    aws_sdk_sqs::Client::new(&loaded)
}

fn outgoing(n: i64) -> Outgoing {
    Outgoing::new(Message::new("orders", n.to_string()).key(format!("key-{n}")), n)
}

async fn subscribe(broker: &Broker) -> Box<dyn Subscription> {
    broker.subscribe("billing", &["orders".to_owned()]).await.expect("the queue is there")
}

fn positions(deliveries: &[Delivery]) -> Vec<Position> {
    deliveries.iter().map(|delivery| delivery.position).collect()
}

/// Receives and finishes until `count` different messages have come.
async fn drain(broker: &Broker, count: usize) -> Vec<Delivery> {
    let mut subscription = subscribe(broker).await;
    let mut came: Vec<Delivery> = Vec::new();
    let mut different = BTreeSet::new();
    while different.len() < count {
        let more = tokio::time::timeout(PATIENCE, subscription.receive(100)).await;
        let more = more.unwrap_or_else(|_| panic!("{} of {count} came", different.len()));
        let more = more.expect("messages can be received");
        subscription.acknowledge(&positions(&more)).await.expect("an acknowledgement is taken");
        different.extend(more.iter().map(|delivery| delivery.message.id.0));
        came.extend(more);
    }
    subscription.close().await;
    came
}

/// How many messages are in the queue of the topic `orders`, hidden ones too.
async fn left(config: &Config) -> u64 {
    use aws_sdk_sqs::types::QueueAttributeName as Name;
    let client = stranger(config).await;
    let asked = client.get_queue_attributes().queue_url(queue_url(&client, config).await);
    let attributes = asked.attribute_names(Name::All).send().await.expect("it is there").attributes;
    let attributes = attributes.expect("it has attributes");
    let count = |name: &Name| attributes[name].parse::<u64>().expect("a number");
    count(&Name::ApproximateNumberOfMessages) + count(&Name::ApproximateNumberOfMessagesNotVisible)
}

async fn queue_url(client: &aws_sdk_sqs::Client, config: &Config) -> String {
    let end = if config.fifo { ".fifo" } else { "" };
    let name = format!("{}orders{end}", config.prefix);
    let found = client.get_queue_url().queue_name(name).send().await.expect("the queue is there");
    found.queue_url.expect("it has a URL")
}

/// Fails every fifth entry of a batch before SQS sees it, the same one twice at most, and drops every seventh from the
/// answer after SQS has done as it was asked, the same one once. Counts what it sees, by the text that `about` finds in an entry.
struct Unreliable {
    operation: &'static str,
    about: fn(&Value) -> String,
    seen: Mutex<Seen>,
}

#[derive(Default)]
struct Seen {
    entries: u64,
    /// How often each was asked for, and how often that came to nothing.
    asked: BTreeMap<String, u64>,
    failed: BTreeMap<String, u64>,
    dropped: BTreeMap<String, u64>,
}

impl Unreliable {
    fn new(operation: &'static str, about: fn(&Value) -> String) -> Arc<Self> {
        Arc::new(Self { operation, about, seen: Mutex::default() })
    }

    fn meddle(self: &Arc<Self>) -> Arc<proxy::Meddle> {
        let this = Arc::clone(self);
        Arc::new(move |operation: &str, asked: &mut Value| this.change(operation, asked))
    }

    fn change(&self, operation: &str, asked: &mut Value) -> proxy::Edit {
        if operation != self.operation {
            return Box::new(|_| {});
        }
        let mut seen = self.seen.lock().expect("nobody panics while holding it");
        let entries = asked["Entries"].as_array_mut().expect("a batch has entries");
        let (mut failed, mut dropped) = (Vec::new(), Vec::new());
        entries.retain(|entry| {
            seen.entries += 1;
            let (number, about) = (seen.entries, (self.about)(entry));
            let asked = seen.asked.entry(about.clone()).or_default();
            *asked += 1;
            let (first, spared) = (*asked == 1, *asked > 2);
            let fails = number % 5 == 0 && !spared;
            if fails {
                *seen.failed.entry(about).or_default() += 1;
                failed.push(json!({ "Id": entry["Id"], "Code": "InternalError", "SenderFault": false }));
            } else if number % 7 == 0 && first {
                *seen.dropped.entry(about).or_default() += 1;
                dropped.push(entry["Id"].clone());
            }
            !fails
        });
        Box::new(move |answer| {
            if let Some(successful) = answer.body["Successful"].as_array_mut() {
                successful.retain(|entry| !dropped.contains(&entry["Id"]));
            }
            match answer.body["Failed"].as_array_mut() {
                Some(more) => more.extend(failed),
                None => answer.body["Failed"] = Value::from(failed),
            }
        })
    }
}

/// Sends until all are confirmed, as a relay does: what is not confirmed again, and nothing else.
async fn relay(broker: &Broker, all: Vec<Outgoing>, size: usize) {
    let mut left = all;
    while !left.is_empty() {
        let mut again = Vec::new();
        for batch in left.chunks(size) {
            let outcomes = broker.publish(batch.to_vec()).await;
            for (outgoing, outcome) in batch.iter().zip(outcomes) {
                match outcome {
                    Outcome::Confirmed => {}
                    Outcome::Deferred { .. } | Outcome::Unconfirmed { .. } => again.push(outgoing.clone()),
                    other => panic!("{other:?}"),
                }
            }
        }
        left = again;
    }
}

/// Hazard 74.
#[tokio::test(flavor = "multi_thread")]
async fn of_a_batch_that_failed_in_part_only_that_part_is_sent_again_and_nothing_is_lost() {
    let config = config();
    let unreliable = Unreliable::new("SendMessageBatch", |entry| entry["MessageBody"].to_string());
    let broker = meddled(&config, unreliable.meddle()).await;
    relay(&broker, (0..3_000).map(outgoing).collect(), 200).await;
    let came = drain(&open(&config), 3_000).await;
    let left = left(&config).await;
    let seen = unreliable.seen.lock().expect("nobody panics while holding it");
    assert!(!seen.failed.is_empty() && !seen.dropped.is_empty());
    for (about, asked) in &seen.asked {
        let of = |counts: &BTreeMap<String, u64>| counts.get(about).copied().unwrap_or_default();
        assert_eq!(
            *asked,
            1 + of(&seen.failed) + of(&seen.dropped),
            "message {about} was sent for no reason"
        );
    }
    // Only what SQS had stored without saying so is there twice: a standard queue does not recognise it.
    let twice = u64::try_from(came.len()).expect("a small number") + left - 3_000;
    assert_eq!(twice, seen.dropped.values().sum::<u64>());
}

/// Hazards 74 and 76: the same on a FIFO queue, which recognises what it has.
#[tokio::test(flavor = "multi_thread")]
async fn on_a_fifo_queue_what_was_not_confirmed_is_sent_again_and_stored_once_in_order() {
    let config = Config { fifo: true, ..config() };
    let unreliable = Unreliable::new("SendMessageBatch", |entry| entry["MessageBody"].to_string());
    let broker = meddled(&config, unreliable.meddle()).await;
    for round in 0..20 {
        // One message of each key and call, as the relay sends where batches have no order.
        let batch = (0..20).map(|key| {
            let n = round * 20 + key;
            Outgoing::new(Message::new("orders", n.to_string()).key(format!("key-{key}")), n)
        });
        relay(&broker, batch.collect(), 20).await;
    }
    let came = drain(&open(&config), 400).await;
    assert!(!unreliable.seen.lock().expect("nobody panics while holding it").dropped.is_empty());
    assert_eq!((came.len(), left(&config).await), (400, 0), "each message is stored once");
    let mut last: BTreeMap<Option<String>, Option<i64>> = BTreeMap::new();
    for delivery in came {
        let before = last.insert(delivery.message.key.clone(), delivery.seq).flatten();
        assert!(
            before < delivery.seq,
            "{:?}: {before:?} came before {:?}",
            delivery.message.key,
            delivery.seq
        );
    }
}

/// Hazards 70 and 76: sending again on purpose is not a duplicate.
#[tokio::test(flavor = "multi_thread")]
async fn a_fifo_queue_lets_a_deliberate_delivery_through_and_no_accidental_one() {
    let config = Config { fifo: true, ..config() };
    let broker = open(&config);
    let first = outgoing(1);
    let on_purpose = Outgoing { delivery: 1, ..first.clone() };
    for sent in [first.clone(), first.clone(), on_purpose.clone(), on_purpose] {
        assert_eq!(broker.publish(vec![sent]).await, [Outcome::Confirmed]);
    }
    let mut subscription = subscribe(&broker).await;
    let came = tokio::time::timeout(PATIENCE, subscription.receive(10)).await.expect("they come");
    let came = came.expect("messages can be received");
    assert_eq!(came.iter().map(|delivery| delivery.delivery).collect::<Vec<_>>(), [0, 1]);
    assert!(came.iter().all(|delivery| delivery.message.id == first.message.id));
}

/// Hazard 75.
#[tokio::test(flavor = "multi_thread")]
async fn messages_of_every_size_and_of_all_bytes_arrive_and_only_those_too_large_are_rejected() {
    let config = config();
    let broker = open(&config);
    let limit = config.max_message;
    let bytes = |size: usize, seed: usize| -> Vec<u8> {
        (0..size).map(|n| (n.wrapping_mul(31).wrapping_add(seed) % 251) as u8).collect()
    };
    let mut messages: Vec<Message> = (0..40).map(|n| Message::new("orders", bytes(n * n * 97, n))).collect();
    messages.extend((0..10).map(|n| Message::new("orders", "x".repeat(90_000 * n))));
    messages.push(Message::new("orders", "null \0, bell \u{7}, \u{FFFE} and \u{FFFF}, \r\n, ü"));
    messages
        .push((0..30).fold(Message::new("orders", "1"), |message, n| message.header(format!("h{n}"), "v")));
    messages.push(Message::new("orders", "x".repeat(limit + 1)));
    messages.push(Message::new("orders", "x".repeat(limit - 10)));
    // Becomes too large as text.
    messages.push(Message::new("orders", bytes(limit - 1_000, 7)));
    let batch: Vec<_> = messages.iter().cloned().map(|message| Outgoing::new(message, 0)).collect();
    let outcomes = broker.publish(batch).await;
    let possible = messages.len() - 3;
    for (message, outcome) in messages.iter().zip(&outcomes).take(possible) {
        assert_eq!(*outcome, Outcome::Confirmed, "{} bytes", message.payload.len());
    }
    let rejected = outcomes[possible..].iter().all(|outcome| matches!(outcome, Outcome::Rejected { .. }));
    assert!(rejected, "{:?}", &outcomes[possible..]);
    let came: BTreeMap<_, _> =
        drain(&broker, possible).await.into_iter().map(|came| (came.message.id.0, came.message)).collect();
    for message in &messages[..possible] {
        assert_eq!(came[&message.id.0].payload, message.payload);
        assert_eq!(came[&message.id.0].headers, message.headers);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_is_refused_as_a_whole_harms_only_the_message_that_is_to_blame() {
    let config = config();
    let meddle = |operation: &str, asked: &mut Value| -> proxy::Edit {
        let poison = |entry: &Value| entry["MessageBody"] == "13";
        let entries = asked["Entries"].as_array().cloned().unwrap_or_default();
        if operation != "SendMessageBatch" || !entries.iter().any(poison) {
            return Box::new(|_| {});
        }
        asked["Entries"] = json!([]);
        Box::new(|answer| {
            answer.status = 400;
            answer.body = json!({ "__type": "com.amazonaws.sqs#InvalidMessageContents", "message": "no" });
        })
    };
    let broker = meddled(&config, Arc::new(meddle)).await;
    let outcomes = broker.publish((0..30).map(outgoing).collect()).await;
    for (n, outcome) in outcomes.iter().enumerate() {
        match n {
            13 => assert!(matches!(outcome, Outcome::Rejected { .. }), "{outcome:?}"),
            _ => assert_eq!(*outcome, Outcome::Confirmed),
        }
    }
    assert_eq!(drain(&open(&config), 29).await.len(), 29);
}

/// Hazard 77.
#[tokio::test(flavor = "multi_thread")]
async fn a_handler_of_thirty_seconds_has_its_message_for_itself() {
    let config = Config { visibility: Duration::from_secs(10), ..config() };
    let (here, there) = (open(&config), open(&config));
    assert_eq!(here.publish(vec![outgoing(1)]).await, [Outcome::Confirmed]);
    let mut slow = subscribe(&here).await;
    let came = slow.receive(1).await.expect("messages can be received");
    let mut other = subscribe(&there).await;
    let work = tokio::time::timeout(Duration::from_secs(30), other.receive(1)).await;
    assert!(work.is_err(), "another got it too: {work:?}");
    slow.acknowledge(&positions(&came)).await.expect("an acknowledgement is taken");
    assert_eq!(left(&config).await, 0);
}

/// Hazard 77: who has lost a message does not hold on to it.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_was_lost_is_let_go() {
    let config = Config { visibility: Duration::from_secs(3), ..config() };
    let renewals = Arc::new(Mutex::new(0_u32));
    let counted = Arc::clone(&renewals);
    let refuse = move |operation: &str, asked: &mut Value| -> proxy::Edit {
        if operation != "ChangeMessageVisibilityBatch" {
            return Box::new(|_| {});
        }
        *counted.lock().expect("nobody panics while holding it") += 1;
        let id = asked["Entries"][0]["Id"].clone();
        asked["Entries"] = json!([]);
        Box::new(move |answer| {
            let failed = json!({ "Id": id, "Code": "ReceiptHandleIsInvalid", "SenderFault": true });
            answer.body = json!({ "Successful": [], "Failed": [failed] });
        })
    };
    let broker = meddled(&config, Arc::new(refuse)).await;
    assert_eq!(broker.publish(vec![outgoing(1)]).await, [Outcome::Confirmed]);
    let mut first = subscribe(&broker).await;
    let lost = first.receive(1).await.expect("messages can be received");
    let mut second = subscribe(&open(&config)).await;
    let came = tokio::time::timeout(PATIENCE, second.receive(1)).await.expect("it comes");
    assert_eq!(came.expect("messages can be received")[0].message, lost[0].message);
    first.acknowledge(&positions(&lost)).await.expect("it is no error to be late");
    assert_eq!(left(&config).await, 1, "the one that has it is still at work");
    assert_eq!(*renewals.lock().expect("nobody panics while holding it"), 1, "it asks once");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_acknowledgement_that_failed_in_part_is_said_again_for_that_part() {
    let config = config();
    let unreliable = Unreliable::new("DeleteMessageBatch", |entry| entry["ReceiptHandle"].to_string());
    let broker = meddled(&config, unreliable.meddle()).await;
    relay(&broker, (0..100).map(outgoing).collect(), 100).await;
    let came = drain(&broker, 100).await;
    assert_eq!((came.len(), left(&config).await), (100, 0));
    let seen = unreliable.seen.lock().expect("nobody panics while holding it");
    assert!(!seen.failed.is_empty() && !seen.dropped.is_empty());
    for (about, asked) in &seen.asked {
        let of = |counts: &BTreeMap<String, u64>| counts.get(about).copied().unwrap_or_default();
        assert_eq!(*asked, 1 + of(&seen.failed) + of(&seen.dropped), "said again for no reason");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_poll_that_was_still_on_its_way_gives_back_what_it_gets() {
    let config = Config { visibility: Duration::from_secs(600), ..config() };
    let broker = open(&config);
    let mut first = subscribe(&broker).await;
    let nothing = tokio::time::timeout(Duration::from_millis(300), first.receive(1)).await;
    assert!(nothing.is_err(), "there is nothing yet");
    // Its poll waits on; whoever leaves now must not take the next message along for ten minutes.
    first.close().await;
    assert_eq!(broker.publish(vec![outgoing(1)]).await, [Outcome::Confirmed]);
    assert_eq!(drain(&open(&config), 1).await.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_that_was_removed_is_made_again_for_who_may_and_missed_by_who_may_not() {
    let config = config();
    let broker = open(&config);
    assert_eq!(broker.publish(vec![outgoing(1)]).await, [Outcome::Confirmed]);
    let strict = open(&Config { create: false, ..config.clone() });
    assert_eq!(strict.publish(vec![outgoing(2)]).await, [Outcome::Confirmed]);
    let client = stranger(&config).await;
    let queue = queue_url(&client, &config).await;
    client.delete_queue().queue_url(queue).send().await.expect("it is removed");
    let missed = strict.publish(vec![outgoing(3)]).await;
    assert!(
        matches!(&missed[..], [Outcome::Misconfigured { error }] if error.contains("orders")),
        "{missed:?}"
    );
    let first = broker.publish(vec![outgoing(3)]).await;
    assert!(matches!(first[..], [Outcome::Unreachable { .. }]), "{first:?}");
    assert_eq!(broker.publish(vec![outgoing(3)]).await, [Outcome::Confirmed]);
    assert_eq!(drain(&broker, 1).await[0].seq, Some(3));
}

#[tokio::test(flavor = "multi_thread")]
async fn two_topics_that_would_share_a_queue_are_refused() {
    let broker = open(&config());
    let sent = |topic: &str| Outgoing::new(Message::new(topic, "1"), 1);
    assert_eq!(broker.publish(vec![sent("orders.eu")]).await, [Outcome::Confirmed]);
    let outcomes = broker.publish(vec![sent("orders-eu"), sent("orders.eu")]).await;
    let [Outcome::Misconfigured { error }, Outcome::Confirmed] = &outcomes[..] else {
        panic!("{outcomes:?}")
    };
    assert!(error.contains("`orders.eu`") && error.contains("`orders-eu`"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn while_sqs_is_away_nobody_is_to_blame_and_no_secret_is_told() {
    let url = "sqs://key:hush@eu-central-1?endpoint=http://127.0.0.1:1&timeout=2s";
    let broker = Broker::open(Config::from_url(url).expect("it is one")).expect("opening asks nobody");
    let outcomes = broker.publish(vec![outgoing(1), outgoing(2)]).await;
    assert!(
        matches!(&outcomes[..], [Outcome::Unreachable { .. }, Outcome::Unreachable { .. }]),
        "{outcomes:?}"
    );
    let Err(refused) = broker.subscribe("billing", &["orders".to_owned()]).await else {
        panic!("nobody is there")
    };
    assert!(matches!(refused, ReceiveError::Unreachable(_)), "{refused}");
    let findings = broker.examine(&Plan { topics: vec!["orders".to_owned()], ..Plan::default() }).await;
    assert!(findings.iter().any(|finding| finding.health == Health::Broken), "{findings:?}");
    assert!(!format!("{broker:?}{outcomes:?}{refused}{findings:?}").contains("hush"));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_others_send_is_read_and_what_we_send_others_can_read() {
    let config = Config { fifo: true, ..config() };
    let broker = open(&config);
    let mut subscription = subscribe(&broker).await;
    let client = stranger(&config).await;
    let queue = queue_url(&client, &config).await;
    let send = client.send_message().queue_url(&queue).message_body("hello").message_group_id("customer-7");
    send.message_deduplication_id("1").send().await.expect("it is sent");
    let came = subscription.receive(1).await.expect("messages can be received");
    let message = &came[0].message;
    assert_eq!((message.key.as_deref(), &message.payload[..]), (Some("customer-7"), &b"hello"[..]));
    subscription.acknowledge(&positions(&came)).await.expect("an acknowledgement is taken");
    subscription.close().await;

    let event =
        Message::new("orders", "{\"n\":1}").key("customer-8").kind("Placed").header("traceparent", "00-1");
    let format = Format::CloudEvents { source: "/shop".into() };
    let sent = [outgoing(5), Outgoing { format, ..Outgoing::new(event.clone(), 6) }];
    assert_eq!(broker.publish(sent.to_vec()).await, [Outcome::Confirmed, Outcome::Confirmed]);
    let asked = client.receive_message().queue_url(&queue).max_number_of_messages(10);
    let asked = asked.message_attribute_names("All").wait_time_seconds(5).send().await.expect("it answers");
    let texts: BTreeMap<String, String> = asked
        .messages()
        .iter()
        .flat_map(|message| message.message_attributes.iter().flatten())
        .map(|(name, value)| (name.clone(), value.string_value.clone().unwrap_or_default()))
        .collect();
    assert_eq!(texts["postrider-id"], sent[0].message.id.to_string());
    assert_eq!(
        (texts["postrider-key"].as_str(), texts["content-type"].as_str()),
        ("key-5", "application/json")
    );
    assert_eq!((texts["ce_id"].clone(), texts["ce_type"].as_str()), (event.id.to_string(), "Placed"));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_doctor_names_what_cannot_be_kept_and_how_to_mend_it() {
    let config = config();
    let plan = Plan {
        topics: vec!["orders".to_owned()],
        groups: vec![
            ("a".to_owned(), vec!["orders".to_owned()]),
            ("b".to_owned(), vec!["orders".to_owned()]),
        ],
        ordered: true,
        horizon: Duration::from_secs(3_600),
        recognised: None,
        max_payload: 1 << 20,
    };
    let strict = open(&Config { create: false, ..config.clone() });
    let findings = strict.examine(&plan).await;
    let broken = |text: &str| {
        findings
            .iter()
            .any(|found| found.health == Health::Broken && found.text.contains(text) && found.fix.is_some())
    };
    assert!(
        broken("no order of keys") && broken("a, b take messages") && broken("has no queue"),
        "{findings:?}"
    );
    let fifo = open(&Config { fifo: true, ..config });
    assert_eq!(fifo.publish(vec![outgoing(1)]).await, [Outcome::Confirmed]);
    let plan = Plan { groups: Vec::new(), ..plan };
    let findings = fifo.examine(&plan).await;
    assert!(findings.iter().all(|found| found.health != Health::Broken), "{findings:?}");
    assert!(findings.iter().any(|found| found.text.starts_with("FIFO")), "{findings:?}");
    assert!(findings.iter().any(|found| found.text.contains("5 minutes")), "{findings:?}");
}
