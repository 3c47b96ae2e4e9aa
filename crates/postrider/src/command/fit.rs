//! Whether the brokers can do what the routes and groups ask of them: refused before the first message, with the reason.

use std::collections::BTreeMap;

use broker::{Abilities, Connected, Outcome};
use message::{Order, Semantics};

use super::failure::Failure;
use super::world;
use crate::config::{Config, Route, duration_text};

/// Refuses what no broker of the configuration can do; everything at once. Nothing is opened or made.
pub(super) fn check(config: &Config) -> Result<(), Failure> {
    let brokers = world::abilities(config)?;
    let brokers = brokers.iter().map(|(name, able)| (name.as_str(), able.clone())).collect();
    let misfits = misfits(config, &brokers);
    if misfits.is_empty() { Ok(()) } else { Err(Failure::usage(misfits.join("\n"))) }
}

/// Asks the brokers on whose own memory a promise rests whether they are set up for it. Others may have done that, so the
/// settings alone do not tell. One that cannot be reached is asked by the relay before the first message.
pub(super) async fn ask(config: &Config, brokers: &BTreeMap<String, Connected>) -> Result<(), Failure> {
    let mut misfits = Vec::new();
    for (name, route) in &config.routes {
        let Some(Connected { publisher, .. }) = brokers.get(&route.broker) else { continue };
        let Some(horizon) = relay::Route::rests_on(route.semantics, &**publisher, &route.retry) else {
            continue;
        };
        match publisher.recognises(horizon).await {
            Ok(()) => {}
            Err(Outcome::Misconfigured { error }) => misfits.push(format!(
                "routes.{name}.semantics: exactly-once cannot be had of `{}` as it is set up: {error}; the nearest that can \
                 is \"effectively-once\"",
                route.broker
            )),
            Err(outcome) => tracing::warn!(
                route = name,
                broker = route.broker,
                error = outcome.error(),
                "how long the broker recognises a message is not known yet: nothing is sent before it is"
            ),
        }
    }
    if misfits.is_empty() { Ok(()) } else { Err(Failure::usage(misfits.join("\n"))) }
}

/// Why exactly once cannot be had of a broker.
fn not_exactly_once(route: &Route, able: &Abilities) -> Option<String> {
    let horizon = route.retry.give_up_after;
    match able.guarantees.deduplication {
        _ if able.transacts => None,
        Some(window) if window >= horizon => None,
        Some(window) => Some(format!(
            "it recognises a message for {} only, and one may be sent again for {} (retry.give_up_after)",
            duration_text(window),
            duration_text(horizon)
        )),
        None => Some("it has no transactions and recognises no message that is sent twice".to_owned()),
    }
}

