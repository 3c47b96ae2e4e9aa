//! The traps of Google Pub/Sub, each on a real server.

#[allow(dead_code, reason = "the conformance tests use all of it")]
mod pubsub_line;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use broker::pubsub::{Broker, Config};
use broker::{
    Delivery, Examine, Format, Health, Outcome, Outgoing, Plan, Publisher, ReceiveError, Subscriber,
    Subscription,
};
use google_cloud_auth::credentials::anonymous;
use google_cloud_pubsub::client;
use google_cloud_pubsub::model::{self, Encoding, ExpirationPolicy, Schema, SchemaSettings, schema};
use google_cloud_pubsub::subscriber::handler::Handler;
use message::Message;
use pubsub_line::Line;
use testkit::broker::cases::{drain, positions};

/// Long enough for anything that happens at all.
const PATIENCE: Duration = Duration::from_secs(20);

/// The shortest that there is: what was sent into a connection that ended comes again after it.
const LEASE: Duration = Duration::from_secs(10);

/// After several failures the client waits for up to a minute before it opens its stream again.
const REOPENS: Duration = Duration::from_secs(75);

/// No key may be stuck for longer.
const STUCK: Duration = Duration::from_secs(5);

/// Settings for a corner of the server with names of its own.
fn config() -> Config {
    let config = Config::from_url(&testkit::servers::url("pubsub")).expect("its URL can be read");
    let prefix = format!("t{}-", uuid::Uuid::new_v4().simple());
    Config { prefix, groups: vec!["billing".to_owned()], timeout: STUCK, ack_deadline: LEASE, ..config }
}

fn open(config: &Config) -> Broker {
    Broker::open(config.clone()).expect("it can be opened")
}

fn endpoint(config: &Config) -> String {
    format!("http://{}", config.emulator.as_deref().expect("the tests use an emulator"))
}

fn topic_path(config: &Config, topic: &str) -> String {
    format!("projects/{}/topics/{}{topic}", config.project, config.prefix)
}

fn subscription_path(config: &Config, name: &str) -> String {
    format!("projects/{}/subscriptions/{}{name}", config.project, config.prefix)
}

async fn topics(config: &Config) -> client::TopicAdmin {
    let builder = client::TopicAdmin::builder().with_endpoint(endpoint(config));
    builder.with_credentials(anonymous::Builder::new().build()).build().await.expect("a client")
}

async fn subscriptions(config: &Config) -> client::SubscriptionAdmin {
    let builder = client::SubscriptionAdmin::builder().with_endpoint(endpoint(config));
    builder.with_credentials(anonymous::Builder::new().build()).build().await.expect("a client")
}

/// A topic that takes nothing but JSON of one form: the service refuses a whole request for one message that is not.
async fn make_strict_topic(config: &Config, topic: &str) {
    let builder = client::SchemaService::builder().with_endpoint(endpoint(config));
    let schemas =
        builder.with_credentials(anonymous::Builder::new().build()).build().await.expect("a client");
    let definition = r#"{"type":"record","name":"Count","fields":[{"name":"n","type":"int"}]}"#;
    let schema = Schema::new().set_type(schema::Type::Avro).set_definition(definition);
    let request = schemas.create_schema().set_parent(format!("projects/{}", config.project));
    let made = request.set_schema_id(format!("{}counts", config.prefix)).set_schema(schema).send().await;
    let settings =
        SchemaSettings::new().set_schema(made.expect("a schema").name).set_encoding(Encoding::Json);
    let request = topics(config).await.create_topic().set_name(topic_path(config, topic));
    request.set_schema_settings(settings).send().await.expect("a topic");
}

fn outgoing(key: &str, payload: String, seq: i64) -> Outgoing {
    Outgoing::new(Message::new("orders", payload).key(key), seq)
}

