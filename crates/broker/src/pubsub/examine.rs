//! Examine: what `postrider doctor` says about a project's topics and subscriptions.

use async_trait::async_trait;
use futures::future::join_all;
use google_cloud_pubsub::model::{Subscription, Topic};
use tokio::time::timeout;

use super::config::Endpoint;
use super::error::{self, Failure};
use super::{Broker, Clients, Inner, misnamed};
use crate::{Examine, Finding, Plan};

#[async_trait]
impl Examine for Broker {
    async fn examine(&self, plan: &Plan) -> Vec<Finding> {
        let inner = &self.inner;
        let fix = "check the network, the project, and GOOGLE_APPLICATION_CREDENTIALS";
        match timeout(inner.config.timeout, inner.examine(plan)).await {
            Ok(findings) => findings,
            Err(_) => vec![Finding::broken("Pub/Sub", "it does not answer", fix)],
        }
    }
}

impl Inner {
    async fn examine(&self, plan: &Plan) -> Vec<Finding> {
        let mut findings = self.settings(plan);
        let clients = match self.clients().await {
            Ok(clients) => clients,
            Err(error) => {
                let fix = "set GOOGLE_APPLICATION_CREDENTIALS, or name an emulator with `emulator=host:port`";
                findings.push(Finding::broken("Pub/Sub", error.to_string(), fix));
                return findings;
            }
        };
        let topics = plan.topics.iter().map(|topic| self.topic(clients, topic));
        findings.extend(join_all(topics).await.into_iter().flatten());
        let pairs =
            plan.groups.iter().flat_map(|(group, topics)| topics.iter().map(move |topic| (group, topic)));
        let groups = pairs.map(|(group, topic)| self.subscription(clients, group, topic, plan));
        findings.extend(join_all(groups).await.into_iter().flatten());
        findings
    }

    /// What can be said without asking anybody.
    fn settings(&self, plan: &Plan) -> Vec<Finding> {
        let mut findings = Vec::new();
        let limit = self.config.max_payload;
        if plan.max_payload > limit {
            let text =
                format!("payloads of up to {} bytes are accepted, and {limit} can be sent", plan.max_payload);
            findings.push(Finding::broken(
                "Pub/Sub",
                text,
                format!("accept payloads of {limit} bytes at most"),
            ));
        }
        match &self.endpoint {
            Endpoint::Emulator(place) => {
                let text = format!("{place} is an emulator: it forgets everything when it ends");
                let fix = "leave out `emulator=` and PUBSUB_EMULATOR_HOST where messages must survive";
                findings.push(Finding::doubtful("Pub/Sub", text, fix));
            }
            Endpoint::Service(None) if plan.ordered => {
                let text = "keys are in order as long as all relays that publish them run in one region";
                let fix = "name the region with `region=`, or ignore this where there is one";
                findings.push(Finding::doubtful("Pub/Sub", text, fix));
            }
            Endpoint::Service(_) => {}
        }
        findings
    }

    async fn topic(&self, clients: &Clients, topic: &str) -> Vec<Finding> {
        let path = self.topic_path(topic);
        let about = format!("topic {topic}");
        if let Some(wrong) = misnamed(&path) {
            return vec![Finding::broken(about, wrong, "set `prefix=`, or give the topic another name")];
        }
        match clients.topics.get_topic().set_topic(&path).send().await {
            Ok(found) => vec![retention(&about, &found, &self.config.groups)],
            Err(error) if error::failure(&error) == Failure::Missing => match self.config.create {
                true => vec![Finding::good(about, "it does not exist yet and is made by its first message")],
                false => {
                    let fix =
                        format!("run `gcloud pubsub topics create {}`, or set `create=true`", last(&path));
                    vec![Finding::broken(about, "it does not exist", fix)]
                }
            },
            Err(error) => vec![unanswered(about, &error)],
        }
    }

