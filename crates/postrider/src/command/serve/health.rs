//! How the parts of this process are: asked by health requests and by the page, so it must not block.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::SystemTime;

use chrono::{DateTime, Utc};
use server::{
    AllOverdue, AllTransactions, Component, FlowView, Health, Hearing, Lost, Overdue, TransactionsView,
};

use super::super::output::relative;
use super::flow::Flows;
use super::parts::{Brokers, Parts};
use crate::config::Config;

/// What is asked.
#[derive(Clone)]
pub(super) struct Pulse {
    relay: Option<relay::Reporter>,
    express: Option<Arc<relay::Direct>>,
    brokers: Vec<String>,
    consumers: Vec<(String, inbox::Monitor)>,
    /// Those of them whose work is messages.
    transforms: Vec<(String, inbox::Monitor)>,
    flows: Option<Arc<Flows>>,
    hearing: Option<Arc<Hearing>>,
}

impl Pulse {
    /// Asks these.
    pub(super) fn of(parts: &Parts, brokers: &Brokers) -> Self {
        let transforms: Vec<_> =
            parts.transforms.iter().map(|(group, running)| (group.clone(), running.monitor())).collect();
        Self {
            relay: parts.relay.as_ref().map(relay::Running::reporter),
            express: parts.express.clone(),
            // As the relay names them where they are in trouble.
            brokers: brokers.keys().map(|name| format!("broker {name}")).collect(),
            consumers: parts
                .consumers
                .iter()
                .map(|(group, consumer)| (group.name().to_owned(), consumer.monitor()))
                .chain(transforms.iter().cloned())
                .collect(),
            transforms,
            flows: parts.flows.clone(),
            hearing: brokers.hearing.clone(),
        }
    }

    /// The relay, its brokers and the topic of acknowledgements: what the sending side depends on.
    pub(super) fn of_producer(&self) -> Health {
        let pulse = self.clone();
        Arc::new(move || pulse.sending())
    }

    /// The consumer groups.
    pub(super) fn of_consumer(&self) -> Health {
        let pulse = self.clone();
        Arc::new(move || pulse.receiving())
    }

    /// What routes that send at most once have lost, whichever way their messages went. From nothing on: who watches a counter
    /// does not see the step with which it appears.
    pub(super) fn lost_by_routes(&self, config: &Config) -> Lost {
        let pulse = self.clone();
        let routes = config.routes.iter().filter(|(_, route)| !route.semantics.sends_again());
        let none: BTreeMap<String, u64> = routes.map(|(name, _)| (name.clone(), 0)).collect();
        Arc::new(move || {
            let mut lost = none.clone();
            lost.extend(pulse.losses().into_iter().map(|(route, (messages, _))| (route, messages)));
            lost.into_iter().collect()
        })
    }

    /// What groups that handle messages at most once have lost, likewise.
    pub(super) fn lost_by_groups(&self, config: &Config) -> Lost {
        let may_lose = |group: &str| {
            config.consumers.get(group).is_some_and(|consumer| !consumer.semantics.sends_again())
        };
        let consumers: Vec<_> = self.consumers.iter().filter(|(group, _)| may_lose(group)).cloned().collect();
        Arc::new(move || {
            consumers.iter().map(|(group, monitor)| (group.clone(), monitor.status().lost)).collect()
        })
    }

    /// What brokers took, by route.
    pub(super) fn flows_of_routes(&self) -> server::Flows {
        let flows = self.flows.clone();
        Arc::new(move || flows.iter().flat_map(|flows| flows.of_routes()).collect())
    }

    /// What groups have done, by route.
    pub(super) fn flows_of_groups(&self) -> server::Flows {
        let flows = self.flows.clone();
        Arc::new(move || flows.iter().flat_map(|flows| flows.of_groups()).collect())
    }

    /// What groups whose work is messages have given up.
    pub(super) fn dead_letters(&self) -> Lost {
        let transforms = self.transforms.clone();
        Arc::new(move || {
            transforms.iter().map(|(group, monitor)| (group.clone(), monitor.status().dead)).collect()
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

    /// How transactions ended on routes that send exactly once.
    pub(super) fn transactions(&self) -> AllTransactions {
        let relay = self.relay.clone();
        Arc::new(move || {
            let brokers = relay.iter().flat_map(|relay| relay.status().transactions);
            let view = |ended: relay::Ended| TransactionsView {
                broker: ended.broker,
                committed: ended.committed,
                rolled_back: ended.rolled_back,
                took: ended.took.into(),
            };
            brokers.map(view).collect()
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
        let flows: Vec<FlowView> = self.flows.iter().flat_map(|flows| flows.of_routes()).collect();
        let lost = self.losses().into_iter().map(|(route, (messages, error))| {
            let taken = flows.iter().find(|flow| flow.route == route).map(|flow| flow.total);
            let share = taken.map(|taken| format!(" of {}", taken + messages)).unwrap_or_default();
            let detail = format!("{messages}{share} lost since the start, the last because {error}");
            component(&format!("route {route}"), true, detail)
        });
        let ago = |moment: SystemTime| relative(moment.into(), Utc::now());
        let heard = self.hearing.iter().map(|hearing| hearing.view(ago));
        let lost = lost.chain(flows.iter().filter_map(flowing)).chain(heard);
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
                    let (done, duplicates, dead) = (status.done, status.duplicates, status.dead);
                    (true, format!("{done} done, {duplicates} duplicates, {dead} dead since the start"))
                }
                inbox::Condition::Paused { since, error } => {
                    let since = relative(since, Utc::now());
                    let fate = match status.lost {
                        0 => "and no message is lost".to_owned(),
                        lost => format!("but handles a message at most once: {lost} lost since the start"),
                    };
                    (false, format!("paused {since}: {error}; it goes on by itself {fate}"))
                }
                inbox::Condition::Broken { error } => (false, error),
            };
            component(&format!("consumer {group}"), ok, detail)
        };
        let flows: Vec<FlowView> = self.flows.iter().flat_map(|flows| flows.of_groups()).collect();
        self.consumers.iter().map(consumer).chain(flows.iter().filter_map(flowing)).collect()
    }
}

/// What is said of a flow that is watched. Nothing here is broken: perhaps there is nothing to send.
fn flowing(flow: &FlowView) -> Option<Component> {
    let (now, route) = (flow.now?.round(), &flow.route);
    let usual = flow.usual.map(|usual| format!(", usually {}/min", usual.round())).unwrap_or_default();
    let name = match &flow.group {
        None => format!("flow of route {route}"),
        Some(group) => format!("flow of route {route} to {group}"),
    };
    let dropped = if flow.dropped? { "dropped: " } else { "" };
    Some(component(&name, true, format!("{dropped}{now}/min{usual}")))
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
