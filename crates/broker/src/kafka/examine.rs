//! What `postrider doctor` says of Kafka: whether its settings keep what a route promises.

use std::collections::HashMap;
use std::time::Duration;

use async_trait::async_trait;
use rdkafka::admin::{AdminOptions, ResourceSpecifier};
use rdkafka::error::KafkaError;
use rdkafka::types::RDKafkaErrorCode as Code;

use super::{Broker, error};
use crate::{Examine, Finding, Plan};

/// Bytes that headers, the key and the batch around it may add to a payload.
const AROUND: usize = 64 << 10;

/// A topic as Kafka shows it.
#[derive(Clone, Debug, Default)]
struct Shown {
    partitions: usize,
    /// Partitions that nobody leads.
    leaderless: usize,
    copies: usize,
    /// Copies in sync, where there are fewest.
    in_sync: usize,
    /// Settings by name; nothing where this user may not see them.
    settings: Option<HashMap<String, String>>,
}

#[async_trait]
impl Examine for Broker {
    async fn examine(&self, plan: &Plan) -> Vec<Finding> {
        let mut findings = Vec::new();
        match self.cluster().await {
            Ok(text) => findings.push(Finding::good("cluster", text)),
            Err(text) => {
                let fix = "start it, or correct the host, the user or the certificates in the URL";
                return vec![Finding::broken("cluster", text, fix)];
            }
        }
        let heard = plan.groups.iter().flat_map(|(_, topics)| topics);
        let mut topics: Vec<&String> = plan.topics.iter().chain(heard).collect();
        topics.sort();
        topics.dedup();
        for topic in topics {
            let name = format!("{}{topic}", self.inner.config.prefix);
            let about = format!("topic {name}");
            match self.shown(&name).await {
                Ok(Some(shown)) => findings.extend(judge(&about, &name, &shown, plan)),
                Ok(None) if self.inner.config.create => {
                    let text = "it is not there, and is made when it is first used";
                    findings.push(Finding::good(about, text));
                }
                Ok(None) => {
                    let partitions = self.inner.config.partitions;
                    let fix = format!("kafka-topics.sh --create --topic {name} --partitions {partitions}");
                    findings.push(Finding::broken(about, "it is not there, and is not to be made", fix));
                }
                Err(text) => {
                    findings.push(Finding::broken(about, text, "let this user describe the topic"));
                }
            }
        }
        findings
    }
}

impl Broker {
    /// The servers that answer.
    async fn cluster(&self) -> Result<String, String> {
        let (admin, patience) = (self.inner.topics.admin(), self.inner.config.timeout);
        let asked = tokio::task::spawn_blocking(move || {
            let seen = admin.inner().fetch_metadata(None, patience);
            let said = admin.inner().context().said();
            seen.map(|seen| seen.brokers().len()).map_err(|failed| format!("{}{said}", error::text(&failed)))
        });
        let servers = asked.await.map_err(|error| error.to_string())??;
        let copies = "with fewer than three, no topic survives the loss of one";
        Ok(if servers < 3 {
            format!("{servers} server(s) answer; {copies}")
        } else {
            format!("{servers} servers answer")
        })
    }

    /// What Kafka says of a topic, if it is there.
    async fn shown(&self, name: &str) -> Result<Option<Shown>, String> {
        let (admin, patience) = (self.inner.topics.admin(), self.inner.config.timeout);
        let topic = name.to_owned();
        let asked = tokio::task::spawn_blocking(move || {
            let seen = admin.inner().fetch_metadata(Some(&topic), patience)?;
            let Some(topic) = seen.topics().first() else { return Ok(None) };
            match topic.error().map(Code::from) {
                None => {}
                Some(Code::UnknownTopicOrPartition | Code::UnknownTopic) => return Ok(None),
                Some(code) => return Err(KafkaError::MetadataFetch(code)),
            }
            let partitions = topic.partitions();
            Ok(Some(Shown {
                partitions: partitions.len(),
                leaderless: partitions.iter().filter(|partition| partition.leader() < 0).count(),
                copies: partitions.iter().map(|partition| partition.replicas().len()).min().unwrap_or(0),
                in_sync: partitions.iter().map(|partition| partition.isr().len()).min().unwrap_or(0),
                settings: None,
            }))
        });
        let seen = asked.await.map_err(|error| error.to_string())?;
        let Some(shown) = seen.map_err(|failed| error::text(&failed))? else { return Ok(None) };
        Ok(Some(Shown { settings: self.settings(name, patience).await, ..shown }))
    }

    /// Its settings, for those who may see them.
    pub(super) async fn settings(&self, name: &str, patience: Duration) -> Option<HashMap<String, String>> {
        let options = AdminOptions::new().request_timeout(Some(patience));
        let admin = self.inner.topics.admin();
        let mut described = admin.describe_configs([&ResourceSpecifier::Topic(name)], &options).await.ok()?;
        let entries = described.pop()?.ok()?.entries.into_iter();
        Some(entries.filter_map(|entry| Some((entry.name, entry.value?))).collect())
    }
}

