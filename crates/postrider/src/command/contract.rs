//! `contract`: what is promised for each route and each group, by what, and what remains.
//!
//! Written from the settings and from what store and brokers say of themselves, so that it is true of this installation.

use std::collections::BTreeMap;

use admin::{Contract, Part};
use broker::{Connected, Guarantees};
use message::{OnDead, Order, Semantics};

use super::failure::Failure;
use super::output::Output;
use super::{backend, fit, world};
use crate::config::{self, Config, Consumer, Dedup, Handler, Route, duration_text};

/// Prints what is promised.
pub(super) async fn show(config: &Config, markdown: bool, output: &mut Output) -> Result<(), Failure> {
    fit::check(config)?;
    backend::exists(config)?;
    let brokers = world::brokers(config)?;
    let contract = draw_up(config, &brokers, backend::open(config).await?.promises);
    output.answer(&contract, |output| match markdown {
        true => parts(&contract).try_for_each(|(kind, part)| print_markdown(part, kind, output)),
        false => parts(&contract).try_for_each(|(kind, part)| print_text(part, kind, output)),
    })
}

/// What is promised by a store that promises this, and by these brokers.
pub(super) fn draw_up(
    config: &Config,
    brokers: &BTreeMap<String, Connected>,
    promises: Vec<String>,
) -> Contract {
    let guarantees = |name: &str| brokers.get(name).map(|broker| broker.publisher.guarantees());
    let transacts = |name: &str| {
        brokers.get(name)?.publisher.transactions()?;
        Some(config.brokers.get(name)?.url.starts_with("kafka"))
    };
    Contract {
        store: Part {
            name: backend::name(config),
            promises,
            mechanisms: heard(config).into_iter().collect(),
            ..Part::default()
        },
        routes: config
            .routes
            .iter()
            .map(|(name, route)| {
                let mut part = of_route(name, route, guarantees(&route.broker), transacts(&route.broker));
                part.duplicates.extend(redelivered(config, name));
                part
            })
            .collect(),
        consumers: config
            .consumers
            .iter()
            .map(|(name, group)| of_group(config, name, group, guarantees(&group.broker)))
            .collect(),
    }
}

/// Groups to which what they do not acknowledge is sent again.
fn redelivered(config: &Config, route: &str) -> Option<String> {
    let takes = |topic: &String| config.route_of(topic).is_some_and(|(name, _)| name == route);
    let groups = config.consumers.iter().filter(|(_, group)| group.acknowledge.is_some());
    let groups = groups.filter(|(_, group)| group.topics.iter().any(takes));
    let groups: Vec<String> = groups.map(|(name, _)| format!("`{name}`")).collect();
    (!groups.is_empty()).then(|| {
        format!("it is not acknowledged in time by {}: then it is sent again, on purpose.", groups.join(", "))
    })
}

/// The topic from which acknowledgements come into the store, beside HTTP.
fn heard(config: &Config) -> Option<String> {
    let heard = config.producer.acknowledgements.as_ref()?;
    let who = match config.producer.acknowledge_secrets {
        Some(_) => "each must prove that the message was received",
        None => "whoever can write there is believed",
    };
    Some(format!(
        "groups elsewhere acknowledge by the topic `{}` of `{}`, to which the group `{}` listens; {who}.",
        heard.topic, heard.broker, heard.group
    ))
}

fn parts(contract: &Contract) -> impl Iterator<Item = (&'static str, &Part)> {
    let routes = contract.routes.iter().map(|part| ("Route", part));
    let groups = contract.consumers.iter().map(|part| ("Group", part));
    std::iter::once(("Store", &contract.store)).chain(routes).chain(groups)
}

/// Everything but the name, each kind of sentence under its word.
fn sections(part: &Part) -> Vec<(&'static str, Vec<String>)> {
    let settings = part.settings.iter().map(|(name, value)| format!("{name} = {value}")).collect();
    let all = [
        ("promise", part.promises.clone()),
        ("by", part.mechanisms.clone()),
        ("lost", part.loss.clone()),
        ("twice", part.duplicates.clone()),
        ("settings", settings),
        ("needs", part.needs.clone()),
    ];
    all.into_iter().filter(|(_, lines)| !lines.is_empty()).collect()
}

/// The word for what is promised, and the reason for it.
fn choice(part: &Part) -> Option<String> {
    let semantics = part.semantics?;
    Some(match &part.why {
        Some(why) => format!("{semantics}, because: {why}"),
        None => semantics.to_string(),
    })
}

fn print_text(part: &Part, kind: &str, output: &mut Output) -> Result<(), Failure> {
    output.line(format!("{} {}", kind.to_uppercase(), part.name))?;
    if let Some(choice) = choice(part) {
        output.line(format!("  {choice}"))?;
    }
    for (word, lines) in sections(part) {
        for (number, line) in lines.iter().enumerate() {
            let word = if number == 0 { word } else { "" };
            output.line(format!("  {word:<9} {line}"))?;
        }
    }
    output.line("")
}

