//! `advise`: what a route should promise, by a few questions about what a loss and a duplicate would cost.
//!
//! The questions are a tree: each is asked only where its answer decides something. What is advised can be added to the
//! settings in force as it stands, or it is said what must change there.

use std::cell::RefCell;
use std::io::{BufRead, IsTerminal, Write};

use message::Semantics;
use serde::Serialize;

use super::arguments::{Advise, parse_answer};
use super::failure::Failure;
use super::output::Output;
use crate::config::{Config, Loaded};

/// One question: its flag, where its answer is if it was given, the answers to others after which it is asked, what is asked,
/// and what an answer means, as a reason.
struct Question {
    flag: &'static str,
    given: fn(&Advise) -> Option<bool>,
    after: &'static [(&'static str, bool)],
    text: &'static str,
    yes: &'static str,
    no: &'static str,
}

const LOST: Question = Question {
    flag: "lost",
    given: |advise| advise.lost,
    after: &[],
    text: "May a message be lost?",
    yes: "it may be lost",
    no: "it must not be lost",
};
const ONCE: Question = Question {
    flag: "once",
    given: |advise| advise.once,
    after: &[("lost", true)],
    text: "Would a second arrival be worse than none?",
    yes: "a second arrival would be worse than none",
    no: "a second arrival does no harm",
};
const MATTERS: Question = Question {
    flag: "matters",
    given: |advise| advise.matters,
    after: &[("lost", true), ("once", false)],
    text: "Does it matter how many are lost?",
    yes: "somebody watches how many are lost",
    no: "nobody minds how many are lost",
};
const TWICE: Question = Question {
    flag: "twice",
    given: |advise| advise.twice,
    after: &[("lost", false)],
    text: "May its work be done twice?",
    yes: "its work may be done twice",
    no: "its work must not be done twice",
};
const KAFKA: Question = Question {
    flag: "kafka",
    given: |advise| advise.kafka,
    after: &[("lost", false), ("twice", false)],
    text: "Is its work only to read from Kafka and write to Kafka?",
    yes: "its work begins and ends in Kafka",
    no: "its work reaches outside Kafka",
};
const IDEMPOTENT: Question = Question {
    flag: "idempotent",
    given: |advise| advise.idempotent,
    after: &[("lost", false), ("twice", false), ("kafka", false)],
    text: "Can its work share a transaction with a mark, or recognise that it was done?",
    yes: "its work can tell that it was done",
    no: "its work cannot tell that it was done",
};

const QUESTIONS: [&Question; 6] = [&LOST, &ONCE, &MATTERS, &TWICE, &KAFKA, &IDEMPOTENT];

/// What is advised.
#[derive(Debug, Serialize)]
struct Advice {
    /// What fits the answers.
    semantics: Semantics,
    /// The answers, as reasons.
    because: Vec<&'static str>,
    /// What it comes to.
    means: &'static str,
    /// What else is to be done, in sentences.
    also: Vec<String>,
    /// To be put into the settings.
    route: String,
}

/// Asks what was not answered yet, and advises.
pub(super) fn advise(given: &Advise, loaded: &Loaded, output: &mut Output) -> Result<(), Failure> {
    let known = QUESTIONS.iter().filter_map(|question| Some((question.flag, (question.given)(given)?)));
    let known = RefCell::new(known.collect::<Vec<_>>());
    agree(&known.borrow())?;
    let answer = |question: &Question| -> Result<bool, Failure> {
        if let Some(answer) = (question.given)(given) {
            return Ok(answer);
        }
        let answer = ask(question)?;
        known.borrow_mut().push((question.flag, answer));
        agree(&known.borrow())?;
        Ok(answer)
    };
    let (semantics, because) = decide(answer)?;
    let advice = Advice::new(semantics, because, &given.topic, &Present::of(loaded)?);
    output.answer(&advice, |output| {
        output.line(format!("{}: {}", advice.semantics, advice.means))?;
        output.line(format!("because {}", advice.because.join(", and ")))?;
        advice.also.iter().try_for_each(|sentence| output.line(sentence))?;
        output.raw(format!("\n{}", advice.route).as_bytes())
    })
}

