//! `advise`: what a route should promise, by a few questions about what a loss and a duplicate would cost.
//!
//! The questions are a tree: each is asked only where its answer decides something.

use std::io::{BufRead, IsTerminal, Write};

use message::Semantics;
use serde::Serialize;

use super::arguments::{Advise, parse_answer};
use super::failure::Failure;
use super::output::Output;

/// One question: its flag, where its answer is if it was given, what is asked, and what an answer means, as a reason.
struct Question {
    flag: &'static str,
    given: fn(&Advise) -> Option<bool>,
    text: &'static str,
    yes: &'static str,
    no: &'static str,
}

const LOST: Question = Question {
    flag: "lost",
    given: |advise| advise.lost,
    text: "May a message be lost?",
    yes: "it may be lost",
    no: "it must not be lost",
};
const ONCE: Question = Question {
    flag: "once",
    given: |advise| advise.once,
    text: "Would a second arrival be worse than none?",
    yes: "a second arrival would be worse than none",
    no: "a second arrival does no harm",
};
const MATTERS: Question = Question {
    flag: "matters",
    given: |advise| advise.matters,
    text: "Does it matter how many are lost?",
    yes: "somebody watches how many are lost",
    no: "nobody minds how many are lost",
};
const TWICE: Question = Question {
    flag: "twice",
    given: |advise| advise.twice,
    text: "May its work be done twice?",
    yes: "its work may be done twice",
    no: "its work must not be done twice",
};
const KAFKA: Question = Question {
    flag: "kafka",
    given: |advise| advise.kafka,
    text: "Is its work only to read from Kafka and write to Kafka?",
    yes: "its work begins and ends in Kafka",
    no: "its work reaches outside Kafka",
};
const IDEMPOTENT: Question = Question {
    flag: "idempotent",
    given: |advise| advise.idempotent,
    text: "Can its work share a transaction with a mark, or recognise that it was done?",
    yes: "its work can tell that it was done",
    no: "its work cannot tell that it was done",
};

/// What is advised.
#[derive(Debug, Serialize)]
struct Advice {
    /// What fits the answers.
    semantics: Semantics,
    /// The answers, as reasons.
    because: Vec<&'static str>,
    /// What it comes to.
    means: &'static str,
    /// To be put into the settings.
    route: String,
}

/// Asks what was not answered yet, and advises.
pub(super) fn advise(given: &Advise, output: &mut Output) -> Result<(), Failure> {
    let answer = |question: &Question| match (question.given)(given) {
        Some(answer) => Ok(answer),
        None => ask(question),
    };
    let (semantics, because) = decide(answer)?;
    let advice = Advice::new(semantics, because, &given.topic);
    output.answer(&advice, |output| {
        output.line(format!("{}: {}", advice.semantics, advice.means))?;
        output.line(format!("because {}", advice.because.join(", and ")))?;
        output.line(format!("\n{}", advice.route))
    })
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

impl Advice {
    fn new(semantics: Semantics, because: Vec<&'static str>, topic: &str) -> Self {
        let table = |entries: &[(&str, toml::Value)]| {
            entries.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect::<toml::Table>()
        };
        let mut route = table(&[
            ("topics", toml::Value::Array(vec![topic.into()])),
            ("semantics", semantics.as_str().into()),
            ("why", because.join(", ").into()),
        ]);
        if because.contains(&IDEMPOTENT.yes) {
            route.insert("idempotent".to_owned(), true.into());
        }
        let name: String =
            topic.chars().map(|c| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' }).collect();
        let routes = table(&[(name.as_str(), route.into())]);
        let route = toml::to_string(&table(&[("routes", routes.into())])).expect("plain data");
        Self { semantics, because, means: means(semantics), route }
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
    fn the_route_that_is_advised_promises_what_was_found() {
        for semantics in Semantics::ALL {
            let advice = Advice::new(semantics, vec!["it says \"so\""], "order.events");
            let route: toml::Table = advice.route.parse().expect("it is TOML");
            let route = &route["routes"]["order_events"];
            assert_eq!(route["semantics"].as_str(), Some(semantics.as_str()));
            assert_eq!(route["why"].as_str(), Some("it says \"so\""));
        }
    }
}
