//! Which messages go where, and under which rules.

use std::fmt;
use std::sync::Arc;

use broker::{Format, Guarantees, Publisher};
use message::{OnDead, Order, RetryPolicy, TopicPattern};

/// A way out for some topics.
#[derive(Clone)]
pub struct Route {
    /// Its name in the configuration.
    pub name: String,
    /// The topics it takes. Of several routes that fit, the most specific pattern wins.
    pub topics: Vec<TopicPattern>,
    /// The name of its broker: routes that share it share its breaker, and wait for it together.
    pub broker: String,
    /// Where to.
    pub publisher: Arc<dyn Publisher>,
    /// How messages are written down there.
    pub format: Format,
    /// What is kept in order.
    pub order: Order,
    /// What becomes of a key behind a Dead message.
    pub on_dead: OnDead,
    /// When to try again.
    pub retry: RetryPolicy,
}

impl fmt::Debug for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Route")
            .field("name", &self.name)
            .field("topics", &self.topics)
            .field("broker", &self.broker)
            .finish_non_exhaustive()
    }
}

impl Route {
    /// A route with the default rules: order by key, Dead messages hold their key, ten attempts.
    pub fn new(name: impl Into<String>, topics: &[&str], publisher: Arc<dyn Publisher>) -> Self {
        let name = name.into();
        Self {
            broker: name.clone(),
            name,
            topics: topics.iter().map(|topic| TopicPattern::new(*topic)).collect(),
            publisher,
            format: Format::default(),
            order: Order::default(),
            on_dead: OnDead::default(),
            retry: RetryPolicy::default(),
        }
    }

    /// A failed message makes the later ones of its key wait.
    pub(crate) fn holds_failed(&self) -> bool {
        self.order == Order::Key
    }

    /// A Dead one does too.
    pub(crate) fn holds_dead(&self) -> bool {
        self.order == Order::Key && self.on_dead == OnDead::Hold
    }
}

/// A route and what its broker promises, asked once.
#[derive(Debug)]
pub(crate) struct Way {
    pub(crate) route: Route,
    pub(crate) guarantees: Guarantees,
    /// The number of its broker: what goes to one waits for no other.
    pub(crate) channel: usize,
}

/// All routes of a relay.
#[derive(Debug)]
pub(crate) struct Routes {
    ways: Vec<Arc<Way>>,
    channels: usize,
}

impl Routes {
    pub(crate) fn new(routes: Vec<Route>) -> Self {
        let mut brokers: Vec<String> = Vec::new();
        let mut ways = Vec::with_capacity(routes.len());
        for route in routes {
            let channel = brokers.iter().position(|broker| *broker == route.broker).unwrap_or_else(|| {
                brokers.push(route.broker.clone());
                brokers.len() - 1
            });
            ways.push(Arc::new(Way { guarantees: route.publisher.guarantees(), route, channel }));
        }
        Self { ways, channels: brokers.len().max(1) }
    }

    /// How many brokers there are. Topics that no route takes go with the first.
    pub(crate) fn channels(&self) -> usize {
        self.channels
    }

    /// The route that takes `topic`.
    pub(crate) fn of(&self, topic: &str) -> Option<&Arc<Way>> {
        let fit = |way: &&Arc<Way>| {
            let fits = way.route.topics.iter().filter(|pattern| pattern.matches(topic));
            fits.map(TopicPattern::specificity).max()
        };
        // The first of equals: the order of the configuration.
        self.ways.iter().rev().filter(|way| fit(way).is_some()).max_by_key(fit)
    }
}