fn count(n: i64) -> String {
    format!(r#"{{"n":{n}}}"#)
}

async fn subscribe(broker: &Broker) -> Box<dyn Subscription> {
    broker.subscribe("billing", &["orders".to_owned()]).await.expect("the group can be joined")
}

fn payloads(deliveries: &[Delivery]) -> Vec<&str> {
    deliveries.iter().map(|delivery| std::str::from_utf8(&delivery.message.payload).expect("text")).collect()
}

/// HAZARDS 78: the client pauses a key after a failure, and stays so until it is told to go on.
#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_fails_a_thousand_times_is_never_stuck_and_keeps_its_order() {
    let config = config();
    make_strict_topic(&config, "orders").await;
    let broker = open(&config);
    for n in 0..1_000 {
        let begun = Instant::now();
        let batch = vec![outgoing("k", "no count".to_owned(), n), outgoing("k", count(n), n)];
        let outcomes = broker.publish(batch).await;
        assert!(matches!(&outcomes[..], [Outcome::Rejected { .. }, Outcome::Held]), "{n}: {outcomes:?}");
        let outcomes = broker.publish(vec![outgoing("k", count(n), n)]).await;
        assert_eq!(outcomes, [Outcome::Confirmed], "{n}");
        assert!(begun.elapsed() < STUCK, "{n}: the key was stuck for {:?}", begun.elapsed());
    }
    let deliveries = drain(&mut subscribe(&broker).await, 1_000).await;
    let expected: Vec<_> = (0..1_000).map(count).collect();
    assert_eq!(payloads(&deliveries), expected);
}

/// A request is refused as a whole; the messages that shared it with the guilty one are unharmed.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_the_service_refuses_is_rejected_alone() {
    let config = config();
    make_strict_topic(&config, "orders").await;
    let broker = open(&config);
    let without_key = |payload: String| Outgoing::new(Message::new("orders", payload), 0);
    let batch = vec![
        outgoing("a", count(1), 1),
        outgoing("a", count(2), 2),
        outgoing("a", "no count".to_owned(), 3),
        outgoing("a", count(4), 4),
        outgoing("b", count(5), 5),
        without_key(count(6)),
        without_key("no count".to_owned()),
        without_key(count(7)),
    ];
    let outcomes = broker.publish(batch).await;
    let rejected = |outcome: &Outcome| matches!(outcome, Outcome::Rejected { .. });
    assert!(rejected(&outcomes[2]) && rejected(&outcomes[6]), "{outcomes:?}");
    assert_eq!(outcomes[3], Outcome::Held);
    for place in [0, 1, 4, 5, 7] {
        assert_eq!(outcomes[place], Outcome::Confirmed, "{place}");
    }
    let deliveries = drain(&mut subscribe(&broker).await, 5).await;
    let came: BTreeSet<_> = payloads(&deliveries).into_iter().map(str::to_owned).collect();
    assert_eq!(came, [1, 2, 5, 6, 7].map(count).into());
}

/// What the service would refuse for its attributes never reaches it.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_with_too_much_beside_its_payload_is_rejected_alone() {
    let broker = open(&config());
    let with = |name: &str, value: &str| {
        Outgoing::new(Message::new("orders", "1").key(name.to_owned()).header(name, value), 1)
    };
    let many = (0..101).fold(Message::new("orders", "1"), |message, n| message.header(format!("h{n}"), "x"));
    let batch = vec![
        Outgoing::new(many, 1),
        with(&"n".repeat(257), "x"),
        with("long", &"v".repeat(1_025)),
        with("googlish", "x"),
        with("good", &"v".repeat(1_024)),
    ];
    let outcomes = broker.publish(batch).await;
    let rejected = |outcome: &Outcome| matches!(outcome, Outcome::Rejected { .. });
    assert!(outcomes[..4].iter().all(rejected), "{outcomes:?}");
    assert_eq!(outcomes[4], Outcome::Confirmed);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_away_is_unreachable_and_nobody_has_to_open_anything_when_it_is_back() {
    let config = config();
    let line = Line::to(config.emulator.clone().expect("the tests use an emulator")).await;
    let broker = open(&Config { emulator: Some(line.place()), ..config });
    let batch: Vec<_> = (0..20).map(|n| outgoing(&format!("k{}", n % 4), count(n), n)).collect();
    let away = line.cut();
    let outcomes = broker.publish(batch.clone()).await;
    let blameless = |outcome: &Outcome| {
        matches!(outcome, Outcome::Unreachable { .. } | Outcome::Unconfirmed { .. } | Outcome::Held)
    };
    assert!(outcomes.iter().all(blameless), "{outcomes:?}");
    let refused = broker.subscribe("billing", &["orders".to_owned()]).await.err();
    assert!(matches!(refused, Some(ReceiveError::Unreachable(_))), "{refused:?}");
    drop(away);
    let outcomes = broker.publish(batch).await;
    assert!(outcomes.iter().all(|outcome| *outcome == Outcome::Confirmed), "{outcomes:?}");
    assert_eq!(drain(&mut subscribe(&broker).await, 20).await.len(), 20);
}

