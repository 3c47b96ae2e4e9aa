//! `contract`: what is promised for each route and each group, by what, and what remains.
//!
//! Written from the settings and from what the store says of itself, so that it is true of this installation.

use serde::Serialize;

use message::{OnDead, Order, Semantics};

use super::backend;
use super::failure::Failure;
use super::output::Output;
use crate::config::{Config, Consumer, Dedup, Handler, Place, Route, duration_text};

/// The whole of it.
#[derive(Debug, Serialize)]
struct Contract {
    store: Part,
    routes: Vec<Part>,
    consumers: Vec<Part>,
}

/// What holds of one thing.
#[derive(Debug, Serialize)]
struct Part {
    name: String,
    /// What can be relied on, and how that is done.
    promises: Vec<String>,
    /// What can still happen.
    remains: Vec<String>,
}

/// Prints what is promised.
pub(super) async fn show(config: &Config, output: &mut Output) -> Result<(), Failure> {
    backend::exists(config)?;
    let contract = Contract {
        store: Part {
            name: backend::name(config),
            promises: backend::open(config).await?.promises,
            remains: Vec::new(),
        },
        routes: config.routes.iter().map(|(name, route)| of_route(name, route)).collect(),
        consumers: config.consumers.iter().map(|(name, group)| of_group(config, name, group)).collect(),
    };
    output.answer(&contract, |output| {
        output.line(format!("STORE {}", contract.store.name))?;
        part(&contract.store, output)?;
        for (kind, parts) in [("ROUTE", &contract.routes), ("GROUP", &contract.consumers)] {
            for each in parts {
                output.line(format!("\n{kind} {}", each.name))?;
                part(each, output)?;
            }
        }
        Ok(())
    })
}

fn part(part: &Part, output: &mut Output) -> Result<(), Failure> {
    part.promises.iter().try_for_each(|line| output.line(format!("  {line}")))?;
    part.remains.iter().try_for_each(|line| output.line(format!("  remains: {line}")))
}

fn of_route(name: &str, route: &Route) -> Part {
    let mut promises = vec![format!(
        "{}: a message stays in the store until `{}` has confirmed it, and is sent again until then.",
        route.semantics, route.broker
    )];
    if route.semantics == Semantics::EffectivelyOnce {
        promises.push("It carries the same id each time, by which its consumers recognise it.".to_owned());
    }
    if route.order == Order::Key {
        let dead = match route.on_dead {
            OnDead::Hold => "a Dead one holds them until a person has decided",
            OnDead::Skip => "a Dead one lets them pass",
        };
        promises.push(format!(
            "Messages of one topic and key go in the order in which they were written; one that failed holds back the later \
             ones, {dead}."
        ));
    }
    let retry = &route.retry;
    let remains = vec![
        "a crash between the broker's word and the settlement sends a message twice.".to_owned(),
        format!(
            "a message that fails {} times, or is not sent within {}, is Dead and waits for a person.",
            retry.max_attempts,
            duration_text(retry.give_up_after)
        ),
    ];
    Part { name: name.to_owned(), promises, remains }
}

fn of_group(config: &Config, name: &str, group: &Consumer) -> Part {
    let mut promises = Vec::new();
    let mut remains = Vec::new();
    let apart = group.dedup == Dedup::Redis && config.store.place != Place::Redis;
    match &group.handler {
        Handler::Log | Handler::Sql(_) if !apart => {
            promises
                .push("Its work and the mark that says so are one transaction: both or neither.".to_owned());
        }
        Handler::Script(_) | Handler::Log => {
            promises.push("Its work and the mark that says so are one script.".to_owned());
            remains.push("Redis undoes nothing that a script wrote before it failed.".to_owned());
        }
        handler => {
            promises.push(format!(
                "Its {} handler is given an idempotency key with every message, the same each time.",
                handler.kind()
            ));
            remains.push("a crash between the work and its mark does the work again.".to_owned());
        }
    }
    if group.dedup == Dedup::Redis {
        remains.push("what Redis forgets, by a failover or a lost last second, is done again.".to_owned());
    }
    if group.dedup == Dedup::Hybrid {
        promises.push("Redis answers for what it has seen and the store decides: a Redis that was emptied doubles nothing.".to_owned());
    }
    remains
        .push(format!("a message that comes again after {} is done again.", duration_text(group.keep_ids)));
    Part { name: name.to_owned(), promises, remains }
}
