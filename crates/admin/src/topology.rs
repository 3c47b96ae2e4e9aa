//! Which routes and consumers are configured: what a topic's way is, and who must acknowledge it.
//!
//! Built once from the configuration; requests are checked against it, so that a message that nobody would
//! ever carry is refused when it is sent and not discovered later.

use std::time::Duration;

use message::{OnDead, Order, RetryPolicy, Semantics, TopicPattern};
use serde::{Serialize, Serializer};
use utoipa::ToSchema;

use crate::Problem;

/// Routes and consumers, as configured.
#[derive(Clone, Debug, Default)]
pub struct Topology {
    /// Where topics go.
    pub routes: Vec<RouteView>,
    /// Who listens.
    pub consumers: Vec<ConsumerView>,
}

/// A route: which topics go where, and how.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct RouteView {
    /// Its name in the configuration.
    pub name: String,
    /// The topics it takes; `*` stands for any run of characters.
    #[schema(value_type = Vec<String>, example = json!(["order-*"]))]
    pub topics: Vec<TopicPattern>,
    /// The broker it sends to.
    pub broker: String,
    /// What it promises.
    #[schema(value_type = String, example = "effectively-once")]
    pub semantics: Semantics,
    /// What it keeps in order: `key` or `none`.
    #[schema(value_type = String, example = "key")]
    pub order: Order,
    /// Whether later messages of a key wait behind a Dead one (`hold`) or pass (`skip`).
    #[schema(value_type = String, example = "hold")]
    pub on_dead: OnDead,
    /// When it tries again and when it stops.
    #[serde(serialize_with = "retry")]
    #[schema(value_type = RetryView)]
    pub retry: RetryPolicy,
    /// Why these semantics were chosen.
    pub why: Option<String>,
}

/// A retry policy in words that people read.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct RetryView {
    /// Failures after which a message is Dead.
    pub max_attempts: u32,
    /// The least wait after the first failure.
    #[schema(example = "1s")]
    pub first: String,
    /// The least wait never grows past this.
    #[schema(example = "1m")]
    pub cap: String,
    /// Age after which even an outage ends in Dead.
    #[schema(example = "3days")]
    pub give_up_after: String,
    /// Whether an unreachable destination spends attempts.
    pub count_outages: bool,
}

impl From<&RetryPolicy> for RetryView {
    fn from(policy: &RetryPolicy) -> Self {
        let text = |duration: Duration| humantime::format_duration(duration).to_string();
        Self {
            max_attempts: policy.max_attempts,
            first: text(policy.first),
            cap: text(policy.cap),
            give_up_after: text(policy.give_up_after),
            count_outages: policy.count_outages,
        }
    }
}

fn text<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&humantime::format_duration(*duration))
}

fn retry<S: Serializer>(policy: &RetryPolicy, serializer: S) -> Result<S::Ok, S::Error> {
    RetryView::from(policy).serialize(serializer)
}

/// A consumer group: what it listens to and what it does.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ConsumerView {
    /// Its name.
    pub group: String,
    /// The topics it listens to.
    pub topics: Vec<String>,
    /// The broker it listens at.
    pub broker: String,
    /// What it promises.
    #[schema(value_type = String, example = "effectively-once")]
    pub semantics: Semantics,
    /// What it does with a message.
    pub handler: String,
    /// How it recognises what it has done already.
    pub dedup: String,
    /// For how long.
    #[serde(serialize_with = "text")]
    #[schema(value_type = String, example = "7days")]
    pub keep_ids: Duration,
}

impl Topology {
    /// The route that takes `topic`: of several that fit, the one whose pattern says most; of equals, the first.
    pub fn route_of(&self, topic: &str) -> Option<&RouteView> {
        let mut best: Option<(usize, &RouteView)> = None;
        for route in &self.routes {
            for pattern in route.topics.iter().filter(|pattern| pattern.matches(topic)) {
                let says = pattern.specificity();
                if best.is_none_or(|(most, _)| says > most) {
                    best = Some((says, route));
                }
            }
        }
        best.map(|(_, route)| route)
    }

    /// Whether messages of `topic` may go to the broker without ever being in the store.
    pub(crate) fn bypasses_store(&self, topic: &str) -> bool {
        self.route_of(topic).is_some_and(|route| route.semantics.bypasses_store())
    }

    /// Whether messages of `topic` are sent until they are confirmed.
    pub(crate) fn sends_again(&self, topic: &str) -> bool {
        self.route_of(topic).is_none_or(|route| route.semantics.sends_again())
    }