/// Refuses an answer to a question that is not asked after the other answers: whoever gave it meant something by it.
fn agree(known: &[(&str, bool)]) -> Result<(), Failure> {
    let answered = |flag: &str| known.iter().find(|(name, _)| *name == flag).map(|(_, answer)| *answer);
    for question in QUESTIONS.iter().filter(|question| answered(question.flag).is_some()) {
        let Question { flag, after, .. } = question;
        let Some((other, needed)) = after.iter().find(|(other, needed)| answered(other) == Some(!needed))
        else {
            continue;
        };
        let (needed, found) = if *needed { ("yes", "no") } else { ("no", "yes") };
        let hint = match *flag {
            "twice" | "kafka" | "idempotent" if *other == "lost" => {
                "; if it may be lost but must not come twice, say --lost yes --once yes"
            }
            _ => "",
        };
        return Err(Failure::usage(format!(
            "--{flag} decides nothing with --{other} {found}: it is asked where --{other} is {needed}; leave one of them \
             out{hint}"
        )));
    }
    Ok(())
}

/// Follows the tree. `answer` is asked what decides, and nothing else.
fn decide<E>(answer: impl Fn(&Question) -> Result<bool, E>) -> Result<(Semantics, Vec<&'static str>), E> {
    let mut because = Vec::new();
    let mut ask = |question: &Question| {
        let yes = answer(question)?;
        because.push(if yes { question.yes } else { question.no });
        Ok(yes)
    };
    let semantics = if ask(&LOST)? {
        if ask(&ONCE)? {
            Semantics::AtMostOnce
        } else if ask(&MATTERS)? {
            Semantics::BestEffort
        } else {
            Semantics::None
        }
    } else if ask(&TWICE)? {
        Semantics::AtLeastOnce
    } else if ask(&KAFKA)? {
        Semantics::ExactlyOnce
    } else if ask(&IDEMPOTENT)? {
        Semantics::EffectivelyOnce
    } else {
        Semantics::AtLeastOnce
    };
    Ok((semantics, because))
}

/// Asks a person, again until it is a yes or a no.
fn ask(question: &Question) -> Result<bool, Failure> {
    let Question { flag, text, .. } = question;
    let stdin = std::io::stdin();
    if !stdin.is_terminal() {
        return Err(Failure::usage(format!("say --{flag} yes or --{flag} no: {text}")));
    }
    loop {
        let mut stderr = std::io::stderr();
        write!(stderr, "{text} [yes/no] ")
            .and_then(|()| stderr.flush())
            .map_err(|error| Failure::writing(&error))?;
        let mut line = String::new();
        let read = stdin.lock().read_line(&mut line);
        if read.map_or(true, |read| read == 0) {
            return Err(Failure::usage(format!("there was no answer; say --{flag} yes or --{flag} no")));
        }
        if let Ok(answer) = parse_answer(line.trim()) {
            return Ok(answer);
        }
    }
}

/// The settings to which the route is added.
struct Present<'a> {
    config: &'a Config,
    /// What the file says itself; the rest is built in. None where there is no file.
    file: Option<toml::Table>,
}

impl<'a> Present<'a> {
    fn of(loaded: &'a Loaded) -> Result<Self, Failure> {
        let file = loaded.file.as_ref().map(|path| {
            let text = std::fs::read_to_string(path).map_err(|error| error.to_string());
            let table =
                text.and_then(|text| text.parse().map_err(|error: toml::de::Error| error.to_string()));
            table.map_err(|error| Failure::usage(format!("{} cannot be read: {error}", path.display())))
        });
        Ok(Self { config: &loaded.config, file: file.transpose()? })
    }

    /// Whether the file has this section, so that nothing built in is in force there.
    fn has(&self, section: &str) -> bool {
        self.file.as_ref().is_some_and(|file| file.contains_key(section))
    }

    /// Whether this part of the file names its broker.
    fn names_broker(&self, section: &str, name: &str) -> bool {
        let part = self.file.as_ref().and_then(|file| file.get(section)?.get(name));
        part.is_some_and(|part| part.get("broker").is_some())
    }

    /// The broker for a route of `topic`: where the topic is heard or sent to now, if that fits, or the first that does.
    /// None where the route needs Kafka and there is none.
    fn broker(&self, topic: &str, semantics: Semantics) -> Option<&'a str> {
        let Config { brokers, consumers, .. } = self.config;
        let heard = consumers.values().filter(|group| group.topics.iter().any(|name| name == topic));
        let sent = self.config.route_of(topic).map(|(_, route)| route.broker.as_str());
        let ordered = brokers.iter().filter(|(_, broker)| keeps_order(&broker.url));
        heard
            .map(|group| group.broker.as_str())
            .chain(sent)
            .chain(ordered.map(|(name, _)| name.as_str()))
            .chain(brokers.keys().map(String::as_str))
            .find(|name| semantics != Semantics::ExactlyOnce || is_kafka(&brokers[*name].url))
    }
}

fn is_kafka(url: &str) -> bool {
    url.starts_with("kafka")
}

/// Standard queues of SQS are the only ones that do not.
fn keeps_order(url: &str) -> bool {
    !url.starts_with("sqs:") || url.contains("fifo=true")
}