/// Clients of gRPC refuse large answers unless they are told otherwise.
#[tokio::test(flavor = "multi_thread")]
async fn the_largest_payload_arrives_and_a_larger_one_is_rejected() {
    let config = config();
    let broker = open(&config);
    let of = |size: usize| outgoing("a", "x".repeat(size), 1);
    let outcomes = broker.publish(vec![of(config.max_payload), of(config.max_payload + 1)]).await;
    assert!(matches!(&outcomes[..], [Outcome::Confirmed, Outcome::Rejected { .. }]), "{outcomes:?}");
    let deliveries = drain(&mut subscribe(&broker).await, 1).await;
    assert_eq!(deliveries[0].message.payload.len(), config.max_payload);
}

/// The client keeps an outage to itself, and after a long one it is in no hurry.
#[tokio::test(flavor = "multi_thread")]
async fn a_member_that_hears_nothing_notices_that_the_service_is_away() {
    let config = config();
    let line = Line::to(config.emulator.clone().expect("the tests use an emulator")).await;
    let broker = open(&Config { emulator: Some(line.place()), ..config.clone() });
    let mut member = subscribe(&broker).await;
    let away = line.block();
    let said = tokio::time::timeout(PATIENCE, member.receive(1)).await.expect("it says something");
    assert!(matches!(said, Err(ReceiveError::Unreachable(_))), "{said:?}");
    drop(away);
    member.close().await;
    assert_eq!(open(&config).publish(vec![outgoing("a", count(1), 1)]).await, [Outcome::Confirmed]);
    assert_eq!(payloads(&drain(&mut subscribe(&broker).await, 1).await), [count(1)]);
}

/// Nothing that was confirmed is lost, and no key is out of order, while connections end again and again.
#[tokio::test(flavor = "multi_thread")]
async fn order_is_kept_while_connections_end_again_and_again() {
    const KEYS: i64 = 20;
    const EACH: i64 = 50;
    let config = config();
    let line = Line::to(config.emulator.clone().expect("the tests use an emulator")).await;
    let broker = open(&Config { emulator: Some(line.place()), ..config });
    assert_eq!(broker.publish(vec![outgoing("first", count(0), 0)]).await, [Outcome::Confirmed]);
    let mut subscription = subscribe(&broker).await;
    let publisher = broker.clone();
    let publishing = tokio::spawn(async move {
        // As a relay does: what was not confirmed is sent again, in order.
        let mut left: BTreeMap<i64, Vec<i64>> = (0..KEYS).map(|key| (key, (0..EACH).collect())).collect();
        while !left.is_empty() {
            let next = left.iter().flat_map(|(key, left)| left.iter().take(5).map(|n| (*key, *n)));
            let next: Vec<_> = next.collect();
            let batch = next.iter().map(|(key, n)| outgoing(&format!("k{key}"), count(*n), *n)).collect();
            let outcomes = publisher.publish(batch).await;
            for ((key, n), outcome) in next.into_iter().zip(outcomes) {
                if outcome == Outcome::Confirmed {
                    left.get_mut(&key).expect("it was sent").retain(|left| *left != n);
                }
            }
            left.retain(|_, left| !left.is_empty());
        }
    });
    let cutting = async {
        while !publishing.is_finished() {
            let away = line.cut();
            tokio::time::sleep(Duration::from_millis(100)).await;
            drop(away);
            tokio::time::sleep(Duration::from_millis(300)).await;
        }
    };
    let receiving = async {
        let mut seen: BTreeMap<String, Vec<String>> = BTreeMap::new();
        while seen.values().map(Vec::len).sum::<usize>() <= (KEYS * EACH) as usize {
            let more = tokio::time::timeout(REOPENS, subscription.receive(100)).await;
            let more = more.unwrap_or_else(|_| panic!("{seen:?}")).expect("it goes on by itself");
            subscription.acknowledge(&positions(&more)).await.expect("an acknowledgement is taken");
            for delivery in more {
                let key = delivery.message.key.clone().expect("every message has a key");
                let payload = String::from_utf8(delivery.message.payload.to_vec()).expect("text");
                let seen = seen.entry(key).or_default();
                // A message that was stored twice is recognised by the inbox.
                if !seen.contains(&payload) {
                    seen.push(payload);
                }
            }
        }
        seen
    };
    let (_, mut seen) = tokio::join!(cutting, receiving);
    seen.remove("first");
    let expected: Vec<_> = (0..EACH).map(count).collect();
    assert_eq!(seen.len(), KEYS as usize);
    for (key, seen) in seen {
        assert_eq!(seen, expected, "{key}");
    }
}

