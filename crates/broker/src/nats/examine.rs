//! What `postrider doctor` finds out about the server, the stream and its limits, each with what to do about it.

use async_nats::jetstream::stream::{Config as Stream, DiscardPolicy, Info, RetentionPolicy, StorageType};
use async_trait::async_trait;
use humantime::format_duration;

use super::fetch::consumer_name;
use super::stream::{HEADROOM, covers, forgetful, subject, unfit};
use super::{Broker, Inner};
use crate::{Examine, Finding, Plan};

#[async_trait]
impl Examine for Broker {
    async fn examine(&self, plan: &Plan) -> Vec<Finding> {
        let inner = &self.inner;
        let about = format!("NATS at {}", inner.config.servers.join(","));
        let looked = inner.look().await;
        let info = match looked {
            Ok(info) => info,
            Err(trouble) => {
                return vec![Finding::broken(
                    about,
                    trouble.to_string(),
                    "start the server, or correct its URL",
                )];
            }
        };
        let mut findings = Vec::new();
        let mut limit = 0;
        if let Ok(context) = inner.link.connected(&inner.config).await {
            let server = context.client().server_info();
            findings.push(Finding::good(about, format!("version {}, JetStream is enabled", server.version)));
            limit = server.max_payload;
        }
        let Some(info) = info else {
            findings.push(inner.missing_stream());
            return findings;
        };
        findings.extend(inner.stream(&info, plan, limit));
        findings.extend(inner.groups(plan).await);
        findings
    }
}

impl Inner {
    fn missing_stream(&self) -> Finding {
        let about = format!("stream {}", self.config.stream);
        match self.config.create {
            true => Finding::good(about, "not there yet; it is made with the first message"),
            false => Finding::broken(about, "not there", "make it, or allow it to be made with create=true"),
        }
    }

    fn stream(&self, info: &Info, plan: &Plan, server_limit: usize) -> Vec<Finding> {
        let config = &self.config;
        let (about, stream) = (format!("stream {}", config.stream), &info.config);
        let mut findings = vec![match unfit(stream, config) {
            Some((text, fix)) => Finding::broken(about.clone(), text, fix),
            None => Finding::good(
                about.clone(),
                format!("{} messages in {} bytes", info.state.messages, info.state.bytes),
            ),
        }];
        let topics = plan.topics.iter().chain(plan.groups.iter().flat_map(|(_, topics)| topics));
        for topic in topics {
            let subject = subject(&config.prefix, topic, 0);
            if !stream.subjects.iter().any(|pattern| covers(pattern, &subject)) {
                findings.push(Finding::broken(
                    format!("topic {topic}"),
                    format!("the stream {} does not keep it", config.stream),
                    format!("add the subject {}.{topic}.* to the stream", config.prefix),
                ));
            }
        }
        findings.extend(durability(&about, stream));
        findings.extend(losses(&about, stream, plan));
        findings.extend(duplicates(&about, stream, plan));
        let own = usize::try_from(stream.max_message_size).ok().filter(|own| *own > 0);
        let limit = own.map_or(server_limit, |own| own.min(server_limit));
        if limit < plan.max_payload + HEADROOM {
            findings.push(Finding::doubtful(
                about,
                format!("takes {limit} bytes with headers; payloads of up to {} are accepted", plan.max_payload),
                "raise max_payload of the server and max_msg_size of the stream, or larger messages will be Dead",
            ));
        }
        findings
    }

    /// A group that has a consumer is known; one that has none begins at the oldest message that is kept.
    async fn groups(&self, plan: &Plan) -> Vec<Finding> {
        let Ok(context) = self.link.connected(&self.config).await else { return Vec::new() };
        let mut findings = Vec::new();
        for (group, topics) in &plan.groups {
            for topic in topics {
                let about = format!("group {group} on topic {topic}");
                let (mut lag, mut consumers) = (0, 0);
                for number in 0..self.config.partitions {
                    let name = consumer_name(group, topic, number);
                    let found = context
                        .get_consumer_from_stream::<async_nats::jetstream::consumer::pull::Config, _, _>(
                            name,
                            &self.config.stream,
                        )
                        .await;
                    let Ok(consumer) = found else { continue };
                    let info = consumer.cached_info();
                    lag += info.num_pending + info.num_ack_pending as u64;
                    consumers += 1;
                }
                findings.push(match consumers {
                    0 => Finding::good(about, "new; it begins at the oldest message that is kept"),
                    _ => Finding::good(about, format!("{lag} messages are not acknowledged yet")),
                });
            }
        }
        findings
    }
}

/// What survives a crash.
fn durability(about: &str, stream: &Stream) -> Vec<Finding> {
    if stream.num_replicas >= 3 {
        let text = format!("{} replicas in {:?} storage", stream.num_replicas, stream.storage);
        return vec![match stream.storage {
            StorageType::File => Finding::good(about, text),
            StorageType::Memory => Finding::doubtful(
                about,
                text,
                "use file storage, or a restart of the whole cluster loses everything",
            ),
        }];
    }
    vec![Finding::doubtful(
        about,
        "one copy, which the server writes to the disk every minute or two: a loss of power may take what was confirmed",
        "make it with replicas=3 on a cluster, or set `sync_interval: always` in the server's jetstream block (2.10 and later)",
    )]
}

/// What the stream throws away by itself.
fn losses(about: &str, stream: &Stream, plan: &Plan) -> Vec<Finding> {
    let mut findings = Vec::new();
    match stream.retention {
        RetentionPolicy::Limits => {}
        RetentionPolicy::Interest => findings.push(Finding::doubtful(
            about,
            "interest retention: what no group has asked for yet is thrown away at once",
            "use limits retention, or start every group before the first message",
        )),
        RetentionPolicy::WorkQueue => {
            let fix = "use limits retention, or have one group for each topic";
            let text = "work-queue retention: a second group on a topic is refused";
            findings.push(match plan.groups.len() {
                0 | 1 => Finding::doubtful(about, text, fix),
                _ => Finding::broken(about, text, fix),
            });
        }
    }
    let limited = stream.max_messages > 0 || stream.max_bytes > 0 || stream.max_messages_per_subject > 0;
    if limited && stream.discard == DiscardPolicy::Old {
        findings.push(Finding::doubtful(
            about,
            "when it is full it throws away the oldest messages, read or not (discard old)",
            "set discard to new: then publishing waits instead",
        ));
    }
    if !stream.max_age.is_zero() {
        let age = format_duration(stream.max_age);
        findings.push(match stream.max_age < plan.horizon {
            true => Finding::doubtful(
                about,
                format!("messages are thrown away after {age}, read or not"),
                "raise max_age: a group that is away for as long loses messages",
            ),
            false => Finding::good(about, format!("messages are kept for {age}, read or not")),
        });
    }
    findings
}

/// How long the server itself recognises what is sent twice.
fn duplicates(about: &str, stream: &Stream, plan: &Plan) -> Vec<Finding> {
    let window = stream.duplicate_window;
    let promised = plan.recognised.and_then(|horizon| forgetful(window, horizon));
    vec![match (promised, forgetful(window, plan.horizon)) {
        (Some((text, fix)), _) => Finding::broken(about, text, fix),
        (None, Some((text, fix))) => Finding::doubtful(about, text, fix),
        (None, None) => {
            Finding::good(about, format!("recognises duplicates for {}", format_duration(window)))
        }
    }]
}