/// `name`, or with a number behind it where that is taken.
fn free(name: String, is_taken: impl Fn(&str) -> bool) -> String {
    let numbered = (2..).map(|number| format!("{name}-{number}"));
    std::iter::once(name.clone()).chain(numbered).find(|name| !is_taken(name)).expect("numbers do not end")
}

/// A section of the settings.
fn section(heading: &str, entries: &[(&str, toml::Value)]) -> String {
    let lines = entries.iter().map(|(name, value)| format!("{name} = {value}\n"));
    format!("[{heading}]\n{}", lines.collect::<String>())
}

/// A name as a part of a heading.
fn key(name: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    if name.chars().all(plain) { name.to_owned() } else { toml::Value::from(name).to_string() }
}

impl Advice {
    fn new(semantics: Semantics, because: Vec<&'static str>, topic: &str, present: &Present<'_>) -> Self {
        let config = present.config;
        let mut also: Vec<String> = of_groups(semantics).map(str::to_owned).into_iter().collect();
        let mut sections = Vec::new();
        let found = present.broker(topic, semantics);
        let broker = match found {
            Some(name) => name.to_owned(),
            None => {
                let broker = free("kafka".to_owned(), |name| config.brokers.contains_key(name));
                add_kafka(&broker, topic, present, &mut sections, &mut also);
                broker
            }
        };
        let url = found.map_or("", |name| config.brokers[name].url.as_str());
        let mut route: Vec<(&str, toml::Value)> = vec![("topics", vec![topic].into())];
        if found.is_none() || config.brokers.len() > 1 {
            route.push(("broker", broker.as_str().into()));
        }
        route.push(("semantics", semantics.as_str().into()));
        if !keeps_order(url) {
            route.push(("order", "none".into()));
        }
        if because.contains(&IDEMPOTENT.yes) {
            route.push(("idempotent", true.into()));
        }
        if because.contains(&MATTERS.yes) {
            let watch = [("window", toml::Value::from("5m")), ("drop", 0.5.into())];
            let watch = toml::Table::from_iter(watch.map(|(name, value)| (name.to_owned(), value)));
            route.push(("watch", watch.into()));
        }
        route.push(("why", because.join(", ").into()));
        let name: String =
            topic.chars().map(|c| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' }).collect();
        let is_taken = |name: &str| present.has("routes") && config.routes.contains_key(name);
        let name = free(name, is_taken);
        sections.push(section(&format!("routes.{name}"), &route));
        also.extend(of_routes(topic, present));
        if present.file.is_some() {
            also.extend(of_listeners(topic, &broker, present));
        }
        Self { semantics, because, means: means(semantics), also, route: sections.join("\n") }
    }
}

/// What the groups of a route must be set to as well.
fn of_groups(semantics: Semantics) -> Option<&'static str> {
    match semantics {
        Semantics::None | Semantics::BestEffort => Some(
            "A group that hears of it may say semantics = \"none\" or \"best-effort\" as well: then it remembers nothing, and \
             what its handler fails with is lost.",
        ),
        Semantics::AtMostOnce => Some(
            "Each group that hears of it must say semantics = \"at-most-once\" as well, and have no `acknowledge`: otherwise \
             its handler may run again after a crash. Where one must not be missed after all, `copy_to` names a topic of a \
             route that promises \"at-least-once\", on which there is a copy of each.",
        ),
        Semantics::ExactlyOnce => Some(
            "The group that makes messages of it must say semantics = \"exactly-once\" as well, and have an http or command \
             handler that answers with messages; no group of the topic may have `acknowledge`.",
        ),
        _ => None,
    }
}

/// What becomes of the routes that are there.
fn of_routes(topic: &str, present: &Present<'_>) -> Option<String> {
    if !present.has("routes") {
        return Some(
            "There is no [routes] in your settings: the built-in route for all topics is gone when this one is there.".to_owned(),
        );
    }
    let mut routes = present.config.routes.iter();
    let (other, _) = routes.find(|(_, route)| route.topics.iter().any(|taken| taken.as_str() == topic))?;
    Some(format!(
        "Take `{topic}` out of routes.{other}, or that route away if it has no other topic: only one may have it."
    ))
}

/// Who listens to the topic at another broker.
fn of_listeners(topic: &str, broker: &str, present: &Present<'_>) -> Option<String> {
    let groups = present.config.consumers.iter().filter(|_| present.has("consumers"));
    let elsewhere =
        groups.filter(|(_, group)| group.broker != broker && group.topics.iter().any(|name| name == topic));
    let elsewhere: Vec<String> = elsewhere.map(|(name, _)| format!("consumers.{name}")).collect();
    let groups = elsewhere.join(", ");
    (!elsewhere.is_empty()).then(|| format!("Say broker = \"{broker}\" in {groups}, to hear of it there."))
}

