//! What is well written and still cannot work: refused before anything is opened.
//!
//! Semantics are checked here against what the brokers and the consumer groups can do, so that a promise nobody
//! can keep is found by the person who writes it down and not by the one whose message is lost.

mod exact;
mod fleeting;

use std::time::Duration;

use message::Semantics;

use super::overlap::witness;
use super::read::Places;
use super::section::nearest;
use super::tree::Origin;
use super::units::duration_text;
use super::{Acknowledge, AcknowledgeTo, Complaint, Config, Consumer, Dedup, Handler, Place, Route};

/// What is built in: settings that nobody has written.
const KEEP_IDS: Duration = Duration::from_secs(7 * 24 * 60 * 60);
const REPLAY: Duration = Duration::from_secs(3 * 24 * 60 * 60);

/// A relay must be able to publish, settle and renew well within its lease.
const LEAST_LEASE: Duration = Duration::from_secs(1);

/// A window is looked at ten times; and what happened yesterday is no news.
const WINDOWS: std::ops::RangeInclusive<Duration> =
    Duration::from_secs(1)..=Duration::from_secs(24 * 60 * 60);

/// Mistakes, and things that work but may surprise.
#[derive(Debug, Default)]
pub(super) struct Findings {
    pub(super) mistakes: Vec<Complaint>,
    pub(super) warnings: Vec<Complaint>,
}

/// Looks at everything that concerns more than one setting.
pub(super) fn check(config: &Config, places: &Places) -> Findings {
    let mut checker = Checker { config, places, findings: Findings::default() };
    checker.relay();
    checker.patterns();
    checker.acknowledgements();
    for (name, route) in &config.routes {
        checker.route(name, route);
    }
    for (name, consumer) in &config.consumers {
        checker.consumer(name, consumer);
    }
    checker.findings
}

struct Checker<'a> {
    config: &'a Config,
    places: &'a Places,
    findings: Findings,
}