fn print_markdown(part: &Part, kind: &str, output: &mut Output) -> Result<(), Failure> {
    output.line(format!("## {kind} `{}`\n", part.name))?;
    if let Some(choice) = choice(part) {
        output.line(format!("**{choice}**\n"))?;
    }
    for (word, lines) in sections(part) {
        output.line(format!("{}:\n", heading(word)))?;
        lines.iter().try_for_each(|line| output.line(format!("- {line}")))?;
        output.line("")?;
    }
    Ok(())
}

/// The word as a line of its own.
fn heading(word: &str) -> &'static str {
    match word {
        "promise" => "Promised",
        "by" => "By",
        "lost" => "A message can be lost, or wait for a person, when",
        "twice" => "It can come or be done twice when",
        "settings" => "Settings that matter",
        _ => "Needed of the broker",
    }
}

/// `transacts`: whether readers of the broker could read what is not committed, where it has transactions.
fn of_route(name: &str, route: &Route, broker: Option<Guarantees>, transacts: Option<bool>) -> Part {
    if route.semantics.sends_again() {
        let mut part = of_stored_route(name, route, broker);
        if route.semantics == Semantics::ExactlyOnce && transacts.is_some() {
            part.promises.push("it is in the log once, for whoever reads what is committed.".to_owned());
            part.mechanisms.push(
                "a batch and a note of it are one transaction; who takes a lane over fences its former owner and reads the \
                 note."
                    .to_owned(),
            );
            part.duplicates = vec![
                "a person requeues it: one that is Dead because its relays died, or the broker did not answer, may be in the \
                 log."
                    .to_owned(),
                "the number of lanes, or the broker's name in the settings, changes while a relay that died has left messages \
                 in flight."
                    .to_owned(),
            ];
            if transacts == Some(true) {
                part.duplicates.push(
                    "somebody reads what is not committed (isolation.level=read_uncommitted).".to_owned(),
                );
            }
        } else if route.semantics == Semantics::ExactlyOnce {
            part.promises.push(format!("it is in the log of `{}` once.", route.broker));
            part.mechanisms.push(
                "the broker recognises a message that is sent again; it is asked for how long before anything is \
                 sent."
                    .to_owned(),
            );
        }
        part
    } else {
        of_fleeting_route(name, route, broker)
    }
}

/// A route whose messages are sent once at most.
fn of_fleeting_route(name: &str, route: &Route, broker: Option<Guarantees>) -> Part {
    let before = "it is settled in the store before it is sent, and the client's own retries are off";
    let mut part = Part {
        name: name.to_owned(),
        semantics: Some(route.semantics),
        why: route.why.clone(),
        ..Part::default()
    };
    let (promise, lost) = match route.semantics {
        Semantics::AtMostOnce => ("a message is sent once at most.", "it is gone"),
        Semantics::BestEffort => ("a message is tried once, and whoever sends it never waits.", "it is gone"),
        _ => ("whoever sends a message never waits; nothing else.", "nobody looks"),
    };
    part.promises.push(promise.to_owned());
    if route.semantics.bypasses_store() {
        part.mechanisms.push(
            "sent by HTTP it goes from memory to the broker, past the store, unless it has an id or key of the sender's."
                .to_owned(),
        );
        part.mechanisms.push(format!("written to the store, {before}."));
        part.loss.push("too many wait for the broker already, or this process dies with it.".to_owned());
    } else {
        part.mechanisms.push(format!("{before}."));
        part.loss.push("the relay dies between the settlement and the broker's word.".to_owned());
    }
    part.loss
        .push(format!("`{}` does not confirm it: {lost}, and outbox_lost_total counts it.", route.broker));
    if !route.semantics.bypasses_store() {
        part.loss.push(format!(
            "`{}` is away: single messages try whether it is back, and are lost; the others wait in the store.",
            route.broker
        ));
        part.settings.insert("order".to_owned(), config::order(route.order).to_owned());
    }
    if let Some(topic) = &route.copy_to {
        part.promises.push(format!(
            "a copy of it on `{topic}` is sent until it is confirmed, whatever becomes of it."
        ));
        part.mechanisms.push(
            "the copy is written with its settlement, in one transaction, before it is sent.".to_owned(),
        );
        part.settings.insert("copy_to".to_owned(), topic.clone());
    }
    part.duplicates.push("the broker itself delivers it again to a consumer.".to_owned());
    part.needs = broker.map(|broker| needs(&broker)).unwrap_or_default();
    part
}

fn needs(broker: &Guarantees) -> Vec<String> {
    broker.needs.iter().map(ToString::to_string).collect()
}

