//! The flow of each route that is watched: how many messages its broker took and each group has done, and whether that is
//! suddenly less than usual.
//!
//! Counted where messages pass in this process: in a process that runs the relay alone, nobody knows what groups do.

mod count;
mod usual;

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use broker::Connected;
use message::Semantics;
use server::FlowView;
use store::{Inbox, Store};
use tokio::task::JoinHandle;

use self::usual::{Change, Flow, STEPS};
use super::super::inboxes::Inboxes;
use super::super::world;
use super::parts::Brokers;
use crate::config::{Config, Consumer, Watch};

/// Topics whose route is remembered. A sender of more of them does not fill the memory.
const REMEMBERED: usize = 10_000;

/// All flows that are counted.
pub(super) struct Flows {
    topology: admin::Topology,
    /// By route.
    routes: BTreeMap<String, Route>,
    /// The routes of topics that were met.
    known: RwLock<HashMap<String, Option<String>>>,
}

/// What is counted of a route.
struct Route {
    sent: Counted,
    /// By group.
    done: BTreeMap<String, Counted>,
}

/// Messages that passed, and, where it is watched, how that is compared with before.
struct Counted {
    total: AtomicU64,
    flow: Option<Mutex<Flow>>,
}

impl Counted {
    fn new(watch: Option<Watch>) -> Self {
        let flow = watch.map(|watch| Mutex::new(Flow::new(watch.window, watch.drop)));
        Self { total: AtomicU64::new(0), flow }
    }

    fn total(&self) -> u64 {
        self.total.load(Ordering::Relaxed)
    }

    fn flow(&self) -> Option<MutexGuard<'_, Flow>> {
        Some(self.flow.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// A step of its window is over.
    fn step(&self, route: &str, group: Option<&str>) {
        let Some(mut flow) = self.flow() else { return };
        let change = flow.step(self.total());
        let (now, usual) = (flow.now().round(), flow.usual().unwrap_or_default().round());
        drop(flow);
        let who = group.map_or_else(|| format!("route {route}"), |group| format!("route {route} to {group}"));
        match change {
            Some(Change::Dropped) => {
                tracing::warn!(route, group, "flow of {who} dropped: {now}/min, usually {usual}/min");
            }
            Some(Change::Back) => {
                tracing::info!(route, group, "flow of {who} is as usual: {now}/min, usually {usual}/min");
            }
            None => {}
        }
    }

    fn view(&self, route: &str, group: Option<&str>) -> FlowView {
        let flow = self.flow();
        FlowView {
            route: route.to_owned(),
            group: group.map(str::to_owned),
            total: self.total(),
            now: flow.as_ref().map(|flow| flow.now()),
            usual: flow.as_ref().and_then(|flow| flow.usual()),
            dropped: flow.as_ref().map(|flow| flow.dropped()),
        }
    }
}

impl Flows {
    /// What the configuration wants counted: routes that are watched, and those past the store, of which nothing else
    /// is known. Nothing where there are none.
    pub(super) fn of(config: &Config) -> Option<Arc<Self>> {
        let topology = world::topology(config);
        let mut routes = BTreeMap::new();
        for (name, route) in &config.routes {
            if route.watch.is_none() && !route.semantics.bypasses_store() {
                continue;
            }
            let ours = |topic: &String| topology.route_of(topic).is_some_and(|found| found.name == *name);
            // Work that is a transaction of the broker passes no inbox.
            let marks = |consumer: &Consumer| consumer.semantics != Semantics::ExactlyOnce;
            let hears = |consumer: &Consumer| marks(consumer) && consumer.topics.iter().any(ours);
            let groups = config.consumers.iter().filter(|(_, consumer)| hears(consumer));
            let done = groups.map(|(group, _)| (group.clone(), Counted::new(route.watch))).collect();
            routes.insert(name.clone(), Route { sent: Counted::new(route.watch), done });
        }
        if routes.is_empty() {
            return None;
        }
        Some(Arc::new(Self { topology, routes, known: RwLock::default() }))
    }

    /// `brokers`, with what they confirm counted.
    pub(super) fn brokers(self: &Arc<Self>, brokers: &Brokers) -> Brokers {
        let counted = |(name, broker): (&String, &Connected)| {
            let publisher = self.publishing(Arc::clone(&broker.publisher));
            (name.clone(), Connected { publisher, ..broker.clone() })
        };
        Brokers { open: brokers.iter().map(counted).collect(), hearing: brokers.hearing.clone() }
    }

    /// The inboxes of the groups that hear of what is counted, with what they do counted, and the others as they are.
    pub(super) fn inboxes(self: &Arc<Self>, store: &Arc<dyn Store>, inboxes: &Inboxes) -> Inboxes {
        let groups = self.routes.values().flat_map(|route| route.done.keys());
        let counted = groups.map(|group| {
            let inbox: Arc<dyn Inbox> = match inboxes.get(group) {
                Some(elsewhere) => Arc::clone(elsewhere),
                None => store.clone(),
            };
            (group.clone(), self.doing(inbox))
        });
        inboxes.clone().into_iter().chain(counted).collect()
    }

    /// A broker took messages of this topic.
    fn sent(&self, topic: &str, messages: u64) {
        if let Some(route) = self.route_of(topic).and_then(|route| self.routes.get(&route)) {
            route.sent.total.fetch_add(messages, Ordering::Relaxed);
        }
    }

    /// A group has done messages of this topic.
    fn done(&self, group: &str, topic: &str, messages: u64) {
        let route = self.route_of(topic).and_then(|route| self.routes.get(&route));
        if let Some(done) = route.and_then(|route| route.done.get(group)) {
            done.total.fetch_add(messages, Ordering::Relaxed);
        }
    }

    fn route_of(&self, topic: &str) -> Option<String> {
        if let Some(known) = self.known.read().unwrap_or_else(PoisonError::into_inner).get(topic) {
            return known.clone();
        }
        let route = self.topology.route_of(topic).map(|route| route.name.clone());
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        if known.len() < REMEMBERED {
            known.insert(topic.to_owned(), route.clone());
        }
        route
    }

    /// Looks at every flow that is watched, in its own step, until it is aborted.
    pub(super) fn watch(self: &Arc<Self>, config: &Config) -> Vec<JoinHandle<()>> {
        let watched = config.routes.iter().filter_map(|(name, route)| Some((name.clone(), route.watch?)));
        let watcher = |(name, watch): (String, Watch)| {
            let flows = Arc::clone(self);
            tokio::spawn(async move {
                let mut ticks = tokio::time::interval(watch.window / STEPS);
                ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
                // The first comes at once.
                ticks.tick().await;
                loop {
                    ticks.tick().await;
                    flows.step(&name);
                }
            })
        };
        watched.map(watcher).collect()
    }

    fn step(&self, route: &str) {
        let Some(found) = self.routes.get(route) else { return };
        found.sent.step(route, None);
        for (group, done) in &found.done {
            done.step(route, Some(group));
        }
    }

    /// What brokers took.
    pub(super) fn of_routes(&self) -> Vec<FlowView> {
        self.routes.iter().map(|(name, route)| route.sent.view(name, None)).collect()
    }

    /// What groups have done.
    pub(super) fn of_groups(&self) -> Vec<FlowView> {
        let groups = self.routes.iter().flat_map(|(name, route)| {
            route.done.iter().map(move |(group, done)| done.view(name, Some(group)))
        });
        groups.collect()
    }
}