fn misfits(config: &Config, brokers: &BTreeMap<&str, Abilities>) -> Vec<String> {
    let mut misfits = Vec::new();
    for (name, route) in &config.routes {
        let Some(able @ Abilities { guarantees, .. }) = brokers.get(route.broker.as_str()) else { continue };
        if route.semantics == Semantics::ExactlyOnce
            && let Some(reason) = not_exactly_once(route, able)
        {
            misfits.push(format!(
                "routes.{name}.semantics: exactly-once cannot be had of `{}`: {reason}; the nearest that can is \
                 \"effectively-once\"",
                route.broker
            ));
        }
        if route.order == Order::Key && !guarantees.key_order {
            misfits.push(format!(
                "routes.{name}.order: `{}` does not keep the order of keys; say order = \"none\" if that is good enough, or \
                 use a broker that does (an SQS queue with fifo=true, say)",
                route.broker
            ));
        }
    }
    if let Some(heard) = &config.producer.acknowledgements
        && brokers.get(heard.broker.as_str()).is_some_and(|able| !able.receives)
    {
        misfits.push(format!(
            "producer.acknowledgements.broker: nothing can be received from `{}`: let groups acknowledge by HTTP, or use a \
             broker that can be listened to",
            heard.broker
        ));
    }
    let mut heard: BTreeMap<(&str, &str), &str> = BTreeMap::new();
    for (name, consumer) in &config.consumers {
        let Some(able) = brokers.get(consumer.broker.as_str()) else { continue };
        let Abilities { guarantees, receives, transforms, .. } = able;
        if !receives {
            misfits.push(format!(
                "consumers.{name}.broker: nothing can be received from `{}`, it only takes messages; whoever is there \
                 receives them",
                consumer.broker
            ));
            continue;
        }
        if consumer.semantics == Semantics::ExactlyOnce && !transforms {
            misfits.push(format!(
                "consumers.{name}.semantics: exactly-once cannot be had of `{}`: what a group receives and what it sends \
                 cannot be one transaction there; the nearest that can is \"effectively-once\", and Kafka has such \
                 transactions",
                consumer.broker
            ));
        }
        if consumer.order == Order::Key && !guarantees.key_order {
            misfits.push(format!(
                "consumers.{name}.order: `{}` does not keep the order of keys; say order = \"none\"",
                consumer.broker
            ));
        }
        for topic in &consumer.topics {
            let other = heard.insert((&consumer.broker, topic), name);
            if let Some(other) = other.filter(|_| !guarantees.groups) {
                misfits.push(format!(
                    "consumers.{name}.topics: `{topic}` on `{}` is one queue, which consumers.{other} empties too, and each \
                     message would reach only one of them; give each group a topic of its own, or use a broker that \
                     has groups",
                    consumer.broker
                ));
            }
        }
    }
    misfits
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use broker::Guarantees;

    use super::*;
    use crate::config;

    /// A plain queue: no order, no groups.
    fn queue(receives: bool) -> BTreeMap<&'static str, Abilities> {
        let guarantees = Guarantees { max_batch: 1, ..Guarantees::default() };
        BTreeMap::from([("queue", Abilities { guarantees, transacts: false, receives, transforms: false })])
    }

    #[test]
    fn exactly_once_is_refused_of_a_broker_that_cannot_keep_it_with_the_reason_and_the_nearest() {
        let file = tempfile::Builder::new().suffix(".toml").tempfile().expect("a file");
        let settings = "[brokers.queue]\nurl = \"embedded://\"\n[routes.all]\ntopics = [\"*\"]\norder = \"none\"\n\
             semantics = \"exactly-once\"\n[consumers]\n";
        std::fs::write(file.path(), settings).expect("it can be written");
        let config = config::load(Some(file.path()), std::iter::empty()).expect("it is well written").config;
        let refused = |change: fn(&mut Abilities)| {
            let mut brokers = queue(true);
            brokers.values_mut().for_each(change);
            misfits(&config, &brokers)
        };
        let found = refused(|_| {});
        assert!(found.len() == 1 && found[0].contains("no transactions"), "{found:?}");
        assert!(found[0].contains("\"effectively-once\""), "{found:?}");
        let found = refused(|able| able.guarantees.deduplication = Some(Duration::from_secs(120)));
        assert!(found.len() == 1 && found[0].contains("for 2m only"), "{found:?}");
        assert!(
            refused(|able| able.guarantees.deduplication = Some(Duration::from_secs(7 * 86_400))).is_empty()
        );
        assert!(refused(|able| able.transacts = true).is_empty());
    }

    #[test]
    fn a_group_that_transforms_is_refused_where_offsets_and_messages_are_not_one_transaction() {
        let file = tempfile::Builder::new().suffix(".toml").tempfile().expect("a file");
        let settings = "[brokers.queue]\nurl = \"embedded://\"\n[routes.all]\ntopics = [\"*\"]\norder = \"none\"\n\
             [consumers.a]\ntopics = [\"t\"]\norder = \"none\"\nsemantics = \"exactly-once\"\n\
             handler = { command = \"bill\" }\n";
        std::fs::write(file.path(), settings).expect("it can be written");
        let config = config::load(Some(file.path()), std::iter::empty()).expect("it is well written").config;
        let found = misfits(&config, &queue(true));
        assert!(found.len() == 1 && found[0].starts_with("consumers.a.semantics"), "{found:?}");
        assert!(found[0].contains("\"effectively-once\""), "{found:?}");
        let mut brokers = queue(true);
        brokers.values_mut().for_each(|able| able.transforms = true);
        assert!(misfits(&config, &brokers).is_empty());
    }

    #[test]
    fn what_a_broker_cannot_do_is_refused_with_the_reason() {
        let file = tempfile::Builder::new().suffix(".toml").tempfile().expect("a file");
        let settings = "[brokers.queue]\nurl = \"embedded://\"\n[routes.all]\ntopics = [\"*\"]\n\
             [consumers.a]\ntopics = [\"t\"]\norder = \"none\"\n[consumers.b]\ntopics = [\"t\"]\n\
             [consumers.c]\ntopics = [\"u\"]\norder = \"none\"\n";
        std::fs::write(file.path(), settings).expect("it can be written");
        let config = config::load(Some(file.path()), std::iter::empty()).expect("it is well written").config;
        let found = misfits(&config, &queue(true));
        let expected = ["routes.all.order", "consumers.b.order", "consumers.b.topics"];
        assert_eq!(found.len(), expected.len(), "{found:#?}");
        for (found, expected) in found.iter().zip(expected) {
            assert!(found.starts_with(expected), "{found}");
        }
        let found = misfits(&config, &queue(false));
        assert_eq!(found.iter().filter(|text| text.contains("only takes messages")).count(), 3, "{found:#?}");
    }
}