impl Checker<'_> {
    fn complaint(&self, setting: &str, text: String) -> Complaint {
        let origin = self.places.get(setting).cloned().unwrap_or(Origin::BuiltIn);
        Complaint { setting: setting.to_owned(), origin, text }
    }

    fn refuse(&mut self, setting: &str, text: String) {
        let complaint = self.complaint(setting, text);
        self.findings.mistakes.push(complaint);
    }

    fn warn(&mut self, setting: &str, text: String) {
        let complaint = self.complaint(setting, text);
        self.findings.warnings.push(complaint);
    }

    fn relay(&mut self) {
        let relay = &self.config.relay;
        if relay.lease < LEAST_LEASE {
            let (lease, least) = (duration_text(relay.lease), duration_text(LEAST_LEASE));
            self.refuse("relay.lease", format!(
                "{lease} is too short: a relay that publishes slowly would lose its lanes in the middle of it; use at least {least}"
            ));
        }
        if relay.poll > relay.lease {
            let (poll, lease) = (duration_text(relay.poll), duration_text(relay.lease));
            self.refuse("relay.poll", format!(
                "{poll} is longer than the lease of {lease}: lanes of a dead relay would lie idle; poll more often or lengthen relay.lease"
            ));
        }
        if relay.claims.is_some() && self.config.store.place == Place::Redis {
            self.refuse(
                "relay.claims",
                "the store is Redis itself and keeps locks and attempts already: remove it".to_owned(),
            );
        }
        if self.config.routes.is_empty() {
            self.refuse(
                "routes",
                "there is no route, so no topic would be accepted: add one with topics = [\"*\"]".to_owned(),
            );
        }
    }

    fn acknowledgements(&mut self) {
        let heard = self.config.producer.acknowledgements.as_ref();
        if let Some(heard) = heard {
            self.broker("producer.acknowledgements", &heard.broker);
        }
        if let Some((text, fix)) = self.config.unproven_acknowledgements() {
            self.warn("producer.acknowledgements", format!("{text}; {fix}"));
        }
        if let Some(AcknowledgeTo::Topic { broker, .. }) = &self.config.consumer.acknowledge_to {
            self.broker("consumer.acknowledge_to", broker);
        }
    }

    fn patterns(&mut self) {
        let all: Vec<_> = self
            .config
            .routes
            .iter()
            .flat_map(|(name, route)| route.topics.iter().map(move |pattern| (name.as_str(), pattern)))
            .collect();
        for (at, (route, pattern)) in all.iter().enumerate() {
            for (earlier, other) in &all[..at] {
                let setting = format!("routes.{route}.topics");
                if pattern == other && route == earlier {
                    self.refuse(&setting, format!("`{pattern}` is there twice"));
                } else if pattern == other {
                    self.refuse(&setting, format!(
                        "`{pattern}` is also in routes.{earlier}: which of them should take it? Leave it in one"
                    ));
                } else if route != earlier
                    && pattern.specificity() == other.specificity()
                    && let Some(topic) = witness(pattern, other)
                {
                    self.refuse(&setting, format!(
                        "`{pattern}` and `{other}` of routes.{earlier} fit `{topic}` equally well: make one of them longer, or add `{topic}` to one"
                    ));
                }
            }
        }
    }

    fn broker(&mut self, section: &str, broker: &str) {
        if broker.is_empty() || self.config.brokers.contains_key(broker) {
            return;
        }
        let known: Vec<&str> = self.config.brokers.keys().map(String::as_str).collect();
        let advice = match known.is_empty() {
            true => format!("add [brokers.{broker}] with a url"),
            false => nearest(broker, &known),
        };
        self.refuse(&format!("{section}.broker"), format!("there is no broker `{broker}`; {advice}"));
    }

    fn route(&mut self, name: &str, route: &Route) {
        let section = format!("routes.{name}");
        self.broker(&section, &route.broker);
        self.retry(&section, &route.retry);
        if let Some(watch) = route.watch.filter(|watch| !WINDOWS.contains(&watch.window)) {
            let [window, least, most] = [watch.window, *WINDOWS.start(), *WINDOWS.end()].map(duration_text);
            self.refuse(
                &format!("{section}.watch.window"),
                format!("{window} is no window to watch a flow in: use {least} to {most}"),
            );
        }
        if self.config.relay.claims.is_some()
            && (!route.semantics.sends_again() || route.semantics == Semantics::ExactlyOnce)
        {
            self.warn(&format!("{section}.semantics"), format!(
                "relay.claims locks no message of a route that promises {}: it is kept from being sent twice in another way",
                route.semantics
            ));
        }
        if let Some(topic) = &route.copy_to {
            self.copy(&format!("{section}.copy_to"), route, topic);
        }
        if !route.semantics.sends_again() && route.retry != message::RetryPolicy::default() {
            self.warn(
                &format!("{section}.retry"),
                format!(
                    "a route that promises {} sends a message once: these settings do nothing",
                    route.semantics
                ),
            );
        }
    }

    /// A copy is there when its message is lost: it is written with the settlement, and sent until it is confirmed.
    fn copy(&mut self, setting: &str, route: &Route, topic: &str) {
        if route.semantics != Semantics::AtMostOnce {
            let advice = match route.semantics.sends_again() {
                true => "its messages are sent until they are confirmed: leave `copy_to` out",
                false => {
                    "its messages need not pass the store: the nearest that has copies is \"at-most-once\""
                }
            };
            self.refuse(setting, format!("the route promises {}, and {advice}", route.semantics));
        }
        match self.config.route_of(topic) {
            None => self.refuse(
                setting,
                format!("no route takes `{topic}`: add it to one that promises at-least-once or more"),
            ),
            Some((name, other)) if !other.semantics.sends_again() => self.refuse(
                setting,
                format!(
                    "routes.{name} takes `{topic}` and promises {}, so that a copy could be lost too: the nearest that \
                     cannot is \"at-least-once\"",
                    other.semantics
                ),
            ),
            Some(_) => {}
        }
    }

    fn retry(&mut self, section: &str, retry: &message::RetryPolicy) {
        if retry.first > retry.cap {
            let (first, cap) = (duration_text(retry.first), duration_text(retry.cap));
            self.refuse(&format!("{section}.retry.cap"), format!(
                "the cap of {cap} is shorter than the first wait of {first}: raise retry.cap or lower retry.first"
            ));
        }
    }

    fn consumer(&mut self, name: &str, consumer: &Consumer) {
        let section = format!("consumers.{name}");
        self.broker(&section, &consumer.broker);
        self.retry(&section, &consumer.retry);
        for topic in &consumer.topics {
            let Some((route_name, route)) = self.config.route_of(topic) else {
                let mut groups = self.config.consumers.values();
                let is_made = groups.any(|group| {
                    group.semantics == Semantics::ExactlyOnce && group.broker == consumer.broker
                });
                // Nobody knows what topics such a group will send to.
                if !is_made {
                    self.warn(
                        &format!("{section}.topics"),
                        format!("no route takes `{topic}`: nothing will come from here"),
                    );
                }
                continue;
            };
            if route.broker != consumer.broker && self.config.brokers.contains_key(&route.broker) {
                self.refuse(&format!("{section}.broker"), format!(
                    "routes.{route_name} sends `{topic}` to `{}`, and this group listens on `{}`: it would never hear of it",
                    route.broker, consumer.broker
                ));
            }
            if consumer.semantics.leaves_marks() {
                self.keep_ids(&section, consumer, topic, route_name, route);
                self.acknowledge(&section, consumer, route_name, route);
            }
        }
        match consumer.semantics {
            Semantics::None | Semantics::BestEffort => self.fleeting(&section, consumer),
            Semantics::ExactlyOnce => self.exact(&section, consumer),
            _ => {
                self.dedup(&section, consumer);
                self.outside(&section, consumer);
            }
        }
        self.findings.dedup();
    }

    /// Refuses settings about ids that somebody has written for a group without any.
    fn no_ids(&mut self, section: &str, consumer: &Consumer, why: &str) {
        let on_redis = self.config.store.place == Place::Redis;
        for (name, is_set) in [
            ("dedup", consumer.dedup != Dedup::Sql && !on_redis),
            ("keep_ids", consumer.keep_ids != KEEP_IDS),
            ("replay", consumer.replay != REPLAY),
        ] {
            if is_set {
                self.refuse(&format!("{section}.{name}"), why.to_owned());
            }
        }
    }

    /// An id that is forgotten while its message can still come again is a duplicate that nobody recognises.
    fn keep_ids(&mut self, section: &str, consumer: &Consumer, topic: &str, route_name: &str, route: &Route) {
        let retried = if route.semantics.sends_again() { route.retry.give_up_after } else { Duration::ZERO };
        // What is sent again for one group comes to all.
        let groups = self.config.consumers.values();
        let groups = groups.filter(|group| group.topics.iter().any(|name| name == topic));
        let redelivered = groups.filter_map(|group| group.acknowledge).map(Acknowledge::horizon).max();
        let by = match redelivered {
            Some(_) => "retry.give_up_after, acknowledge",
            None => "retry.give_up_after",
        };
        let redelivered = redelivered.unwrap_or_default();
        let longest = retried.saturating_add(redelivered).saturating_add(consumer.replay);
        let margin = (longest / 10).max(Duration::from_secs(60 * 60));
        let least = longest.saturating_add(margin);
        if consumer.keep_ids < least {
            let (kept, least) = (duration_text(consumer.keep_ids), duration_text(least));
            let retried = duration_text(retried.saturating_add(redelivered));
            let replayed = duration_text(consumer.replay);
            self.refuse(&format!("{section}.keep_ids"), format!(
                "{kept} is too short: routes.{route_name} may send a message again for {retried} ({by}), \
                 people may for another {replayed} (replay), and an id forgotten before that is done twice; keep ids for \
                 at least {least}"
            ));
        }
    }

    /// What promises to come once is not sent again.
    fn acknowledge(&mut self, section: &str, consumer: &Consumer, route_name: &str, route: &Route) {
        if consumer.acknowledge.is_none() {
            return;
        }
        let setting = format!("{section}.acknowledge");
        if !route.semantics.sends_again() {
            self.refuse(&setting, format!(
                "routes.{route_name} promises {}, so nothing of it is sent again: leave `acknowledge` out, or let the \
                 route promise at-least-once",
                route.semantics
            ));
        }
        if route.semantics == Semantics::ExactlyOnce {
            self.refuse(&setting, format!(
                "routes.{route_name} promises exactly-once, and what is sent again is in the broker twice: leave \
                 `acknowledge` out, or let the route promise effectively-once"
            ));
        }
        if consumer.semantics == Semantics::AtMostOnce {
            self.refuse(
                &setting,
                "the group promises at-most-once, and what is sent again could be done twice: leave \
                 `acknowledge` out, or let the group promise at-least-once"
                    .to_owned(),
            );
        }
    }

    /// What recognises duplicates must fit the store, the handler and the promise.
    fn dedup(&mut self, section: &str, consumer: &Consumer) {
        let (on_redis, setting) = (self.config.store.place == Place::Redis, format!("{section}.dedup"));
        if consumer.dedup != Dedup::Sql && self.config.consumer.redis.is_none() && !on_redis {
            self.refuse(
                &setting,
                format!(
                    "`{}` needs a Redis: say where it is with redis = \"redis://…\" in [consumer]",
                    consumer.dedup.word()
                ),
            );
        }
        if consumer.dedup != Dedup::Redis && on_redis {
            self.refuse(&setting, "the store is Redis, and so are the marks: use \"redis\"".to_owned());
        }
        if consumer.dedup == Dedup::Redis && !on_redis && matches!(consumer.handler, Handler::Sql(_)) {
            self.refuse(
                &setting,
                "an sql handler works in the database and its mark would be in Redis: a crash between \
                 them does the work twice; use \"hybrid\" or \"sql\""
                    .to_owned(),
            );
        }
        match &consumer.handler {
            Handler::Sql(_) if on_redis => self.refuse(
                &format!("{section}.handler"),
                "the store is Redis, which has no SQL: use a script, http or command handler".to_owned(),
            ),
            Handler::Script(_) if !on_redis && consumer.dedup != Dedup::Redis => self.refuse(
                &format!("{section}.handler"),
                "scripts run in Redis, and the marks of this group are in a database: use an sql handler, or \
                 dedup = \"redis\"".to_owned(),
            ),
            _ => {}
        }
        if consumer.dedup != Dedup::Redis {
            return;
        }
        for topic in &consumer.topics {
            let Some((route_name, route)) = self.config.route_of(topic) else { continue };
            if route.semantics == Semantics::EffectivelyOnce {
                let instead = if on_redis { "" } else { "use \"hybrid\", or " };
                self.warn(&setting, format!(
                    "routes.{route_name} promises effectively-once, and Redis may forget an id when it fails over or loses its \
                     last second: {instead}promise at-least-once"
                ));
            }
        }
    }

    /// A handler outside the transaction of its mark may run twice; somebody should have said that it may.
    fn outside(&mut self, section: &str, consumer: &Consumer) {
        if consumer.handler.is_transactional() || consumer.semantics == Semantics::AtMostOnce {
            return;
        }
        for topic in &consumer.topics {
            let Some((route_name, route)) = self.config.route_of(topic) else { continue };
            if route.semantics == Semantics::AtMostOnce {
                let kind = consumer.handler.kind();
                self.warn(&format!("{section}.handler"), format!(
                    "routes.{route_name} sends a message at most once, and after a crash a {kind} handler may run again for \
                     one it has done: say semantics = \"at-most-once\" here too"
                ));
            }
            if route.semantics == Semantics::EffectivelyOnce
                && consumer.semantics == Semantics::EffectivelyOnce
                && !route.idempotent
            {
                let kind = consumer.handler.kind();
                self.warn(&format!("{section}.handler"), format!(
                    "routes.{route_name} promises effectively-once, and after a crash a {kind} handler may run again for a \
                     message it has done: let it recognise the idempotency key it is given and say idempotent = true in \
                     routes.{route_name}, or promise at-least-once"
                ));
            }
        }
    }
}

