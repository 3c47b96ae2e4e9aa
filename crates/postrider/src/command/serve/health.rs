//! How the parts of this process are: asked by health requests and by the page, so it must not block.

use std::collections::BTreeMap;
use std::sync::Arc;

use chrono::{DateTime, Utc};
use server::{AllOverdue, Component, Health, Lost, Overdue};

use super::super::output::relative;
use super::parts::{Brokers, Parts};

/// What is asked.
#[derive(Clone)]
pub(super) struct Pulse {
    relay: Option<relay::Reporter>,
    express: Option<Arc<relay::Direct>>,
    brokers: Vec<String>,
    consumers: Vec<(String, inbox::Monitor)>,
}

impl Pulse {
    /// Asks these.
    pub(super) fn of(parts: &Parts, brokers: &Brokers) -> Self {
        Self {
            relay: parts.relay.as_ref().map(relay::Running::reporter),
            express: parts.express.clone(),
            // As the relay names them where they are in trouble.
            brokers: brokers.keys().map(|name| format!("broker {name}")).collect(),
            consumers: parts
                .consumers
                .iter()
                .map(|(group, consumer)| (group.name().to_owned(), consumer.monitor()))
                .collect(),
        }
    }

    /// The relay and its brokers: what the sending side depends on.
    pub(super) fn of_producer(&self) -> Health {
        let pulse = self.clone();
        Arc::new(move || pulse.sending())
    }

    /// The consumer groups.
    pub(super) fn of_consumer(&self) -> Health {
        let pulse = self.clone();
        Arc::new(move || pulse.receiving())
    }

    /// What routes that send at most once have lost, whichever way their messages went.
    pub(super) fn lost_by_routes(&self) -> Lost {
        let pulse = self.clone();
        Arc::new(move || pulse.losses().into_iter().map(|(route, (messages, _))| (route, messages)).collect())
    }

    /// What groups that handle messages at most once have lost.
    pub(super) fn lost_by_groups(&self) -> Lost {
        let consumers = self.consumers.clone();
        Arc::new(move || {
            let lost = consumers.iter().map(|(group, monitor)| (group.clone(), monitor.status().lost));
            lost.filter(|(_, messages)| *messages > 0).collect()
        })
    }

    /// What groups have not acknowledged in time.
    pub(super) fn overdue(&self) -> AllOverdue {
        let relay = self.relay.clone();
        Arc::new(move || {
            let groups = relay.iter().flat_map(|relay| relay.status().overdue);
            let view = |group: relay::Overdue| Overdue {
                group: group.group,
                overdue: group.overdue,
                given_up: group.given_up,
                redelivered: group.redelivered,
            };
            groups.map(view).collect()
        })
    }

    /// By route, how many and why the last.
    fn losses(&self) -> BTreeMap<String, (u64, String)> {
        let stored = self.relay.iter().flat_map(|relay| relay.status().losses);
        let fleeting = self.express.iter().flat_map(|express| express.losses());
        let mut all: BTreeMap<String, (u64, String)> = BTreeMap::new();
        for loss in stored.chain(fleeting) {
            let (messages, error) = all.entry(loss.route).or_default();
            *messages += loss.messages;
            *error = loss.error;
        }
        all
    }

    fn sending(&self) -> Vec<Component> {
        let lost = self.losses().into_iter().map(|(route, (messages, error))| {
            let detail = format!("{messages} lost since the start, the last because {error}");
            component(&format!("route {route}"), true, detail)
        });
        let Some(reporter) = &self.relay else { return lost.collect() };
        let status = reporter.status();
        let mut components = vec![match status.problem {
            Some(problem) => component("relay", false, problem),
            None => {
                let (lanes, relays) = (status.lanes.len(), status.instances);
                component("relay", true, format!("lanes held: {lanes}; relays alive: {relays}"))
            }
        }];
        let troubled = |name: &str| status.breakers.iter().any(|breaker| breaker.destination == name);
        let well = self.brokers.iter().filter(|name| !troubled(name));
        components.extend(well.map(|name| component(name, true, "takes messages")));
        let closed = status.breakers.iter();
        components
            .extend(closed.map(|breaker| component(&breaker.destination, !breaker.open, said_of(breaker))));
        components.extend(lost);
        // Nothing here is broken: the group may be anywhere.
        let overdue = status.overdue.iter().filter(|group| group.overdue > 0);
        components.extend(overdue.map(|group| {
            let (overdue, given_up) = (group.overdue, group.given_up);
            let detail =
                format!("{overdue} published and not processed in time; sent again in vain: {given_up}");
            component(&format!("acknowledgements of {}", group.group), true, detail)
        }));
        components
    }

    fn receiving(&self) -> Vec<Component> {
        let consumer = |(group, monitor): &(String, inbox::Monitor)| {
            let status = monitor.status();
            let (ok, detail) = match status.condition {
                inbox::Condition::Running => {
                    (true, format!("{} done, {} duplicates since the start", status.done, status.duplicates))
                }
                inbox::Condition::Paused { since, error } => {
                    let since = relative(since, Utc::now());
                    (false, format!("paused {since}: {error}; it goes on by itself and no message is lost"))
                }
                inbox::Condition::Broken { error } => (false, error),
            };
            component(&format!("consumer {group}"), ok, detail)
        };
        self.consumers.iter().map(consumer).collect()
    }
}

fn said_of(breaker: &relay::BreakerView) -> String {
    let since = relative(DateTime::<Utc>::from(breaker.since), Utc::now());
    if breaker.open {
        let fate = if breaker.misconfigured {
            "its messages wait for a minute and are dead then"
        } else {
            "messages wait and spend no attempts"
        };
        format!("closed off {since}: {}; {fate}", breaker.error)
    } else {
        format!("coming back; closed off {since}: {}", breaker.error)
    }
}

fn component(name: &str, ok: bool, detail: impl Into<String>) -> Component {
    Component { name: name.to_owned(), ok, detail: detail.into() }
}
