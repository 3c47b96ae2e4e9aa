//! What `postrider doctor` says of SQS: the kind of each queue, how long it keeps messages, and what takes them away.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use async_trait::async_trait;
use aws_sdk_sqs::types::QueueAttributeName as Name;
use humantime::format_duration;
use tokio::time::timeout;

use super::Broker;
use super::error::{Trouble, trouble};
use super::publish::RECOGNISED;
use super::queue;
use crate::{Examine, Finding, Plan};

/// Less than this, and a long weekend without a consumer loses messages.
const SHORT: Duration = Duration::from_secs(4 * 24 * 60 * 60);

/// Below this, a few crashes are enough to put a good message aside.
const FEW_RECEIVES: u64 = 5;

#[async_trait]
impl Examine for Broker {
    async fn examine(&self, plan: &Plan) -> Vec<Finding> {
        let config = &self.inner.config;
        let mut findings = Vec::new();
        if plan.ordered && !config.fifo {
            let text = "standard queues keep no order of keys";
            findings.push(Finding::broken(
                "SQS",
                text,
                "add `fifo=true` to the URL: other queues, named `….fifo`",
            ));
        }
        if config.fifo && plan.horizon > RECOGNISED {
            let horizon = format_duration(plan.horizon);
            findings.push(Finding::doubtful(
                "SQS",
                format!("a message may be sent again for {horizon}, and FIFO queues recognise it for 5 minutes only"),
                "consume with the inbox, which recognises it by its id, or shorten the retries",
            ));
        }
        let mut readers: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for (group, topics) in &plan.groups {
            for topic in topics {
                readers.entry(topic).or_default().insert(group);
            }
        }
        for (topic, groups) in readers.iter().filter(|(_, groups)| groups.len() > 1) {
            let groups: Vec<_> = groups.iter().copied().collect();
            findings.push(Finding::broken(
                format!("topic {topic}"),
                format!(
                    "the groups {} take messages from each other: SQS has one queue for all",
                    groups.join(", ")
                ),
                "give each group a topic of its own, or let SNS copy to one queue for each",
            ));
        }
        let topics: BTreeSet<_> = plan.topics.iter().map(String::as_str).chain(readers.into_keys()).collect();
        for topic in topics {
            findings.extend(self.examine_queue(topic, plan).await);
        }
        findings
    }
}

impl Broker {
    async fn examine_queue(&self, topic: &str, plan: &Plan) -> Vec<Finding> {
        let config = &self.inner.config;
        let name = queue::name(config, topic);
        let about = format!("queue {name}");
        let looked = timeout(config.timeout, self.look(&name)).await;
        let looked = looked.unwrap_or_else(|_| Err(Trouble::Away("it does not answer".to_owned())));
        let kind = if config.fifo { " --attributes FifoQueue=true" } else { "" };
        let make = format!("aws sqs create-queue --queue-name {name}{kind}");
        match looked {
            Ok(attributes) => judge(&about, &attributes, plan),
            Err(Trouble::Missing(_)) if config.create => {
                vec![Finding::good(
                    about,
                    format!("not there yet: the first who uses the topic `{topic}` makes it"),
                )]
            }
            Err(Trouble::Missing(_)) => {
                vec![Finding::broken(about, format!("the topic `{topic}` has no queue"), make)]
            }
            Err(Trouble::Setting(text) | Trouble::Refused(text)) => vec![Finding::broken(
                about,
                text,
                "allow sqs:GetQueueUrl, GetQueueAttributes, SendMessage, ReceiveMessage, DeleteMessage and \
                 ChangeMessageVisibility to the key or role that is used",
            )],
            Err(Trouble::Away(text) | Trouble::Unknown(text)) => {
                vec![Finding::broken(about, text, "check region, endpoint, credentials and network")]
            }
        }
    }

    async fn look(&self, name: &str) -> Result<HashMap<Name, String>, Trouble> {
        let url = self.find(name).await?;
        let asked = self.client().await.get_queue_attributes().queue_url(url).attribute_names(Name::All);
        Ok(asked.send().await.map_err(|error| trouble(&error))?.attributes.unwrap_or_default())
    }
}

