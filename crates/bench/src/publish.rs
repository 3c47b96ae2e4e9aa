//! A relay that takes from memory and publishes into a real broker, beside a bare client that sends the same messages.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use broker::Surroundings;
use futures::StreamExt;
use message::Message;
use relay::{Relay, Route, Settings};

use crate::memory::Memory;
use crate::{Size, arrow};

/// Messages that a bare client has under way: as many as the backend's own default.
const RABBITMQ_WINDOW: usize = 200;
const NATS_WINDOW: usize = 1_024;

/// Entries that the bare Redis client appends in one pipeline.
const REDIS_PIPELINE: usize = arrow::BATCH;

/// Queues that ours makes for a group and topic: as many as it makes partitions.
const RABBITMQ_QUEUES: usize = 16;

/// The time that a relay takes, and the time of a bare client. Each removes what it stored, or the next would find a
/// server that is busy with it.
pub(crate) async fn run(
    url: &str,
    size: Size,
    settings: &Settings,
    headers: bool,
) -> Result<(Duration, Duration)> {
    let name = format!("bench{:08x}", rand::random::<u32>());
    let ours = relay(&with(url, &format!("prefix={name}")), size, settings.clone()).await?;
    let scheme = url.split(':').next().unwrap_or_default();
    let bare = match scheme {
        "kafka" => kafka(url, &name, size, headers).await,
        "amqp" => rabbitmq(url, &name, size, headers).await,
        "nats" => nats(url, &name, size, headers).await,
        "redis" => redis(url, &name, size, headers).await,
        other => bail!("there is no bare client for {other}:// here"),
    };
    Ok((ours, bare.with_context(|| format!("the bare client of {scheme}"))?))
}

fn with(url: &str, parameter: &str) -> String {
    let joint = if url.contains('?') { '&' } else { '?' };
    format!("{url}{joint}{parameter}")
}