/// A route whose messages are sent until they are confirmed.
fn of_stored_route(name: &str, route: &Route, broker: Option<Guarantees>) -> Part {
    let mut promises =
        vec![format!("a message stays in the store until `{}` has confirmed it.", route.broker)];
    let mut mechanisms = vec!["it is sent again, under the same id, until it is confirmed.".to_owned()];
    if route.semantics == Semantics::EffectivelyOnce {
        promises.push("its consumers do its work once, if their own promises below say so.".to_owned());
        mechanisms
            .push("the id travels with it, and by it consumers recognise what they have done.".to_owned());
    }
    if route.order == Order::Key {
        promises.push("messages of one topic and key go in the order in which they were written.".to_owned());
        let dead = match route.on_dead {
            OnDead::Hold => "a Dead one holds them until a person has decided",
            OnDead::Skip => "a Dead one lets them pass",
        };
        mechanisms.push(format!(
            "one relay at a time has a lane, and one that failed holds back the later ones of its key; {dead}."
        ));
    }
    let retry = &route.retry;
    let mut loss = vec![format!(
        "it failed {} times, or was not sent within {}: then it is Dead and waits for a person.",
        retry.max_attempts,
        duration_text(retry.give_up_after)
    )];
    let between = "a relay died, or lost its lease, between the broker's word and the settlement";
    let mut duplicates = vec![
        format!("{between}."),
        "the broker's word was lost or came too late, and it is sent again.".to_owned(),
    ];
    if let Some(broker) = &broker {
        mechanisms.push(format!("what the broker confirmed: {}.", broker.durability));
        loss.push(format!("`{}` loses what it confirmed: see how it must be set up.", route.broker));
        if let Some(window) = broker.deduplication {
            duplicates = vec![format!(
                "{between}, and it is sent again more than {} later: until then `{}` recognises it.",
                duration_text(window),
                route.broker
            )];
        }
    }
    duplicates.push("a person requeues it.".to_owned());
    let settings = [
        ("order", config::order(route.order).to_owned()),
        ("on_dead", config::on_dead(route.on_dead).to_owned()),
        ("retry.max_attempts", retry.max_attempts.to_string()),
        ("retry.give_up_after", duration_text(retry.give_up_after)),
        ("retry.count_outages", retry.count_outages.to_string()),
    ];
    Part {
        name: name.to_owned(),
        semantics: Some(route.semantics),
        why: route.why.clone(),
        promises,
        mechanisms,
        loss,
        duplicates,
        settings: settings.into_iter().map(|(name, value)| (name.to_owned(), value)).collect(),
        needs: broker.map(|broker| needs(&broker)).unwrap_or_default(),
    }
}

fn of_group(config: &Config, name: &str, group: &Consumer, broker: Option<Guarantees>) -> Part {
    let mut part = Part { name: name.to_owned(), semantics: Some(group.semantics), ..Part::default() };
    if group.semantics.bypasses_store() {
        return of_fleeting_group(part, group, broker);
    }
    if group.semantics == Semantics::AtMostOnce {
        part.promises.push("the work of a message is begun once at most.".to_owned());
        part.mechanisms.push("the broker may forget it before its work begins.".to_owned());
        part.loss.push(
            "this process dies, or the handler is down: inbox_lost_total counts the latter.".to_owned(),
        );
        part.loss.push("its handler failed once: then it is Dead and waits for a person.".to_owned());
        part.settings.insert("handler".to_owned(), group.handler.kind().to_owned());
        part.needs = broker.map(|broker| needs(&broker)).unwrap_or_default();
        return part;
    }
    if group.semantics == Semantics::ExactlyOnce {
        return of_transforming_group(part, group, broker);
    }
    if group.semantics == Semantics::EffectivelyOnce && !config.is_effectively_once(group) {
        part.semantics = Some(Semantics::AtLeastOnce);
    }
    match &group.handler {
        Handler::Log | Handler::Sql(_) if group.dedup != Dedup::Redis => {
            part.promises.push("the work of a message is done once.".to_owned());
            part.mechanisms
                .push("its work and the mark that says so are one transaction: both or neither.".to_owned());
        }
        Handler::Script(_) | Handler::Log => {
            part.promises
                .push("the work of a message is done once, for as long as Redis keeps its mark.".to_owned());
            part.mechanisms.push("its work and the mark that says so are one script.".to_owned());
            part.duplicates.push(
                "a script failed after it wrote something: Redis undoes nothing, and it runs again."
                    .to_owned(),
            );
        }
        handler => {
            part.promises.push("the work of a message is done at least once.".to_owned());
            part.mechanisms.push(format!(
                "its {} handler is given an idempotency key with every message, the same each time.",
                handler.kind()
            ));
            part.duplicates.push("a crash came between the work and its mark.".to_owned());
            if part.semantics == Some(Semantics::EffectivelyOnce) {
                part.promises
                    .push("doing it again changes nothing, as its routes say (idempotent).".to_owned());
            }
        }
    }
    match group.dedup {
        Dedup::Sql => part.mechanisms.push("marks are in the store.".to_owned()),
        Dedup::Redis => {
            part.duplicates.push("Redis forgot the mark, by a failover or a lost last second.".to_owned());
        }
        Dedup::Hybrid => part.mechanisms.push(
            "Redis answers for what it has seen and the store decides: a Redis that was emptied doubles nothing."
                .to_owned(),
        ),
    }
    part.duplicates.push(format!("it comes again after {}.", duration_text(group.keep_ids)));
    part.loss.push(format!(
        "its handler failed {} times: then it is Dead and waits for a person.",
        group.retry.max_attempts
    ));
    if let Some(broker) = broker {
        part.needs = needs(&broker);
    }
    let settings = [
        ("handler", group.handler.kind().to_owned()),
        ("dedup", group.dedup.word().to_owned()),
        ("keep_ids", duration_text(group.keep_ids)),
        ("replay", duration_text(group.replay)),
        (
            "acknowledge",
            group.acknowledge.map_or_else(
                || "never asked for again".to_owned(),
                |acknowledge| {
                    let (timeout, most) = (duration_text(acknowledge.timeout), acknowledge.max_redeliveries);
                    format!("within {timeout}, or sent again, {most} times at most")
                },
            ),
        ),
        ("order", config::order(group.order).to_owned()),
        ("on_dead", config::on_dead(group.on_dead).to_owned()),
        ("retry.max_attempts", group.retry.max_attempts.to_string()),
    ];
    part.settings = settings.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    part
}