    async fn subscription(&self, clients: &Clients, group: &str, topic: &str, plan: &Plan) -> Vec<Finding> {
        let path = self.subscription_path(group, topic);
        let about = format!("group {group} on topic {topic}");
        if let Some(wrong) = misnamed(&path) {
            return vec![Finding::broken(about, wrong, "set `prefix=`, or give the group another name")];
        }
        match clients.subscriptions.get_subscription().set_subscription(&path).send().await {
            Ok(found) => check(&about, &found, &self.topic_path(topic), self.config.exactly_once, plan),
            Err(error) if error::failure(&error) == Failure::Missing => {
                let declared = self.config.groups.iter().any(|declared| declared == group);
                vec![missing(about, &path, self.config.create, declared)]
            }
            Err(error) => vec![unanswered(about, &error)],
        }
    }
}

fn unanswered(about: String, error: &google_cloud_pubsub::Error) -> Finding {
    let fix = "check the network, the project, and the rights pubsub.topics.get and pubsub.subscriptions.get";
    Finding::broken(about, error::explain(error), fix)
}

fn retention(about: &str, topic: &Topic, groups: &[String]) -> Finding {
    match &topic.message_retention_duration {
        Some(kept) => {
            let text =
                format!("it keeps messages for {} seconds, for groups that come later too", kept.seconds());
            Finding::good(about, text)
        }
        None if groups.is_empty() => {
            let text = "a group that first subscribes later misses what was published before";
            let fix = "declare the groups with `groups=`, or give the topic a retention: \
                       `gcloud pubsub topics update NAME --message-retention-duration=7d`";
            Finding::doubtful(about, text, fix)
        }
        None => Finding::good(about, format!("it is there; declared groups: {}", groups.join(", "))),
    }
}

fn missing(about: String, path: &str, create: bool, declared: bool) -> Finding {
    match (create, declared) {
        (true, true) => Finding::good(about, "its subscription is made with the topic"),
        (true, false) => {
            let text = "its subscription does not exist yet: what is published before it subscribes is not kept for it";
            Finding::doubtful(about, text, "name the group in `groups=`")
        }
        (false, _) => {
            let command = format!("gcloud pubsub subscriptions create {} --topic=…", last(path));
            let fix = format!(
                "run `{command} --enable-message-ordering --expiration-period=never`, or set `create=true`"
            );
            Finding::broken(about, "its subscription does not exist", fix)
        }
    }
}

/// What is wrong with a subscription that is there.
fn check(about: &str, found: &Subscription, topic: &str, exactly_once: bool, plan: &Plan) -> Vec<Finding> {
    let name = last(&found.name);
    let anew = format!("delete the subscription {name} and let it be made anew");
    let update = |option: &str| format!("run `gcloud pubsub subscriptions update {name} {option}`");
    let mut findings = Vec::new();
    let mut broken = |text: String, fix: &str| findings.push(Finding::broken(about, text, fix));
    if found.topic != topic {
        broken(
            format!("the subscription {name} is of {}, so nothing of the topic reaches it", found.topic),
            &anew,
        );
    }
    if found.detached {
        broken(format!("the subscription {name} is detached from its topic"), &anew);
    }
    if found.push_config.as_ref().is_some_and(|push| !push.push_endpoint.is_empty()) {
        broken(format!("the subscription {name} pushes, and cannot be read"), &update("--push-endpoint=''"));
    }
    if !found.enable_message_ordering && plan.ordered {
        broken(format!("the subscription {name} has no message ordering, so keys come in any order"), &anew);
    }
    let mut doubtful = |text: String, fix: &str| findings.push(Finding::doubtful(about, text, fix));
    if let Some(ttl) = found.expiration_policy.as_ref().and_then(|policy| policy.ttl.as_ref()) {
        let days = ttl.seconds() / (24 * 60 * 60);
        let text = format!("a group that is away for {days} days is forgotten, and with it its messages");
        doubtful(text, &update("--expiration-period=never"));
    }
    if let Some(policy) = &found.dead_letter_policy {
        let text = format!(
            "after {} deliveries the broker itself moves a message to {}, out of its key's order",
            policy.max_delivery_attempts, policy.dead_letter_topic
        );
        doubtful(
            text,
            &format!("{}: the inbox has dead messages of its own", update("--clear-dead-letter-policy")),
        );
    }
    if !found.filter.is_empty() {
        doubtful(
            format!("the subscription {name} has a filter: the group does not get every message"),
            &anew,
        );
    }
    let kept = found.message_retention_duration.as_ref().map_or(i64::MAX, |kept| kept.seconds());
    if kept < i64::try_from(plan.horizon.as_secs()).unwrap_or(i64::MAX) {
        let text =
            format!("what is not acknowledged is dropped after {kept} seconds, sooner than it is sent again");
        doubtful(text, &update("--message-retention-duration=7d"));
    }
    if found.enable_exactly_once_delivery != exactly_once {
        let (is, option) = match exactly_once {
            true => ("without", "--enable-exactly-once-delivery"),
            false => ("with", "--no-enable-exactly-once-delivery"),
        };
        let text = format!("the subscription {name} is {is} exactly-once delivery, the URL says otherwise");
        doubtful(text, &update(option));
    }
    if findings.is_empty() {
        let text =
            format!("{name} keeps order, leases for {} s, and never expires", found.ack_deadline_seconds);
        findings.push(Finding::good(about, text));
    }
    findings
}

