//! `reconcile`: what was written, what lies in the brokers and what the groups have done, side by side.

use admin::{
    BrokerComparison, BrokerSide, Difference, GroupComparison, ReconcileRequest, ReconcileView, Sides,
};
use chrono::{DateTime, TimeDelta, Utc};
use comfy_table::{Cell, Color};
use message::Order;
use store::Sent;

use super::arguments::Reconcile;
use super::failure::Failure;
use super::output::{Output, exact};
use super::world;
use crate::config::{Config, redacted};

/// Compares everything. Fails if something is missing, extra or duplicate, or if nobody can tell, so that a script can stop
/// there.
pub(super) async fn reconcile(
    config: &Config,
    options: Reconcile,
    output: &mut Output,
) -> Result<(), Failure> {
    let now = Utc::now();
    let patience = TimeDelta::from_std(options.patience).unwrap_or(TimeDelta::MAX);
    let recent = || now.checked_sub_signed(patience).unwrap_or(DateTime::UNIX_EPOCH);
    let request = ReconcileRequest {
        since: options.since.from(now),
        until: options.until.map_or_else(recent, |until| until.from(now)),
        topic: options.topic,
        patience: options.patience,
        show: options.show,
    };
    let desk = world::open_desk(config).await?;
    let view = desk.reconcile(&request, &sides(config)?).await?;
    output.answer(&view, |output| show(&view, output))?;
    if view.agrees { Ok(()) } else { Err(Failure::differs(verdict(&view))) }
}

/// Why the sides are not said to agree.
fn verdict(view: &ReconcileView) -> String {
    let [missing, extra, duplicate] = view.differences();
    let (differ, unknown) = (view.differences() != [0; 3], view.uncompared());
    let differences =
        format!("the sides do not agree: {missing} missing, {extra} extra, {duplicate} duplicate");
    let nothing = format!("nothing could be compared of {}", unknown.join(", "));
    match (differ, unknown.is_empty()) {
        (true, true) => differences,
        (true, false) => format!("{differences}; {nothing}"),
        (false, _) => format!("nobody can tell whether the sides agree: {nothing}"),
    }
}

/// What the configuration says of the sides.
fn sides(config: &Config) -> Result<Sides, Failure> {
    let brokers = world::brokers(config)?.into_iter().map(|(name, broker)| {
        let url = config.brokers.get(&name).map(|broker| redacted(&broker.url)).unwrap_or_default();
        let key_order = broker.publisher.guarantees().key_order;
        (name, BrokerSide { url, reader: broker.reader, key_order })
    });
    let ordered = config.consumers.iter().filter(|(_, consumer)| consumer.order == Order::Key);
    Ok(Sides {
        keep_sent: (config.store.sent != Sent::Delete).then_some(config.store.retention.sent),
        brokers: brokers.collect(),
        ordered: ordered.map(|(name, _)| name.clone()).collect(),
    })
}

fn show(view: &ReconcileView, output: &mut Output) -> Result<(), Failure> {
    let outbox = &view.outbox;
    output.line(format!(
        "OUTBOX from {} to {}: {} written, {} sent, {} not yet, {} dead",
        exact(view.since),
        exact(view.until),
        outbox.written,
        outbox.sent,
        outbox.unsent,
        outbox.dead
    ))?;
    view.brokers.iter().try_for_each(|broker| head_of_broker(broker, view, output))?;
    view.groups.iter().try_for_each(|group| head_of_group(group, view, output))?;
    for broker in &view.brokers {
        let name = format!("the broker {}", broker.broker);
        list("missing in", &name, &broker.missing, output)?;
        list("extra in", &name, &broker.extra, output)?;
        list("duplicate in", &name, &broker.duplicate, output)?;
    }
    for group in &view.groups {
        let name = format!("the group {}", group.group);
        list("missing by", &name, &group.missing, output)?;
        list("straggling by", &name, &group.straggling, output)?;
    }
    Ok(())
}

fn head_of_broker(
    broker: &BrokerComparison,
    view: &ReconcileView,
    output: &mut Output,
) -> Result<(), Failure> {
    output.line("")?;
    let parts = broker.topics.iter().map(|topic| (topic, begins(topic.from, topic.compared, view)));
    let parts: Vec<_> = parts.collect();
    let common = parts.first().map(|(_, begins)| begins.as_str()).unwrap_or_default();
    let is_common = parts.iter().all(|(_, begins)| begins == common);
    let head = if is_common { common } else { "" };
    output.line(format!("BROKER {} {}{head}", broker.broker, broker.url))?;
    for (topic, begins) in parts.iter().filter(|(_, begins)| !is_common && !begins.is_empty()) {
        output.line(format!("the topic {}{begins}", topic.topic))?;
    }
    broker.notes.iter().try_for_each(|note| output.line(note))?;
    output.rows([
        count("stored", broker.stored, None),
        count("missing", broker.missing.count, Some(Color::Red)),
        count("extra", broker.extra.count, Some(Color::Red)),
        count("duplicate", broker.duplicate.count, Some(Color::Red)),
    ])
}

fn head_of_group(group: &GroupComparison, view: &ReconcileView, output: &mut Output) -> Result<(), Failure> {
    output.line("")?;
    let begins = begins(group.from, group.compared, view);
    output.line(format!("GROUP {} at {}{begins}", group.group, group.broker))?;
    output.rows([
        count("sent to it", group.sent, None),
        count("processed", group.processed, None),
        count("kept in its inbox", group.kept, None),
        count("on the way", group.waiting, None),
        count("missing", group.missing.count, Some(Color::Red)),
        count("straggling", group.straggling.count, Some(Color::Yellow)),
    ])
}

/// Said where a side has forgotten a part of the time, or all of it.
fn begins(from: DateTime<Utc>, compared: bool, view: &ReconcileView) -> String {
    if !compared {
        ", not compared: nothing of that time is kept on both sides".to_owned()
    } else if (view.since..view.until).contains(&from) && from != view.since {
        format!(", compared from {} on: what is older is not kept on both sides", exact(from))
    } else {
        String::new()
    }
}

fn count(name: &str, count: u64, colour: Option<Color>) -> [Cell; 2] {
    let cell = Cell::new(count);
    [
        Cell::new(name),
        match colour.filter(|_| count > 0) {
            Some(colour) => cell.fg(colour),
            None => cell,
        },
    ]
}

fn list(what: &str, place: &str, found: &Difference, output: &mut Output) -> Result<(), Failure> {
    if found.messages.is_empty() {
        return Ok(());
    }
    output.line("")?;
    output.line(format!("{what} {place}"))?;
    let time = |at: Option<DateTime<Utc>>| Cell::new(at.map_or_else(|| "-".to_owned(), exact));
    output.table(
        ["message", "topic", "written", "sent", "stored", "because"],
        found.messages.iter().map(|message| {
            [
                Cell::new(message.message_id),
                Cell::new(&message.topic),
                time(message.written_at),
                time(message.sent_at),
                time(message.stored_at),
                Cell::new(message.why.unwrap_or("-")),
            ]
        }),
    )?;
    let shown = found.messages.len() as u64;
    match found.count.saturating_sub(shown) {
        0 => Ok(()),
        more => output.note(format!("{more} more: raise --show to see them")),
    }
}