/// Kafka beside the brokers that are there. Where it is the second one, nobody may leave open any more which is meant.
fn add_kafka(
    broker: &str,
    topic: &str,
    present: &Present<'_>,
    sections: &mut Vec<String>,
    also: &mut Vec<String>,
) {
    let Config { brokers, routes, consumers, .. } = present.config;
    let kafka = section(&format!("brokers.{broker}"), &[("url", "kafka://127.0.0.1:9092".into())]);
    let Some(only) = brokers.keys().next().filter(|_| present.file.is_some() && brokers.len() == 1) else {
        sections.push(kafka);
        return;
    };
    if !present.has("brokers") {
        // The built-in one. A variable may say another URL, with a password that is not to be shown, and goes over this.
        sections.push(section(&format!("brokers.{}", key(only)), &[("url", "embedded://".into())]));
    }
    sections.push(kafka);
    if !present.has("consumers") {
        for (name, group) in consumers {
            let broker = if group.topics.iter().any(|name| name == topic) { broker } else { only };
            let entries = [("topics", group.topics.clone().into()), ("broker", broker.into())];
            sections.push(section(&format!("consumers.{}", key(name)), &entries));
        }
    }
    let is_elsewhere = |name: &&String| !consumers[*name].topics.iter().any(|name| name == topic);
    let routes = routes.keys().filter(|name| present.has("routes") && !present.names_broker("routes", name));
    let groups =
        consumers.keys().filter(|name| present.has("consumers") && !present.names_broker("consumers", name));
    let routes = routes.map(|name| format!("routes.{name}"));
    let groups = groups.filter(is_elsewhere).map(|name| format!("consumers.{name}"));
    let open: Vec<String> = routes.chain(groups).collect();
    if !open.is_empty() {
        let open = open.join(", ");
        also.push(format!(
            "With a second broker each route and group must name its own: say broker = \"{only}\" in {open}."
        ));
    }
}

/// In a sentence.
fn means(semantics: Semantics) -> &'static str {
    match semantics {
        Semantics::None => "sent once, and nobody waits for an answer",
        Semantics::BestEffort => "one try that is confirmed; a failure is counted, and the message is gone",
        Semantics::AtMostOnce => "recorded as sent before it is sent; never a second try",
        Semantics::AtLeastOnce => {
            "sent again until it is confirmed; consumers must expect it twice, and nobody can promise more than that for \
             work that cannot tell that it was done"
        }
        Semantics::EffectivelyOnce => {
            "sent again until it is confirmed, and recognised by its id where it was done already; a group whose handler is \
             outside the transaction (http, command) must heed the idempotency key"
        }
        Semantics::ExactlyOnce => "once in the log itself, by Kafka's transactions",
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::convert::Infallible;

    use super::*;

    /// What is advised, and how many questions it takes, where these are answered with yes.
    fn advised(yes: &[&str]) -> (Semantics, usize) {
        let asked = Cell::new(0);
        let answer = |question: &Question| {
            asked.set(asked.get() + 1);
            Ok::<bool, Infallible>(yes.contains(&question.flag))
        };
        let (semantics, because) = decide(answer).expect("every question is answered");
        assert_eq!(because.len(), asked.get());
        (semantics, asked.get())
    }

    #[test]
    fn every_semantics_is_at_the_end_of_some_path() {
        assert_eq!(advised(&["lost", "once"]), (Semantics::AtMostOnce, 2));
        assert_eq!(advised(&["lost", "matters"]), (Semantics::BestEffort, 3));
        assert_eq!(advised(&["lost"]), (Semantics::None, 3));
        assert_eq!(advised(&["twice"]), (Semantics::AtLeastOnce, 2));
        assert_eq!(advised(&["kafka"]), (Semantics::ExactlyOnce, 3));
        assert_eq!(advised(&["idempotent"]), (Semantics::EffectivelyOnce, 4));
        assert_eq!(advised(&[]), (Semantics::AtLeastOnce, 4));
    }

    #[test]
    fn an_answer_to_a_question_that_is_not_asked_is_refused() {
        for question in QUESTIONS {
            let path: Vec<(&str, bool)> =
                question.after.iter().copied().chain([(question.flag, true)]).collect();
            agree(&path).expect("it is asked there");
            for at in 0..question.after.len() {
                let mut other = path.clone();
                other[at].1 = !other[at].1;
                agree(&other).expect_err("it is not asked there");
            }
        }
    }
}
