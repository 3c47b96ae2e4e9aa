//! What `postrider doctor` says of a RabbitMQ: whether what is published would be kept, and for whom.
//!
//! Asked over AMQP alone, with the rights that publishing and receiving need anyway. A queue is first looked at, and one
//! that is there is declared once more as we would make it: RabbitMQ changes nothing by that, and complains when the
//! queue is another kind of thing.

use std::collections::BTreeSet;

use async_trait::async_trait;
use lapin::Connection;

use super::config::Config;
use super::error::Fault;
use super::{Broker, layout, link};
use crate::{Examine, Finding, Plan};

#[async_trait]
impl Examine for Broker {
    async fn examine(&self, plan: &Plan) -> Vec<Finding> {
        let config = &self.inner.config;
        let place = config.hosts.join(",");
        let connection = match tokio::time::timeout(config.timeout, link::connect(config)).await {
            Ok(Ok(connection)) => connection,
            Ok(Err(fault)) => return vec![unconnected(&place, fault)],
            Err(_) => return vec![unconnected(&place, Fault::Away("it does not answer".to_owned()))],
        };
        let mut findings = vec![Finding::good(
            format!("server {place}"),
            format!("connected as {} to the virtual host {}", config.user, config.vhost),
        )];
        findings.push(exchange(&connection, config).await);
        let groups = expected(config, plan);
        for topic in &plan.topics {
            if !groups.iter().any(|(_, of_group)| of_group == topic) {
                findings.push(Finding::broken(
                    format!("topic {topic}"),
                    "no group is known that gets it: unless somebody else has bound a queue, every message comes back",
                    format!("name its groups in the URL, `groups=billing:{topic}`, or bind a queue with `{topic}.*`"),
                ));
            }
        }
        for (group, topic) in &groups {
            findings.push(queues(&connection, config, group, topic).await);
        }
        findings.extend(limits(config, plan));
        drop(connection.close(200, "".into()).await);
        findings
    }
}

/// Every group and topic that somebody means to use.
fn expected(config: &Config, plan: &Plan) -> BTreeSet<(String, String)> {
    let planned =
        plan.groups.iter().flat_map(|(group, topics)| topics.iter().map(move |topic| (group, topic)));
    let planned = planned.map(|(group, topic)| (group.clone(), topic.clone()));
    let ahead = plan
        .topics
        .iter()
        .flat_map(|topic| config.groups_of(topic).map(move |group| (group.to_owned(), topic.clone())));
    planned.chain(ahead).collect()
}

fn unconnected(place: &str, fault: Fault) -> Finding {
    let about = format!("server {place}");
    match fault {
        Fault::Away(text) => Finding::broken(about, text, "start it, or correct host and port in the URL"),
        Fault::Refused(text) => Finding::broken(
            about,
            text,
            "correct user, password and virtual host in the URL, or give the user its rights",
        ),
    }
}

async fn exchange(connection: &Connection, config: &Config) -> Finding {
    let about = format!("exchange {}", config.exchange());
    let look = Config { create: false, ..config.clone() };
    if let Err(fault) =
        on_a_channel(connection, async |channel| layout::exchange(&channel, &look).await).await
    {
        return missing(about, fault.text(), config.create);
    }
    match on_a_channel(connection, async |channel| layout::exchange(&channel, config).await).await {
        Ok(()) => Finding::good(about, "a durable topic exchange"),
        Err(fault) => Finding::broken(
            about,
            fault.text(),
            "name another exchange in the URL, or delete this one: it must be durable and of the kind topic",
        ),
    }
}

/// The queues of a group for a topic, as one thing.
async fn queues(connection: &Connection, config: &Config, group: &str, topic: &str) -> Finding {
    let about = format!("group {group} on topic {topic}");
    let mut waiting = 0;
    let mut members = 0;
    for partition in 0..config.partitions {
        let queue = match layout::queue(config, group, topic, partition) {
            Ok(queue) => queue,
            Err(fault) => return Finding::broken(about, fault.text(), "use shorter names"),
        };
        let name = queue.clone();
        match on_a_channel(connection, async |channel| layout::look(&channel, name).await).await {
            Ok(found) => {
                waiting += found.message_count();
                members = members.max(found.consumer_count());
            }
            Err(fault) => return missing(about, fault.text(), config.create),
        }
        let name = queue.clone();
        let same = on_a_channel(connection, async |channel| layout::declare(&channel, config, name).await);
        if let Err(fault) = same.await {
            let fix = format!(
                "when it is empty, delete the queue `{queue}` so that it is made anew: it must be a durable quorum queue \
                 with a single active consumer"
            );
            return Finding::broken(about, fault.text(), fix);
        }
    }
    let queues = config.partitions;
    Finding::good(about, format!("{queues} quorum queues, {waiting} messages, {members} members"))
}

fn missing(about: String, text: &str, create: bool) -> Finding {
    match create {
        true => Finding::doubtful(
            about,
            format!("{text}; it is made by the first that comes, and what is published before is not for it"),
            "publish or subscribe once, and name the group with `groups=` in the publisher's URL",
        ),
        false => Finding::broken(about, text, "make it, or allow it with `create=true` in the URL"),
    }
}

/// What no question to the server answers.
fn limits(config: &Config, plan: &Plan) -> Vec<Finding> {
    let mut findings = Vec::new();
    if plan.max_payload > config.max_payload {
        let text = format!(
            "payloads up to {} bytes are accepted and {} are sent",
            plan.max_payload, config.max_payload
        );
        findings.push(Finding::broken(
            "payloads",
            text,
            "raise `max_payload` in the URL, and RabbitMQ's max_message_size",
        ));
    }
    if !plan.groups.is_empty() {
        findings.push(Finding::doubtful(
            "slow handlers",
            "before version 3.12, RabbitMQ takes a message back after 30 minutes of work, and gives it to another",
            "where a handler may take longer, set `consumer_timeout` in rabbitmq.conf",
        ));
    }
    findings
}

/// On a channel of its own: a refusal ends it.
async fn on_a_channel<T>(
    connection: &Connection,
    ask: impl AsyncFnOnce(lapin::Channel) -> Result<T, Fault>,
) -> Result<T, Fault> {
    ask(connection.create_channel().await?).await
}