/// A group that remembers nothing.
fn of_fleeting_group(mut part: Part, group: &Consumer, broker: Option<Guarantees>) -> Part {
    if group.semantics == Semantics::None {
        part.promises.push("a message that comes is tried once; nothing else.".to_owned());
        part.mechanisms.push("the broker may forget it before its work begins.".to_owned());
        part.loss.push("this process dies with it: nobody counts that.".to_owned());
        part.loss.push("its handler fails, or is down: inbox_lost_total counts it.".to_owned());
    } else {
        part.promises.push(
            "a message is tried, and given up if it fails; while the handler is down it waits.".to_owned(),
        );
        part.mechanisms.push("the broker may forget it when its handler has answered.".to_owned());
        part.loss.push("its handler fails: inbox_lost_total counts it.".to_owned());
        part.duplicates.push("this process dies between the work and the broker's word.".to_owned());
        part.duplicates
            .push("its handler is down for one before it in the partition: both come again.".to_owned());
        part.settings.insert("order".to_owned(), config::order(group.order).to_owned());
    }
    part.mechanisms.push("nothing is remembered, and nobody is told that it is done.".to_owned());
    part.duplicates.push("it comes again, for whatever reason: nobody recognises it.".to_owned());
    part.settings.insert("handler".to_owned(), group.handler.kind().to_owned());
    part.needs = broker.map(|broker| needs(&broker)).unwrap_or_default();
    part
}

/// A group whose work is messages, in one transaction with what they were made of.
fn of_transforming_group(mut part: Part, group: &Consumer, broker: Option<Guarantees>) -> Part {
    let dead = inbox::Transform::dead_topic(&part.name);
    part.promises.push(
        "what is made of a message is in the log once, for whoever reads what is committed.".to_owned(),
    );
    part.promises.push("messages of one topic and key are handled in order.".to_owned());
    part.mechanisms.push(format!(
        "what its {} handler answers, and how far the group is, are one transaction of `{}`: both or neither.",
        group.handler.kind(),
        group.broker
    ));
    part.mechanisms.push(
        "the broker takes it only from a member that the group still has, and gives a partition to the next one only \
         when what moves it is committed or undone."
            .to_owned(),
    );
    part.loss.push(format!(
        "its handler failed {} times: then it is in the topic `{dead}`, with the reason in its headers. Until then its \
         partition waits.",
        group.retry.max_attempts
    ));
    part.duplicates = vec![
        "what the handler does elsewhere is in no transaction: after a crash it runs again for messages that were not \
         committed."
            .to_owned(),
        "the message itself is in the log twice: see what its route promises.".to_owned(),
        "somebody reads what is not committed (isolation.level=read_uncommitted).".to_owned(),
    ];
    let settings = [
        ("handler", group.handler.kind().to_owned()),
        ("dead letters", dead),
        ("retry.max_attempts", group.retry.max_attempts.to_string()),
    ];
    part.settings = settings.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    part.needs = broker.map(|broker| needs(&broker)).unwrap_or_default();
    part
}