/// What the settings of a queue mean for the plan. What a server does not tell is not judged.
fn judge(about: &str, attributes: &HashMap<Name, String>, plan: &Plan) -> Vec<Finding> {
    let number = |name: &Name| attributes.get(name).and_then(|value| value.parse::<u64>().ok());
    let is = |name: &Name, value: &str| attributes.get(name).is_some_and(|found| found == value);
    let fifo = is(&Name::FifoQueue, "true");
    let kind = if fifo { "FIFO: keeps the order of keys" } else { "standard: keeps no order" };
    let hidden = number(&Name::VisibilityTimeout).unwrap_or_default();
    let kind = format!(
        "{kind}; its visibility timeout of {hidden}s is for others, members of Postrider set their own"
    );
    let mut findings = vec![Finding::good(about, kind)];
    let set = |name: &str, value: &str| format!("aws sqs set-queue-attributes --attributes {name}={value}");
    let retention = number(&Name::MessageRetentionPeriod).map(Duration::from_secs);
    if let Some(kept) = retention.filter(|kept| *kept < SHORT.max(plan.horizon)) {
        findings.push(Finding::doubtful(
            about,
            format!("what nobody has taken after {} is gone", format_duration(kept)),
            set("MessageRetentionPeriod", "1209600"),
        ));
    }
    let largest = number(&Name::MaximumMessageSize).and_then(|size| usize::try_from(size).ok());
    if let Some(largest) = largest.filter(|largest| *largest < plan.max_payload) {
        findings.push(Finding::doubtful(
            about,
            format!(
                "takes {largest} bytes, and payloads of {} are accepted for it: they would be Dead",
                plan.max_payload
            ),
            set("MaximumMessageSize", "1048576"),
        ));
    }
    if let Some(delay) = number(&Name::DelaySeconds).filter(|delay| *delay > 0) {
        let text = format!("every message waits for {delay}s before anybody gets it");
        findings.push(Finding::doubtful(about, text, set("DelaySeconds", "0")));
    }
    if let Some(receives) = attributes.get(&Name::RedrivePolicy).and_then(|policy| most_receives(policy)) {
        let text = format!("a message that was received {receives} times moves to the dead-letter queue");
        findings.push(match receives < FEW_RECEIVES {
            true => Finding::doubtful(
                about,
                format!("{text}: crashes and messages given back count too"),
                "raise maxReceiveCount to 5 or more, or leave what fails to the inbox",
            ),
            false => Finding::good(about, text),
        });
    }
    let whole = is(&Name::FifoThroughputLimit, "perQueue");
    if fifo && whole {
        findings.push(Finding::doubtful(
            about,
            "takes 300 requests in a second, all keys together",
            set("DeduplicationScope=messageGroup,FifoThroughputLimit", "perMessageGroupId"),
        ));
    }
    findings
}

/// How often a message may be received, in a redrive policy.
fn most_receives(policy: &str) -> Option<u64> {
    let policy: serde_json::Value = serde_json::from_str(policy).ok()?;
    let receives = &policy["maxReceiveCount"];
    receives.as_u64().or_else(|| receives.as_str()?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Health;

    fn found(attributes: &[(Name, &str)], plan: &Plan) -> Vec<(Health, String)> {
        let attributes = attributes.iter().map(|(name, value)| (name.clone(), (*value).to_owned())).collect();
        judge("queue q", &attributes, plan)
            .into_iter()
            .map(|finding| (finding.health, finding.text))
            .collect()
    }

    #[test]
    fn a_queue_as_it_should_be_is_good() {
        let attributes = [
            (Name::FifoQueue, "true"),
            (Name::MessageRetentionPeriod, "1209600"),
            (Name::MaximumMessageSize, "1048576"),
            (Name::FifoThroughputLimit, "perMessageGroupId"),
            (Name::RedrivePolicy, r#"{"maxReceiveCount":10}"#),
        ];
        let plan = Plan { max_payload: 1 << 20, horizon: SHORT, ..Plan::default() };
        assert!(found(&attributes, &plan).iter().all(|(health, _)| *health == Health::Good));
    }

    #[test]
    fn each_setting_that_may_surprise_is_named() {
        let plan = Plan { max_payload: 1 << 20, ..Plan::default() };
        let cases = [
            ((Name::MessageRetentionPeriod, "3600"), "after 1h is gone"),
            ((Name::MaximumMessageSize, "262144"), "takes 262144 bytes"),
            ((Name::DelaySeconds, "5"), "waits for 5s"),
            ((Name::RedrivePolicy, r#"{"maxReceiveCount":"3"}"#), "received 3 times"),
        ];
        for (attribute, expected) in cases {
            let found = found(&[attribute], &plan);
            let doubtful =
                |(health, text): &(Health, String)| *health == Health::Doubtful && text.contains(expected);
            assert!(found.iter().any(doubtful), "{expected}: {found:?}");
        }
    }
}