/// What a message of ours carries beside payload and key, as a program would that writes it by hand.
fn headers(message: &Message, number: usize) -> [(&'static str, String); 4] {
    let at = message.occurred_at.to_rfc3339();
    [
        ("content-type", message.content_type.clone()),
        ("postrider-seq", number.to_string()),
        ("postrider-id", message.id.to_string()),
        ("postrider-occurred-at", at),
    ]
}

async fn relay(url: &str, size: Size, settings: Settings) -> Result<Duration> {
    let nowhere = Surroundings { file: "none.db".into(), max_payload: 1 << 20 };
    let url = if url.starts_with("amqp") { with(url, "groups=bench") } else { url.to_owned() };
    let broker = broker::open(&url, &nowhere)?;
    // Topics, queues and connections are made by the first message, which is not measured.
    let first = vec![broker::Outgoing::new(arrow::message(size, 0), 0)];
    let outcomes = broker.publisher.publish(first).await;
    ensure!(outcomes == [broker::Outcome::Confirmed], "{outcomes:?}");
    let store =
        Arc::new(Memory::new((0..size.messages).map(|number| arrow::message(size, number)).collect())?);
    let started = Instant::now();
    let relay = Relay::start(store.clone(), vec![Route::new("main", &["*"], broker.publisher)], settings);
    while store.sent() < size.messages {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let took = started.elapsed();
    relay.drain().await;
    Ok(took)
}

/// Counts delivery reports.
#[derive(Clone, Default)]
struct Reports(Arc<AtomicUsize>);

impl rdkafka::ClientContext for Reports {}

impl rdkafka::producer::ProducerContext for Reports {
    type DeliveryOpaque = ();

    fn delivery(&self, result: &rdkafka::message::DeliveryResult<'_>, (): ()) {
        if result.is_ok() {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
}

async fn kafka(url: &str, name: &str, size: Size, with_headers: bool) -> Result<Duration> {
    use rdkafka::admin::{AdminClient, AdminOptions};
    use rdkafka::client::DefaultClientContext;
    use rdkafka::message::{Header, OwnedHeaders};
    use rdkafka::producer::{BaseRecord, ThreadedProducer};
    use rdkafka::types::RDKafkaErrorCode::QueueFull;

    let hosts = url.trim_start_matches("kafka://").split('?').next().unwrap_or_default();
    let mut settings = rdkafka::ClientConfig::new();
    for (name, value) in [
        ("bootstrap.servers", hosts),
        ("enable.idempotence", "true"),
        ("acks", "all"),
        ("max.in.flight.requests.per.connection", "5"),
        ("partitioner", "murmur2_random"),
        ("linger.ms", "1"),
    ] {
        settings.set(name, value);
    }
    let reports = Reports::default();
    let producer: ThreadedProducer<Reports> = settings.create_with_context(reports.clone())?;
    // The topic that our own run made.
    let topic = format!("{name}orders");
    let messages: Vec<_> = (0..size.messages).map(|number| arrow::message(size, number)).collect();
    let started = Instant::now();
    for (number, message) in messages.iter().enumerate() {
        let key = message.key.as_deref().unwrap_or_default();
        let mut record = BaseRecord::to(&topic).key(key).payload(&message.payload[..]);
        if with_headers {
            let all = headers(message, number);
            let all = all.iter().map(|(key, value)| Header { key, value: Some(value) });
            record = record.headers(all.fold(OwnedHeaders::new_with_capacity(4), OwnedHeaders::insert));
        }
        while let Err((error, back)) = producer.send(record) {
            ensure!(error.rdkafka_error_code() == Some(QueueFull), "{error}");
            record = back;
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
    while reports.0.load(Ordering::Relaxed) < size.messages {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let took = started.elapsed();
    let admin: AdminClient<DefaultClientContext> = settings.create()?;
    admin.delete_topics(&[topic.as_str()], &AdminOptions::new()).await?;
    Ok(took)
}

async fn rabbitmq(url: &str, name: &str, size: Size, with_headers: bool) -> Result<Duration> {
    use lapin::options::{
        BasicPublishOptions, ConfirmSelectOptions, QueueDeclareOptions, QueueDeleteOptions,
    };
    use lapin::types::{AMQPValue, FieldTable};

    let url = url.split('?').next().unwrap_or_default();
    let connection = lapin::Connection::connect(url, lapin::ConnectionProperties::default()).await?;
    let channel = connection.create_channel().await?;
    for partition in 0..RABBITMQ_QUEUES {
        let ours = format!("{name}:bench:orders:{partition}");
        channel.queue_delete(ours.into(), QueueDeleteOptions::default()).await?;
    }
    channel.confirm_select(ConfirmSelectOptions::default()).await?;
    let mut arguments = FieldTable::default();
    arguments.insert("x-queue-type".into(), AMQPValue::LongString("quorum".into()));
    let durable = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
    let queue = format!("{name}-bare");
    channel.queue_declare(queue.as_str().into(), durable, arguments).await?;
    let messages: Vec<_> = (0..size.messages).map(|number| arrow::message(size, number)).collect();
    let started = Instant::now();
    let sends = futures::stream::iter(messages.iter().enumerate()).map(async |(number, message)| {
        let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
        let mut properties = lapin::BasicProperties::default().with_delivery_mode(2);
        if with_headers {
            let mut table = FieldTable::default();
            for (name, value) in headers(message, number) {
                table.insert(name.into(), AMQPValue::LongString(value.into()));
            }
            properties = properties.with_headers(table);
        }
        let sent =
            channel.basic_publish("".into(), queue.as_str().into(), options, &message.payload, properties);
        let confirmed = sent.await?.await?;
        ensure!(matches!(confirmed, lapin::Confirmation::Ack(None)), "not confirmed");
        Ok(())
    });
    let confirmed: Vec<Result<()>> = sends.buffered(RABBITMQ_WINDOW).collect().await;
    let took = started.elapsed();
    confirmed.into_iter().collect::<Result<Vec<()>>>()?;
    channel.queue_delete(queue.as_str().into(), QueueDeleteOptions::default()).await?;
    Ok(took)
}

async fn nats(url: &str, name: &str, size: Size, with_headers: bool) -> Result<Duration> {
    let client = async_nats::connect(url.split('?').next().unwrap_or_default()).await?;
    let jetstream = async_nats::jetstream::new(client);
    jetstream.delete_stream(name).await?;
    let subject = format!("{name}bare");
    let stream = async_nats::jetstream::stream::Config {
        name: subject.clone(),
        subjects: vec![subject.clone()],
        ..Default::default()
    };
    jetstream.create_stream(stream).await?;
    let messages: Vec<_> = (0..size.messages).map(|number| arrow::message(size, number)).collect();
    let started = Instant::now();
    let sends = futures::stream::iter(messages.iter().enumerate()).map(|(number, message)| {
        let (jetstream, subject) = (&jetstream, &subject);
        async move {
            let mut map = async_nats::HeaderMap::new();
            map.insert("Nats-Msg-Id", message.id.to_string());
            if with_headers {
                headers(message, number).into_iter().for_each(|(name, value)| map.insert(name, value));
                map.insert("postrider-key", message.key.clone().unwrap_or_default());
            }
            let payload = message.payload.clone();
            jetstream.publish_with_headers(subject.clone(), map, payload).await?.await?;
            Ok(())
        }
    });
    let confirmed: Vec<Result<()>> = sends.buffered(NATS_WINDOW).collect().await;
    let took = started.elapsed();
    confirmed.into_iter().collect::<Result<Vec<()>>>()?;
    jetstream.delete_stream(&subject).await?;
    Ok(took)
}

async fn redis(url: &str, name: &str, size: Size, with_headers: bool) -> Result<Duration> {
    let client = ::redis::Client::open(url.split('?').next().unwrap_or_default())?;
    let mut connection = client.get_multiplexed_async_connection().await?;
    let ours: Vec<String> =
        ::redis::cmd("KEYS").arg(format!("*{name}*")).query_async(&mut connection).await?;
    ::redis::cmd("UNLINK").arg(ours).query_async::<()>(&mut connection).await?;
    let stream = format!("{name}:bare");
    let messages: Vec<_> = (0..size.messages).map(|number| arrow::message(size, number)).collect();
    let started = Instant::now();
    let mut number = 0;
    for portion in messages.chunks(REDIS_PIPELINE) {
        let mut pipeline = ::redis::pipe();
        for message in portion {
            number += 1;
            let entry = pipeline.cmd("XADD").arg(&stream).arg("*");
            entry.arg("postrider-key").arg(&message.key).arg("payload").arg(&message.payload[..]);
            if with_headers {
                for (name, value) in headers(message, number) {
                    entry.arg(name).arg(value);
                }
            }
            entry.ignore();
        }
        pipeline.query_async::<()>(&mut connection).await?;
    }
    let took = started.elapsed();
    ::redis::cmd("DEL").arg(&stream).query_async::<()>(&mut connection).await?;
    Ok(took)
}