/// The name at the end of a path.
fn last(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use google_cloud_pubsub::model::{DeadLetterPolicy, ExpirationPolicy, PushConfig};
    use google_cloud_wkt::Duration as Span;

    use super::*;
    use crate::Health;

    const TOPIC: &str = "projects/p/topics/orders";

    fn sound() -> Subscription {
        Subscription::new()
            .set_name("projects/p/subscriptions/billing.orders")
            .set_topic(TOPIC)
            .set_enable_message_ordering(true)
            .set_expiration_policy(ExpirationPolicy::new())
            .set_message_retention_duration(Span::clamp(604_800, 0))
    }

    fn examined(found: &Subscription) -> Vec<Finding> {
        let plan = Plan { ordered: true, horizon: Duration::from_secs(86_400), ..Plan::default() };
        check("group billing on topic orders", found, TOPIC, false, &plan)
    }

    #[test]
    fn a_subscription_as_we_make_it_is_good() {
        let findings = examined(&sound());
        assert!(matches!(&findings[..], [Finding { health: Health::Good, .. }]), "{findings:?}");
    }

    #[test]
    fn every_unsafe_setting_of_a_subscription_is_found_with_its_fix() {
        let push = PushConfig::new().set_push_endpoint("https://somewhere");
        let dead = DeadLetterPolicy::new().set_dead_letter_topic("projects/p/topics/dead");
        let table = [
            (sound().set_enable_message_ordering(false), Health::Broken, "no message ordering"),
            (sound().set_topic("_deleted-topic_"), Health::Broken, "_deleted-topic_"),
            (sound().set_detached(true), Health::Broken, "detached"),
            (sound().set_push_config(push), Health::Broken, "pushes"),
            (
                sound().set_expiration_policy(ExpirationPolicy::new().set_ttl(Span::clamp(2_678_400, 0))),
                Health::Doubtful,
                "31 days",
            ),
            (sound().set_dead_letter_policy(dead), Health::Doubtful, "topics/dead"),
            (sound().set_filter("attributes.a"), Health::Doubtful, "filter"),
            (
                sound().set_message_retention_duration(Span::clamp(600, 0)),
                Health::Doubtful,
                "dropped after 600 seconds",
            ),
            (sound().set_enable_exactly_once_delivery(true), Health::Doubtful, "exactly-once"),
        ];
        for (found, health, expected) in table {
            let findings = examined(&found);
            let [finding] = &findings[..] else { panic!("{expected}: {findings:?}") };
            assert_eq!(finding.health, health, "{finding:?}");
            assert!(finding.text.contains(expected), "{finding:?}");
            assert!(finding.fix.is_some(), "{finding:?}");
        }
    }
}