impl Findings {
    /// Several topics of a group can lead to the same words.
    fn dedup(&mut self) {
        self.mistakes.dedup();
        self.warnings.dedup();
    }
}

impl Config {
    /// Whether the marks of a group are in another place than its producer's messages. Then the acknowledgement cannot be in
    /// the transaction of the mark.
    pub(crate) fn remembers_apart(&self, group: &Consumer) -> bool {
        group.dedup == Dedup::Redis && self.store.place != Place::Redis
    }

    /// Whether the effects of a group happen once, if it promises so: not where Redis alone remembers, nor where a handler works
    /// outside the transaction of its mark and not all of its routes say that doing it again changes nothing.
    pub(crate) fn is_effectively_once(&self, group: &Consumer) -> bool {
        let harmless = |topic: &String| self.route_of(topic).is_some_and(|(_, route)| route.idempotent);
        group.dedup != Dedup::Redis && (group.handler.is_transactional() || group.topics.iter().all(harmless))
    }

    /// A group that has messages of the topic sent again when it does not acknowledge them in time.
    fn asks_again(&self, topic: &String) -> Option<&str> {
        let mut groups = self.consumers.iter().filter(|(_, group)| group.acknowledge.is_some());
        groups.find(|(_, group)| group.topics.contains(topic)).map(|(name, _)| name.as_str())
    }

    /// Acknowledgements of the topic that are believed although anybody may have written them: what that means, and what
    /// to do. Who can write to the embedded broker can write to the disk of this machine, and has no need to.
    pub(crate) fn unproven_acknowledgements(&self) -> Option<(String, &'static str)> {
        let heard = self.producer.acknowledgements.as_ref()?;
        let broker = self.brokers.get(&heard.broker)?;
        if self.producer.acknowledge_secrets.is_some() || broker.url.starts_with("embedded:") {
            return None;
        }
        let text = format!(
            "whoever can write to `{}` on `{}` can acknowledge any message, received or not",
            heard.topic, heard.broker
        );
        Some((text, "set producer.acknowledge_secrets, or let only the groups write there"))
    }

    /// The route that takes `topic`: of those that fit, the most specific.
    pub(crate) fn route_of(&self, topic: &str) -> Option<(&str, &Route)> {
        self.routes
            .iter()
            .flat_map(|(name, route)| route.topics.iter().map(move |pattern| (name, route, pattern)))
            .filter(|(_, _, pattern)| pattern.matches(topic))
            .max_by_key(|(_, _, pattern)| pattern.specificity())
            .map(|(name, route, _)| (name.as_str(), route))
    }
}