    /// The consumer groups that listen to `topic` and acknowledge. One that promises exactly-once does not: what it has done
    /// is in the broker, in the transaction of what it made. Nor does one that remembers nothing.
    pub fn groups_of(&self, topic: &str) -> Vec<String> {
        self.consumers
            .iter()
            .filter(|consumer| consumer.semantics.leaves_marks())
            .filter(|consumer| consumer.topics.iter().any(|listened| listened == topic))
            .map(|consumer| consumer.group.clone())
            .collect()
    }

    /// The group of `topic` that forgets soonest which messages it has done, of those that promise to remember.
    pub(crate) fn forgets_first(&self, topic: &str) -> Option<&ConsumerView> {
        self.consumers
            .iter()
            .filter(|consumer| !consumer.semantics.bypasses_store())
            .filter(|consumer| consumer.topics.iter().any(|listened| listened == topic))
            .min_by_key(|consumer| consumer.keep_ids)
    }

    /// Whether `group` is configured.
    pub fn has_group(&self, group: &str) -> bool {
        self.consumers.iter().any(|consumer| consumer.group == group)
    }

    pub(crate) fn check_route(&self, topic: &str) -> Result<(), Problem> {
        if self.route_of(topic).is_some() {
            return Ok(());
        }
        let patterns =
            quoted(self.routes.iter().flat_map(|route| route.topics.iter().map(TopicPattern::as_str)));
        let taken = if patterns.is_empty() {
            "no route is configured".to_owned()
        } else {
            format!("the routes take {patterns}")
        };
        Err(Problem::bad_request(
            "unknown-topic",
            "No route takes this topic",
            format!("No route takes the topic `{topic}`: {taken}. Use one of those, or add a route for it."),
        ))
    }

    /// The groups that must acknowledge a message on `topic`: the one its writer `asked` for, or all of them.
    pub(crate) fn ack_groups(&self, topic: &str, asked: Option<&str>) -> Result<Vec<String>, Problem> {
        let groups = self.groups_of(topic);
        let Some(asked) = asked else { return Ok(groups) };
        if groups.iter().any(|group| group == asked) {
            return Ok(vec![asked.to_owned()]);
        }
        let detail = if groups.is_empty() {
            format!(
                "No consumer group listens to the topic `{topic}`: leave `consumerGroup` out, or configure one."
            )
        } else {
            format!(
                "The consumer group `{asked}` does not listen to the topic `{topic}`: use {}, or leave \
                 `consumerGroup` out to ask all of them.",
                quoted(groups.iter().map(String::as_str))
            )
        };
        Err(Problem::bad_request("unknown-group", "That group does not listen to this topic", detail))
    }

    pub(crate) fn no_group(&self, group: &str) -> Problem {
        let known = quoted(self.consumers.iter().map(|consumer| consumer.group.as_str()));
        let detail = if known.is_empty() {
            format!("There is no consumer group `{group}`: none is configured.")
        } else {
            format!("There is no consumer group `{group}`: the configured ones are {known}.")
        };
        Problem::not_found("unknown-group", "There is no such consumer group", detail)
    }
}

fn quoted<'a>(names: impl Iterator<Item = &'a str>) -> String {
    names.map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn route(name: &str, topics: &[&str]) -> RouteView {
        RouteView {
            name: name.into(),
            topics: topics.iter().copied().map(TopicPattern::new).collect(),
            broker: "main".into(),
            semantics: Semantics::default(),
            order: Order::Key,
            on_dead: OnDead::Hold,
            retry: RetryPolicy::default(),
            why: None,
        }
    }

    #[test]
    fn the_most_specific_pattern_wins() {
        let topology = Topology {
            routes: vec![
                route("all", &["*"]),
                route("orders", &["order-*"]),
                route("one", &["order-events"]),
            ],
            consumers: vec![],
        };
        let name = |topic| topology.route_of(topic).map(|route| route.name.as_str());
        assert_eq!(name("order-events"), Some("one"));
        assert_eq!(name("order-refunds"), Some("orders"));
        assert_eq!(name("users"), Some("all"));
    }

    #[test]
    fn an_unrouted_topic_is_refused_with_what_the_routes_take() {
        let topology = Topology { routes: vec![route("orders", &["order-*", "refunds"])], consumers: vec![] };
        let problem = topology.check_route("users").expect_err("no route takes it");
        assert_eq!(problem.code, "unknown-topic");
        assert!(problem.detail.contains("`order-*`, `refunds`"), "{}", problem.detail);
    }

    #[test]
    fn durations_of_a_route_are_written_for_people() {
        let value = serde_json::to_value(route("r", &["*"])).expect("plain data");
        assert_eq!(value["retry"]["cap"], "1m");
        assert_eq!(value["retry"]["giveUpAfter"], "3days");
        assert_eq!(value["onDead"], "hold");
    }
}