/// What a topic's state means for what is planned.
fn judge(about: &str, name: &str, shown: &Shown, plan: &Plan) -> Vec<Finding> {
    let alter = |setting: String| format!("kafka-configs.sh --alter --topic {name} --add-config {setting}");
    let mut findings = Vec::new();
    let Shown { partitions, leaderless, copies, in_sync, settings } = shown;
    if *leaderless > 0 {
        let text = format!("{leaderless} of {partitions} partitions have no leader");
        findings.push(Finding::broken(about, text, "bring back the servers that hold them"));
    }
    if *copies < 2 {
        let fix = "kafka-reassign-partitions.sh, or make it with replication=3";
        findings.push(Finding::doubtful(about, "one copy: it is lost with its server", fix));
    }
    let Some(settings) = settings else {
        let fix = format!("kafka-acls.sh --add --operation DescribeConfigs --topic {name}");
        findings.push(Finding::doubtful(
            about,
            "this user may not see its settings, so limits are guessed",
            fix,
        ));
        return findings;
    };
    let value = |setting: &str| settings.get(setting).map(String::as_str);
    let number = |setting: &str| value(setting).and_then(|value| value.parse::<i64>().ok());
    let least = number("min.insync.replicas").unwrap_or(1);
    if *copies >= 2 && least < 2 {
        let text = "a message is confirmed when one server has it";
        findings.push(Finding::doubtful(about, text, alter("min.insync.replicas=2".to_owned())));
    }
    if i64::try_from(*in_sync).is_ok_and(|in_sync| in_sync < least) {
        let text =
            format!("{in_sync} copies are in sync and min.insync.replicas is {least}: nothing is taken");
        findings.push(Finding::broken(about, text, "bring back the servers that hold the others"));
    }
    if value("unclean.leader.election.enable") == Some("true") {
        let fix = alter("unclean.leader.election.enable=false".to_owned());
        findings.push(Finding::broken(
            about,
            "a server that missed messages may lead: they would be lost",
            fix,
        ));
    }
    let needed = i64::try_from(plan.max_payload + AROUND).unwrap_or(i64::MAX);
    if let Some(limit) = number("max.message.bytes").filter(|limit| *limit < needed) {
        let text = format!(
            "it takes {limit} bytes, and payloads may have {} beside their headers",
            plan.max_payload
        );
        findings.push(Finding::doubtful(about, text, alter(format!("max.message.bytes={needed}"))));
    }
    if value("cleanup.policy").is_some_and(|policy| policy.contains("compact")) {
        let text =
            "it is compacted: only the last message of a key is kept, and one without a key is refused";
        findings.push(Finding::doubtful(about, text, alter("cleanup.policy=delete".to_owned())));
    }
    let horizon = i64::try_from(plan.horizon.as_millis()).unwrap_or(i64::MAX);
    if let Some(kept) = number("retention.ms").filter(|kept| (0..horizon).contains(kept)) {
        let kept = humantime::format_duration(Duration::from_millis(kept.unsigned_abs()));
        let text = format!("messages are gone after {kept}, and may be sent again for longer");
        findings.push(Finding::doubtful(about, text, alter(format!("retention.ms={horizon}"))));
    }
    if findings.is_empty() {
        findings.push(Finding::good(
            about,
            format!("{partitions} partitions, {copies} copies, {least} in sync at least"),
        ));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Health;

    fn shown(copies: usize, settings: &[(&str, &str)]) -> Shown {
        let settings =
            settings.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        Shown { partitions: 4, leaderless: 0, copies, in_sync: copies, settings: Some(settings) }
    }

    #[test]
    fn what_a_topic_cannot_keep_is_said_with_the_way_out() {
        let plan = Plan { max_payload: 1 << 20, horizon: Duration::from_secs(3_600), ..Plan::default() };
        let safe = [("min.insync.replicas", "2"), ("max.message.bytes", "2000000"), ("retention.ms", "-1")];
        let good = judge("topic orders", "orders", &shown(3, &safe), &plan);
        assert!(good.iter().all(|finding| finding.health == Health::Good), "{good:?}");
        let cases: [(Shown, Health, &str); 7] = [
            (shown(1, &safe), Health::Doubtful, "one copy"),
            (shown(3, &[("min.insync.replicas", "1")]), Health::Doubtful, "one server"),
            (shown(3, &[("min.insync.replicas", "4")]), Health::Broken, "nothing is taken"),
            (shown(3, &[("unclean.leader.election.enable", "true")]), Health::Broken, "would be lost"),
            (shown(3, &[("max.message.bytes", "1048588")]), Health::Doubtful, "1048588 bytes"),
            (shown(3, &[("cleanup.policy", "compact")]), Health::Doubtful, "compacted"),
            (shown(3, &[("retention.ms", "60000")]), Health::Doubtful, "gone after 1m"),
        ];
        for (shown, health, text) in cases {
            let found = judge("topic orders", "orders", &shown, &plan);
            let said = found.iter().find(|finding| finding.text.contains(text));
            let said = said.unwrap_or_else(|| panic!("{text}: {found:?}"));
            assert_eq!(said.health, health, "{said:?}");
            assert!(said.fix.is_some(), "{said:?}");
        }
        let blind = Shown { settings: None, ..shown(3, &[]) };
        assert!(judge("t", "t", &blind, &plan)[0].text.contains("may not see"));
    }
}
