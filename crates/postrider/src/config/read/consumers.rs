//! `[consumers.*]`: who listens, and what is done with a message.

use std::collections::BTreeMap;
use std::time::Duration;

use inbox::CommandHandler;
use message::{OnDead, Order, check_group, check_topic};

use super::super::section::{Found, Section};
use super::super::tree::{Node, Value};
use super::super::{Acknowledge, Consumer, Dedup, Handler};
use super::{ON_DEADS, ORDERS, Reader, http_url, not_empty, semantics};

impl<'a> Reader<'a> {
    pub(super) fn consumers(&mut self, node: Option<Node>) -> BTreeMap<String, Consumer> {
        const KEYS: [&str; 11] = [
            "topics",
            "broker",
            "semantics",
            "dedup",
            "keep_ids",
            "replay",
            "acknowledge",
            "order",
            "on_dead",
            "retry",
            "handler",
        ];
        let mut consumers = BTreeMap::new();
        for (name, node) in self.named("consumers", node) {
            let mut section = self.section(&format!("consumers.{name}"), Some(node), &KEYS);
            self.mark(&section, &KEYS);
            if let Err(invalid) = check_group(&name) {
                let origin = section.origin().clone();
                section.complain("", origin, invalid.to_string());
            }
            let consumer = Consumer {
                topics: self.topics(&mut section),
                broker: self.broker(&mut section),
                semantics: semantics(&mut section),
                dedup: self.dedup(&mut section),
                keep_ids: section.duration("keep_ids", Duration::from_secs(7 * 24 * 60 * 60)),
                replay: section.duration("replay", Duration::from_secs(3 * 24 * 60 * 60)),
                acknowledge: self.acknowledge(&mut section),
                order: section.word("order", &ORDERS, Order::Key),
                on_dead: section.word("on_dead", &ON_DEADS, OnDead::Hold),
                retry: self.retry(&mut section),
                handler: self.handler(&mut section),
            };
            consumers.insert(name, consumer);
        }
        consumers
    }

    fn acknowledge(&mut self, section: &mut Section<'a>) -> Option<Acknowledge> {
        const KEYS: [&str; 3] = ["timeout", "check_every", "max_redeliveries"];
        if !section.has("acknowledge") {
            return None;
        }
        let mut acknowledge = self.section(&section.name("acknowledge"), section.take("acknowledge"), &KEYS);
        self.mark(&acknowledge, &KEYS);
        Some(Acknowledge {
            timeout: acknowledge.duration("timeout", Duration::from_secs(30 * 60)),
            check_every: acknowledge.duration("check_every", Duration::from_secs(30)),
            max_redeliveries: acknowledge.number("max_redeliveries", 0, 1_000, 3),
        })
    }

    fn topics(&mut self, section: &mut Section<'a>) -> Vec<String> {
        let (has, origin) = (section.has("topics"), section.origin_of("topics"));
        let found = section.texts("topics");
        if found.is_empty() && !(has && self.complained(&section.name("topics"))) {
            section.complain(
                "topics",
                origin,
                "name the topics that this group wants, such as [\"order-events\"]",
            );
        }
        let mut topics: Vec<String> = Vec::new();
        for Found { value, origin } in found {
            if topics.contains(&value) {
                section.complain("topics", origin, format!("`{value}` is there twice"));
            } else if value.contains('*') {
                section.complain(
                    "topics",
                    origin,
                    format!("`{value}`: a consumer group names its topics one by one, without *"),
                );
            } else if let Err(invalid) = check_topic(&value) {
                section.complain("topics", origin, invalid.to_string());
            } else {
                topics.push(value);
            }
        }
        topics
    }

    fn dedup(&mut self, section: &mut Section<'a>) -> Dedup {
        section
            .parsed("dedup", |word| match word {
                "sql" => Ok(Dedup::Sql),
                "redis" | "hybrid" if !cfg!(feature = "redis") => Err(format!(
                    "`{word}` is not in this build: build with `--features redis`, or use \"sql\""
                )),
                "redis" => Ok(Dedup::Redis),
                "hybrid" => Ok(Dedup::Hybrid),
                _ => Err(format!(
                    "`{word}` is not a way to recognise duplicates: use \"sql\", \"redis\" or \"hybrid\""
                )),
            })
            .map_or(self.default_dedup, |found| found.value)
    }

    fn handler(&mut self, section: &mut Section<'a>) -> Handler {
        const KINDS: [&str; 5] = ["log", "http", "sql", "script", "command"];
        const CHOICES: &str = "choose one of { log = true }, { http = \"http://…\" }, { sql = \"…\" }, { script = \"…\" } \
                               and { command = [\"…\"] }";
        let Some(node) = section.take("handler") else { return Handler::Log };
        let origin = node.origin.clone();
        let mut known = KINDS.to_vec();
        known.push("timeout");
        let before = self.complaints.borrow().len();
        let mut handler = self.section(&section.name("handler"), Some(node), &known);
        let chosen: Vec<&str> = KINDS.into_iter().filter(|kind| handler.has(kind)).collect();
        let timed = handler.has("timeout");
        let timeout = handler.duration("timeout", Duration::from_secs(30));
        let found = match chosen[..] {
            ["log"] if handler.flag("log", true) => Some(Handler::Log),
            ["http"] => handler
                .parsed("http", |url| http_url(url).map(|()| url.to_owned()))
                .map(|found| Handler::Http { url: found.value, timeout }),
            ["sql"] => handler.parsed("sql", not_empty).map(|found| Handler::Sql(found.value)),
            ["script"] => handler.parsed("script", not_empty).map(|found| Handler::Script(found.value)),
            ["command"] => command_line(&mut handler).map(|line| Handler::Command { line, timeout }),
            _ => None,
        };
        if timed && matches!(found, Some(Handler::Log | Handler::Sql(_) | Handler::Script(_))) {
            handler.complain("timeout", origin.clone(), "only http and command handlers have a timeout");
        }
        if found.is_none() && self.complaints.borrow().len() == before {
            section.complain("handler", origin, CHOICES);
        }
        found.unwrap_or(Handler::Log)
    }
}

/// `["program", "argument"]`, or one text that is split at spaces, except within quotes.
fn command_line(handler: &mut Section<'_>) -> Option<Vec<String>> {
    let origin = handler.origin_of("command");
    let single = matches!(handler.peek("command"), Some(Value::Text(_)));
    let mut line: Vec<String> = handler.texts("command").into_iter().map(|found| found.value).collect();
    if single {
        line = match CommandHandler::words(&line.join(" ")) {
            Ok(words) => words,
            Err(error) => {
                handler.complain("command", origin, error.to_string());
                return None;
            }
        };
    }
    if line.first().is_none_or(|program| program.trim().is_empty()) {
        handler.complain("command", origin, "name a program, such as [\"notify\", \"--quiet\"]");
        return None;
    }
    Some(line)
}
