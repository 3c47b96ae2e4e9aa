//! A corner of a shared Kafka: names of its own, and what tests look at it with.

use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use broker::kafka::{Broker, Config};
use broker::{Browse, Delivery, Outcome, Span, Subscriber};
use chrono::{DateTime, TimeDelta, Utc};
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::message::Message as _;
use rdkafka::producer::{BaseProducer, BaseRecord, Producer};
use rdkafka::{ClientConfig, Offset, TopicPartitionList};
use uuid::Uuid;

const PATIENCE: Duration = Duration::from_secs(30);

/// Where `cargo xtask servers up kafka` keeps the jars.
const JARS: &str = "kafka-4.1.1";

/// Topics and groups with a prefix that nobody else has.
pub(crate) struct World {
    url: String,
    prefix: String,
}

impl World {
    pub(crate) fn new() -> Self {
        Self { url: testkit::servers::url("kafka"), prefix: format!("t{}.", Uuid::new_v4().simple()) }
    }

    /// A broker with more parameters in its URL.
    pub(crate) fn broker(&self, more: &str) -> Broker {
        let url = format!("{}?prefix={}{more}", self.url, self.prefix);
        Broker::open(Config::from_url(&url).expect("the URL is right")).expect("librdkafka can be used")
    }

    pub(crate) fn servers(&self) -> &str {
        self.url.trim_start_matches("kafka://")
    }

    pub(crate) fn name(&self, topic: &str) -> String {
        format!("{}{topic}", self.prefix)
    }

    pub(crate) fn client(&self) -> ClientConfig {
        let mut client = ClientConfig::new();
        client.set("bootstrap.servers", self.servers());
        client
    }

    fn admin(&self) -> AdminClient<DefaultClientContext> {
        self.client().create().expect("a client can be made")
    }

    pub(crate) async fn make(&self, topic: &str, partitions: i32, settings: &[(&str, &str)]) {
        let name = self.name(topic);
        let topic = NewTopic::new(&name, partitions, TopicReplication::Fixed(1));
        let topic = settings.iter().fold(topic, |topic, (setting, value)| topic.set(setting, value));
        let made = self.admin().create_topics([&topic], &AdminOptions::new()).await;
        made.expect("Kafka answers")[0].as_ref().expect("the topic can be made");
    }

    pub(crate) async fn delete(&self, topic: &str) {
        let gone = self.admin().delete_topics(&[&self.name(topic)], &AdminOptions::new()).await;
        gone.expect("Kafka answers")[0].as_ref().expect("the topic can be deleted");
    }

    /// The key and partition of the first `count` records, read by a bare client.
    pub(crate) fn read(&self, topic: &str, count: usize) -> Vec<(String, i32)> {
        let mut settings = self.client();
        let consumer: BaseConsumer =
            settings.set("group.id", self.name("bare")).create().expect("a client can be made");
        let topic = self.name(topic);
        let seen = consumer.fetch_metadata(Some(&topic), PATIENCE).expect("Kafka answers");
        let mut all = TopicPartitionList::new();
        for partition in seen.topics()[0].partitions() {
            all.add_partition_offset(&topic, partition.id(), Offset::Beginning).expect("it is a place");
        }
        consumer.assign(&all).expect("it can be read");
        let (mut records, begun) = (Vec::new(), Instant::now());
        while records.len() < count {
            assert!(begun.elapsed() < PATIENCE, "{} of {count} are there", records.len());
            let Some(Ok(record)) = consumer.poll(Duration::from_millis(100)) else { continue };
            let key = String::from_utf8_lossy(record.key().unwrap_or_default()).into_owned();
            records.push((key, record.partition()));
        }
        records
    }

    /// Sends numbers, each in a transaction of its own, so that there are gaps between their offsets.
    #[allow(dead_code, reason = "not every test file needs gaps")]
    pub(crate) fn send_in_transactions(&self, topic: &str, numbers: std::ops::Range<i64>) {
        let mut settings = self.client();
        let producer: BaseProducer =
            settings.set("transactional.id", self.name("gaps")).create().expect("a client can be made");
        producer.init_transactions(PATIENCE).expect("Kafka has transactions");
        for number in numbers {
            let (topic, key, text) = (self.name(topic), format!("key {number}"), number.to_string());
            producer.begin_transaction().expect("one can be begun");
            let sent = producer.send(BaseRecord::to(&topic).key(&key).payload(&text));
            sent.map_err(|(error, _)| error).expect("there is room");
            producer.commit_transaction(PATIENCE).expect("it is committed");
        }
    }

    /// The payloads of all that is committed, sorted; they are numbers.
    #[allow(dead_code, reason = "not every test file sends numbers")]
    pub(crate) async fn numbers(&self, broker: &Broker, topic: &str, count: usize) -> Vec<i64> {
        let came = self.receive(broker, topic, count).await;
        let number = |delivery: &Delivery| {
            String::from_utf8_lossy(&delivery.message.payload).parse().expect("a number")
        };
        let mut numbers: Vec<i64> = came.iter().map(number).collect();
        numbers.sort_unstable();
        // A group does not say when there is nothing more.
        let mut seen = 0;
        let all = Span { since: DateTime::UNIX_EPOCH, until: Utc::now() + TimeDelta::minutes(1) };
        broker.browse(topic, all, &mut |_| seen += 1).await.expect("it can be read");
        assert_eq!(seen, count, "more than that is in the log");
        numbers
    }

    /// What a new group receives first.
    pub(crate) async fn receive(&self, broker: &Broker, topic: &str, count: usize) -> Vec<Delivery> {
        let group = Uuid::new_v4().simple().to_string();
        let reader = broker.subscribe(&group, &[topic.to_owned()]).await;
        let mut reader = reader.expect("the group can be joined");
        let mut came = Vec::new();
        while came.len() < count {
            let more = tokio::time::timeout(PATIENCE, reader.receive(count - came.len())).await;
            let more = more.unwrap_or_else(|_| panic!("{} of {count} came", came.len()));
            came.extend(more.expect("messages can be received"));
        }
        reader.close().await;
        came
    }
}

/// All of them.
pub(crate) fn confirmed(outcomes: &[Outcome]) {
    assert!(outcomes.iter().all(|outcome| *outcome == Outcome::Confirmed), "{outcomes:?}");
}

/// One of the programs that come with Kafka.
pub(crate) fn java(class: &str) -> Command {
    let user = std::fs::metadata("/proc/self").expect("this is Linux").uid();
    let jars = format!("/var/tmp/postrider-downloads-{user}/{JARS}");
    let there = std::fs::exists(&jars).is_ok_and(|there| there);
    assert!(there, "Kafka's own tools are not here: run `cargo xtask servers up kafka`");
    let mut java = Command::new("java");
    java.args([
        "-Xmx256m",
        "-XX:TieredStopAtLevel=1",
        "-Dlog4j2.level=ERROR",
        "-cp",
        &format!("{jars}/*"),
        class,
    ]);
    java
}

/// What a program says when it is told `input`.
pub(crate) fn said(command: &mut Command, input: &str) -> String {
    let program = command.get_program().to_string_lossy().into_owned();
    let command = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut running = command.spawn().unwrap_or_else(|error| panic!("{program} is not installed: {error}"));
    let mut mouth = running.stdin.take().expect("it has one");
    mouth.write_all(input.as_bytes()).expect("it listens");
    drop(mouth);
    let ended = running.wait_with_output().expect("it ends");
    let complaint = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.success(), "{program} failed: {complaint}");
    String::from_utf8(ended.stdout).expect("it speaks UTF-8")
}
