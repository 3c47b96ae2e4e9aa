//! `doctor`: connects to the store and to every broker, and says what is unsafe or missing there, with the fix.

use std::time::Duration;

use broker::{Plan, Publisher};
use comfy_table::{Cell, Color};
use message::{Finding, Health, Order, Semantics};
use serde::Serialize;

use super::failure::{Exit, Failure};
use super::output::Output;
use super::{backend, fit, world};
use crate::config::{Config, redacted};

/// A server that has not answered by then is taken for one that never does.
const PATIENCE: Duration = Duration::from_secs(30);

/// What was found at one place.
#[derive(Debug, Serialize)]
struct Place {
    name: String,
    url: String,
    findings: Vec<Finding>,
}

/// Looks everywhere. Fails if anything is broken, so that a script can stop there.
pub(super) async fn examine(config: &Config, output: &mut Output) -> Result<(), Failure> {
    let mut places = vec![store(config).await];
    let brokers = world::brokers(config)?;
    for (name, broker) in &brokers {
        let plan = plan(config, name, &*broker.publisher);
        let late = vec![Finding::broken(
            "connection",
            format!("no answer within {PATIENCE:?}"),
            "see whether it runs and can be reached from here",
        )];
        let mut findings = tokio::time::timeout(PATIENCE, broker.doctor.examine(&plan)).await.unwrap_or(late);
        findings.extend(unproven(config, name));
        let url = config.brokers.get(name).map(|broker| redacted(&broker.url)).unwrap_or_default();
        places.push(Place { name: format!("broker {name}"), url, findings });
    }
    if let Err(misfit) = fit::check(config) {
        let fix = "change it, or `postrider serve` will refuse to start";
        let findings = misfit.text.lines().map(|line| Finding::broken("fit", line, fix)).collect();
        places.push(Place { name: "settings".to_owned(), url: String::new(), findings });
    }
    output.answer(&places, |output| places.iter().try_for_each(|place| show(place, output)))?;
    let broken = places.iter().flat_map(|place| &place.findings);
    match broken.filter(|finding| finding.health == Health::Broken).count() {
        0 => Ok(()),
        count => Err(Failure::new(
            Exit::Refused,
            format!("{count} things must be mended before promises can be kept"),
        )),
    }
}

fn show(place: &Place, output: &mut Output) -> Result<(), Failure> {
    output.line(format!("{} {}", place.name.to_uppercase(), place.url).trim_end())?;
    let rows = place.findings.iter().flat_map(|finding| {
        let (word, colour) = match finding.health {
            Health::Good => ("good", Color::Green),
            Health::Doubtful => ("doubtful", Color::Yellow),
            Health::Broken => ("broken", Color::Red),
        };
        let found = [Cell::new(word).fg(colour), Cell::new(&finding.about), Cell::new(&finding.text)];
        let fix =
            finding.fix.as_ref().map(|fix| [Cell::new(""), Cell::new(""), Cell::new(format!("fix: {fix}"))]);
        std::iter::once(found).chain(fix)
    });
    output.rows(rows)?;
    output.line("")
}

/// What is believed of whoever can write to a broker.
fn unproven(config: &Config, broker: &str) -> Option<Finding> {
    config.producer.acknowledgements.as_ref().filter(|heard| heard.broker == broker)?;
    let (text, fix) = config.unproven_acknowledgements()?;
    Some(Finding::doubtful("acknowledgements", text, fix))
}

/// What the configuration means to do with a broker.
fn plan(config: &Config, broker: &str, publisher: &dyn Publisher) -> Plan {
    let routes: Vec<_> = config.routes.values().filter(|route| route.broker == broker).collect();
    let consumers: Vec<_> = config.consumers.iter().filter(|(_, group)| group.broker == broker).collect();
    // Patterns name no topic; the topics that somebody listens to are known by name.
    let exact = routes.iter().flat_map(|route| &route.topics).map(|pattern| pattern.as_str());
    let heard = consumers.iter().flat_map(|(_, group)| group.topics.iter().map(String::as_str));
    let mut topics: Vec<String> =
        exact.chain(heard).filter(|topic| !topic.contains('*')).map(str::to_owned).collect();
    let transforming = consumers.iter().filter(|(_, group)| group.semantics == Semantics::ExactlyOnce);
    topics.extend(transforming.map(|(name, _)| inbox::Transform::dead_topic(name)));
    let acknowledgements = config.producer.acknowledgements.as_ref().filter(|heard| heard.broker == broker);
    topics.extend(acknowledgements.map(|heard| heard.topic.clone()));
    topics.sort_unstable();
    topics.dedup();
    let groups = consumers.iter().map(|(name, group)| ((*name).clone(), group.topics.clone()));
    let producer = acknowledgements.map(|heard| (heard.group.clone(), vec![heard.topic.clone()]));
    Plan {
        topics,
        groups: groups.chain(producer).collect(),
        ordered: routes.iter().any(|route| route.order == Order::Key),
        horizon: routes.iter().map(|route| route.retry.give_up_after).max().unwrap_or_default(),
        recognised: routes
            .iter()
            .filter_map(|route| relay::Route::rests_on(route.semantics, publisher, &route.retry))
            .max(),
        max_payload: config.producer.body_limit,
    }
}

async fn store(config: &Config) -> Place {
    let looking = tokio::time::timeout(PATIENCE, backend::examine(config)).await;
    let findings = match looking {
        Ok(Ok(findings)) => findings,
        Ok(Err(failure)) => {
            vec![Finding::broken("connection", failure.text, "mend it, or name another store in store.url")]
        }
        Err(_) => {
            let fix = "see whether it runs and can be reached from here";
            vec![Finding::broken("connection", format!("no answer within {PATIENCE:?}"), fix)]
        }
    };
    Place { name: "store".to_owned(), url: backend::name(config), findings }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config;

    #[test]
    fn the_topic_of_acknowledgements_and_its_listener_are_part_of_the_plan() {
        let file = tempfile::Builder::new().suffix(".toml").tempfile().expect("a file");
        let settings = "[producer]\nacknowledgements = { topic = \"done\", broker = \"far\", group = \"shop\" }\n\
             [brokers.near]\nurl = \"embedded://near.db\"\n[brokers.far]\nurl = \"https://example.com/in\"\n\
             [routes.all]\ntopics = [\"*\"]\nbroker = \"near\"\n[consumers]\n";
        std::fs::write(file.path(), settings).expect("it can be written");
        let config = config::load(Some(file.path()), std::iter::empty()).expect("it is well written").config;
        let folder = tempfile::tempdir().expect("a folder");
        let surroundings = broker::Surroundings { file: folder.path().join("broker.db"), max_payload: 1 };
        let broker = broker::open("embedded://", &surroundings).expect("it opens");
        let plan = |name: &str| plan(&config, name, &*broker.publisher);
        let far = plan("far");
        assert_eq!(far.topics, ["done"]);
        assert_eq!(far.groups, [("shop".to_owned(), vec!["done".to_owned()])]);
        assert_eq!((plan("near").topics, plan("near").groups), (vec![], vec![]));
        let told = unproven(&config, "far").expect("anybody may write there");
        assert!(told.health == Health::Doubtful && told.text.contains("`done` on `far`"), "{told:?}");
        assert_eq!(unproven(&config, "near"), None);
    }
}