/// The service forgets what nobody has asked for, unless it was told who will ask.
#[tokio::test(flavor = "multi_thread")]
async fn a_declared_group_gets_what_was_published_before_it_came_and_another_does_not() {
    let config = config();
    let broker = open(&config);
    assert_eq!(broker.publish(vec![outgoing("a", count(1), 1)]).await, [Outcome::Confirmed]);
    let topics = ["orders".to_owned()];
    let mut undeclared = broker.subscribe("shipping", &topics).await.expect("the group can be joined");
    assert_eq!(broker.publish(vec![outgoing("a", count(2), 2)]).await, [Outcome::Confirmed]);
    assert_eq!(payloads(&drain(&mut subscribe(&broker).await, 2).await), [count(1), count(2)]);
    assert_eq!(payloads(&drain(&mut undeclared, 1).await), [count(2)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn exactly_once_subscriptions_confirm_their_acknowledgements() {
    let config = Config { exactly_once: true, ..config() };
    let broker = open(&config);
    let batch = (0..10).map(|n| outgoing("a", count(n), n)).collect();
    assert_eq!(broker.publish(batch).await, vec![Outcome::Confirmed; 10]);
    let mut first = subscribe(&broker).await;
    assert_eq!(drain(&mut first, 10).await.len(), 10);
    first.close().await;
    let found = subscriptions(&config).await;
    let found = found.get_subscription().set_subscription(subscription_path(&config, "billing.orders"));
    assert!(found.send().await.expect("it is there").enable_exactly_once_delivery);
    let mut second = subscribe(&broker).await;
    let again = tokio::time::timeout(Duration::from_millis(500), second.receive(10)).await;
    assert!(again.is_err(), "what is confirmed does not come again");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_of_somebody_else_is_read() {
    let config = config();
    let broker = open(&config);
    assert_eq!(broker.publish(vec![outgoing("a", count(1), 1)]).await, [Outcome::Confirmed]);
    let theirs = client::Publisher::builder(topic_path(&config, "orders")).with_endpoint(endpoint(&config));
    let theirs = theirs.with_credentials(anonymous::Builder::new().build()).build().await.expect("a client");
    let message = model::Message::new().set_data("theirs").set_ordering_key("b");
    let id = theirs.publish(message.set_attributes([("tenant", "x")])).await.expect("it is taken");
    let deliveries = drain(&mut subscribe(&broker).await, 2).await;
    let found = deliveries.iter().find(|delivery| delivery.seq.is_none()).expect("it has no number of ours");
    assert_eq!(&found.message.payload[..], b"theirs");
    assert_eq!(found.message.key.as_deref(), Some("b"));
    assert_eq!(found.message.headers["tenant"], "x");
    assert_eq!(found.message.id, message::MessageId::from_content("orders", id.as_bytes()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_of_ours_is_read_by_somebody_else() {
    let config = config();
    let broker = open(&config);
    let ours = Message::new("orders", "{}").key("k").kind("Placed").header("tenant", "x");
    let event = Outgoing { format: Format::CloudEvents { source: "/shop".into() }, ..Outgoing::new(ours, 7) };
    assert_eq!(broker.publish(vec![event.clone()]).await, [Outcome::Confirmed]);
    let theirs = client::Subscriber::builder().with_endpoint(endpoint(&config));
    let theirs = theirs.with_credentials(anonymous::Builder::new().build()).build().await.expect("a client");
    let mut stream = theirs.subscribe(subscription_path(&config, "billing.orders")).build();
    let next = tokio::time::timeout(PATIENCE, stream.next()).await.expect("it comes");
    let (message, handler): (model::Message, Handler) = next.expect("the stream goes on").expect("no error");
    handler.ack();
    assert_eq!(message.ordering_key, "k");
    assert_eq!(&message.data[..], b"{}");
    let expected = [
        ("ce-id", event.message.id.to_string()),
        ("ce-source", "/shop".to_owned()),
        ("ce-type", "Placed".to_owned()),
        ("Content-Type", "application/json".to_owned()),
        ("tenant", "x".to_owned()),
        ("postrider-seq", "7".to_owned()),
    ];
    for (name, value) in expected {
        assert_eq!(message.attributes.get(name), Some(&value), "{name}: {:?}", message.attributes);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_subscription_without_order_is_refused_with_the_way_out() {
    let config = config();
    let path = topic_path(&config, "orders");
    topics(&config).await.create_topic().set_name(&path).send().await.expect("a topic");
    let request = subscriptions(&config).await.create_subscription();
    let request = request.set_name(subscription_path(&config, "billing.orders")).set_topic(&path);
    request.set_ack_deadline_seconds(10).send().await.expect("a subscription");
    let refused = open(&config).subscribe("billing", &["orders".to_owned()]).await.err();
    let Some(ReceiveError::Misconfigured(error)) = refused else { panic!("{refused:?}") };
    assert!(error.contains("without message ordering") && error.contains("anew"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_doctor_finds_what_is_missing_and_what_is_unsafe() {
    let config = config();
    let strict = open(&Config { create: false, ..config.clone() });
    let plan = Plan {
        topics: vec!["orders".to_owned()],
        groups: vec![("billing".to_owned(), vec!["orders".to_owned()])],
        ordered: true,
        horizon: Duration::from_secs(60),
        recognised: None,
        max_payload: 1 << 20,
    };
    let missing = strict.examine(&plan).await;
    assert_eq!(missing.iter().filter(|finding| finding.health == Health::Broken).count(), 2, "{missing:?}");
    let broker = open(&config);
    assert_eq!(broker.publish(vec![outgoing("a", count(1), 1)]).await, [Outcome::Confirmed]);
    let sound = strict.examine(&plan).await;
    assert!(sound.iter().all(|finding| finding.health < Health::Broken), "{sound:?}");
    let unsafe_request = subscriptions(&config).await.create_subscription();
    let unsafe_request = unsafe_request
        .set_name(subscription_path(&config, "shipping.orders"))
        .set_topic(topic_path(&config, "orders"))
        .set_ack_deadline_seconds(10)
        .set_expiration_policy(
            ExpirationPolicy::new().set_ttl(google_cloud_wkt::Duration::clamp(2_678_400, 0)),
        );
    unsafe_request.send().await.expect("a subscription");
    let plan = Plan { groups: vec![("shipping".to_owned(), vec!["orders".to_owned()])], ..plan };
    let findings = strict.examine(&plan).await;
    let said =
        |text: &str| findings.iter().any(|finding| finding.text.contains(text) && finding.fix.is_some());
    assert!(said("no message ordering") && said("31 days"), "{findings:?}");
}
