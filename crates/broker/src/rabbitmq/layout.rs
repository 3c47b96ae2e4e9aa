//! How topics, keys and groups lie in RabbitMQ: the names of exchange, queues and routing keys, and what makes them.

use futures::future::try_join_all;
use lapin::options::{ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions, QueueDeleteOptions};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{Channel, ExchangeKind, Queue};

use super::config::Config;
use super::error::Fault;

/// RabbitMQ 4 throws a message away after 20 deliveries unless it is told otherwise: here, what no consumer could
/// finish is for the inbox to judge.
const NEVER: i32 = i32::MAX;

/// With a place for the dead. Not few, for a message that merely waited with a member is counted too when that leaves.
const DELIVERIES: i32 = 100;

/// A name in AMQP: 255 bytes at most.
pub(super) fn name(text: String) -> Result<ShortString, Fault> {
    let refused = |_| Fault::Refused(format!("`{text}` is too long for RabbitMQ: its names have 255 bytes"));
    ShortString::try_new(text.clone()).map_err(refused)
}

/// The queue of a group for a part of a topic's keys.
pub(super) fn queue(config: &Config, group: &str, topic: &str, partition: u16) -> Result<ShortString, Fault> {
    // No topic and no group can have a colon in it.
    name(format!("{}:{group}:{topic}:{partition}", config.prefix))
}

/// Where the members of a group sign on for a topic, and nothing is ever sent: RabbitMQ tells how many consumers a queue
/// has, but does not count those who wait in line.
pub(super) fn roll(config: &Config, group: &str, topic: &str) -> Result<ShortString, Fault> {
    name(format!("{}:{group}:{topic}:members", config.prefix))
}

/// Where a message of this partition is sent. No topic has an `@` in it, so no other topic can have this key; whoever
/// wants all of a topic binds `topic.*`.
pub(super) fn routing_key(topic: &str, partition: u16) -> Result<ShortString, Fault> {
    name(format!("{topic}.@{partition}"))
}

/// Makes the exchange, or looks whether it is there where nothing may be made.
pub(super) async fn exchange(channel: &Channel, config: &Config) -> Result<(), Fault> {
    let options = ExchangeDeclareOptions {
        durable: true,
        passive: !config.create,
        ..ExchangeDeclareOptions::default()
    };
    let exchange = name(config.exchange().to_owned())?;
    Ok(channel.exchange_declare(exchange, ExchangeKind::Topic, options, FieldTable::default()).await?)
}

/// Makes a group's queues for a topic and binds them; what is there already stays as it is.
pub(super) async fn queues(
    channel: &Channel,
    config: &Config,
    group: &str,
    topic: &str,
) -> Result<(), Fault> {
    if let Some(graves) = &config.dead_letter {
        dead_letters(channel, name(graves.clone())?).await?;
    }
    let made = (0..config.partitions).map(|partition| async move {
        let queue = queue(config, group, topic, partition)?;
        declare(channel, config, queue.clone()).await?;
        bind(channel, config, &queue, routing_key(topic, partition)?).await?;
        // Others publish to the topic and know nothing of partitions.
        match partition {
            0 => bind(channel, config, &queue, name(topic.to_owned())?).await,
            _ => Ok(()),
        }
    });
    try_join_all(made).await?;
    channel.queue_declare(roll(config, group, topic)?, QueueDeclareOptions::durable(), quorum()).await?;
    Ok(())
}

/// Makes one queue. One that is there must be the same, or RabbitMQ refuses.
pub(super) async fn declare(channel: &Channel, config: &Config, queue: ShortString) -> Result<Queue, Fault> {
    let mut arguments = quorum();
    arguments.insert("x-single-active-consumer".into(), AMQPValue::Boolean(true));
    let limit = match &config.dead_letter {
        None => NEVER,
        Some(graves) => {
            arguments.insert("x-dead-letter-exchange".into(), text(graves));
            // Otherwise a message may be lost on its way to the others; needs the next.
            arguments.insert("x-dead-letter-strategy".into(), text("at-least-once"));
            arguments.insert("x-overflow".into(), text("reject-publish"));
            DELIVERIES
        }
    };
    arguments.insert("x-delivery-limit".into(), AMQPValue::LongInt(limit));
    Ok(channel.queue_declare(queue, QueueDeclareOptions::durable(), arguments).await?)
}

/// Looks at a queue, and makes nothing.
pub(super) async fn look(channel: &Channel, queue: ShortString) -> Result<Queue, Fault> {
    let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
    Ok(channel.queue_declare(queue, options, FieldTable::default()).await?)
}

/// Removes a queue with all that is in it. One that is not there is no error.
pub(super) async fn remove(channel: &Channel, queue: ShortString) -> Result<(), Fault> {
    channel.queue_delete(queue, QueueDeleteOptions::default()).await?;
    Ok(())
}

async fn bind(
    channel: &Channel,
    config: &Config,
    queue: &ShortString,
    key: ShortString,
) -> Result<(), Fault> {
    let exchange = name(config.exchange().to_owned())?;
    let options = QueueBindOptions::default();
    Ok(channel.queue_bind(queue.clone(), exchange, key, options, FieldTable::default()).await?)
}

/// An exchange and a queue of one name, for what came to nothing.
async fn dead_letters(channel: &Channel, graves: ShortString) -> Result<(), Fault> {
    let options = ExchangeDeclareOptions { durable: true, ..ExchangeDeclareOptions::default() };
    channel.exchange_declare(graves.clone(), ExchangeKind::Fanout, options, FieldTable::default()).await?;
    channel.queue_declare(graves.clone(), QueueDeclareOptions::durable(), quorum()).await?;
    let options = QueueBindOptions::default();
    Ok(channel.queue_bind(graves.clone(), graves, "".into(), options, FieldTable::default()).await?)
}

/// Replicated, and on disk before it is confirmed.
fn quorum() -> FieldTable {
    let mut arguments = FieldTable::default();
    arguments.insert("x-queue-type".into(), text("quorum"));
    arguments
}

fn text(text: &str) -> AMQPValue {
    AMQPValue::LongString(text.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_told_apart_and_those_that_are_too_long_are_refused() {
        let config = Config::new("mq:1");
        assert_eq!(
            queue(&config, "billing", "orders", 3).expect("short").as_str(),
            "postrider:billing:orders:3"
        );
        assert_eq!(routing_key("orders.eu", 3).expect("short").as_str(), "orders.eu.@3");
        let long = "x".repeat(249);
        assert!(matches!(queue(&config, &long, &long, 3), Err(Fault::Refused(text)) if text.contains("255")));
    }
}
