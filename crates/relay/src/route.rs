//! Which messages go where, and under which rules.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use broker::{Format, Guarantees, Publisher};
use message::{OnDead, Order, RetryPolicy, Secrets, Semantics, TopicPattern};

/// When the store is told that a message was sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Settle {
    /// After the broker has confirmed it: it is not lost, and may be sent twice.
    #[default]
    After,
    /// Before the broker hears of it: it is never sent twice, and may be lost. Its publisher must not try again by
    /// itself, either.
    Before,
    /// After the broker has committed it together with a note of it, by which whoever comes next knows what is in the log:
    /// it is neither lost nor there twice. Its publisher must have transactions.
    Together,
}

impl Settle {
    /// What keeps `semantics`, by this publisher.
    pub fn keeping(semantics: Semantics, publisher: &dyn Publisher) -> Self {
        match semantics {
            Semantics::ExactlyOnce if publisher.transactions().is_some() => Self::Together,
            _ if semantics.sends_again() => Self::After,
            _ => Self::Before,
        }
    }
}

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
    /// When a message counts as sent.
    pub settle: Settle,
    /// How long its broker must recognise a message that is sent twice, where what is promised rests on that: nothing is
    /// sent to one that does not.
    pub recognised: Option<Duration>,
    /// The topic of copies that are written with the settlement, where messages are settled before they are sent: whatever
    /// becomes of a message, its copy is sent as the route of that topic promises.
    pub copy_to: Option<String>,
    /// What capabilities to acknowledge are made of, which travel with its messages if there are any.
    pub secrets: Option<Arc<Secrets>>,
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
            settle: Settle::default(),
            recognised: None,
            copy_to: None,
            secrets: None,
        }
    }

    /// For how long `semantics` need the broker itself to recognise a message that is sent twice.
    pub fn rests_on(
        semantics: Semantics,
        publisher: &dyn Publisher,
        retry: &RetryPolicy,
    ) -> Option<Duration> {
        let rests = semantics == Semantics::ExactlyOnce && publisher.transactions().is_none();
        rests.then_some(retry.give_up_after)
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
    /// The number of its broker and of when it settles: what goes to one waits for no other.
    pub(crate) channel: usize,
}

/// All routes of a relay.
#[derive(Debug)]
pub(crate) struct Routes {
    ways: Vec<Arc<Way>>,
    channels: Vec<Settle>,
    /// The first channel is no route's: only what no route takes goes with it.
    spare: bool,
}

impl Routes {
    pub(crate) fn new(routes: Vec<Route>) -> Self {
        let mut channels: Vec<(String, Settle)> = Vec::new();
        for settle in [Settle::After, Settle::Before, Settle::Together] {
            for route in routes.iter().filter(|route| route.settle == settle) {
                let channel = (route.broker.clone(), settle);
                if !channels.contains(&channel) {
                    channels.push(channel);
                }
            }
            // What no route takes goes with the first, which must not settle it before somebody has looked.
            if channels.is_empty() {
                channels.push((String::new(), Settle::After));
            }
        }
        let way = |route: Route| {
            let here =
                |(broker, settle): &(String, Settle)| *broker == route.broker && *settle == route.settle;
            let channel = channels.iter().position(here).expect("every route has one");
            Arc::new(Way { guarantees: route.publisher.guarantees(), route, channel })
        };
        let ways: Vec<Arc<Way>> = routes.into_iter().map(way).collect();
        let spare = !ways.is_empty() && ways.iter().all(|way| way.channel > 0);
        Self { ways, channels: channels.into_iter().map(|(_, settle)| settle).collect(), spare }
    }

    /// The channels that routes have; where there is no route, the one that what no route takes goes with.
    pub(crate) fn used(&self) -> std::ops::Range<usize> {
        usize::from(self.spare)..self.channels.len()
    }

    /// When messages of each channel are settled.
    pub(crate) fn channels(&self) -> &[Settle] {
        &self.channels
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

#[cfg(test)]
mod tests {
    use async_trait::async_trait;
    use broker::{Outcome, Outgoing};

    use super::*;

    struct Silent;

    #[async_trait]
    impl Publisher for Silent {
        fn guarantees(&self) -> Guarantees {
            Guarantees::default()
        }

        async fn publish(&self, batch: Vec<Outgoing>) -> Vec<Outcome> {
            vec![Outcome::Held; batch.len()]
        }
    }

    #[test]
    fn a_channel_that_no_route_has_is_not_worth_a_look_of_its_own() {
        let used = |settles: &[Settle]| {
            let routes = settles.iter().enumerate().map(|(number, settle)| Route {
                settle: *settle,
                ..Route::new(format!("route-{number}"), &["*"], Arc::new(Silent))
            });
            Routes::new(routes.collect()).used()
        };
        assert_eq!(used(&[Settle::After, Settle::Together]), 0..2);
        assert_eq!(used(&[Settle::Together]), 1..2, "the first is for what no route takes");
        assert_eq!(used(&[Settle::Before, Settle::Together]), 1..3);
        assert_eq!(used(&[]), 0..1, "without a route somebody has to say so");
    }
}
