//! `status` and `list`: looking without touching.

use std::collections::BTreeMap;
use std::time::Duration;

use admin::{Desk, ListFilter, MessageView, PageRequest};
use chrono::Utc;
use comfy_table::Cell;
use serde_json::json;

use super::arguments::{List, Page};
use super::failure::Failure;
use super::output::{Output, exact, moment, relative, rough, shown, status as status_cell, text};

/// Keys shown that wait behind another message.
const HOLDS: usize = 20;

/// One message, or how everything is.
pub(super) async fn status(desk: &Desk, id: Option<&str>, output: &mut Output) -> Result<(), Failure> {
    match id {
        Some(id) => {
            let view = desk.status(id).await?;
            output.answer(&view, |output| message(&view, output))
        }
        None => overview(desk, output).await,
    }
}

async fn overview(desk: &Desk, output: &mut Output) -> Result<(), Failure> {
    let (counts, lanes, holds) = (desk.counts().await?, desk.lanes().await?, desk.holds(HOLDS).await?);
    let mut groups = BTreeMap::new();
    for consumer in &desk.topology().consumers {
        groups.insert(consumer.group.clone(), desk.inbox_counts(&consumer.group).await?);
    }
    let value = json!({ "counts": counts, "lanes": lanes, "holds": holds, "groups": groups });
    output.answer(&value, |output| {
        output.table(
            ["pending", "in flight", "failed", "sent", "dead", "oldest unsent"],
            [[
                Cell::new(counts.pending),
                Cell::new(counts.in_flight),
                Cell::new(counts.failed),
                Cell::new(counts.sent),
                Cell::new(counts.dead),
                Cell::new(counts.oldest_age.map_or_else(
                    || "-".to_owned(),
                    |age| rough(Duration::try_from_secs_f64(age).unwrap_or_default()),
                )),
            ]],
        )?;
        output.line("")?;
        output.pairs([
            ("published", Cell::new(counts.publish_success_total)),
            ("tries in vain", Cell::new(counts.publish_failure_total)),
            ("acknowledged", Cell::new(counts.acknowledged_total)),
            ("lanes", Cell::new(said_of_lanes(&lanes))),
        ])?;
        if !groups.is_empty() {
            output.line("")?;
            output.table(
                ["group", "processed", "duplicates", "parked", "dead", "ids kept"],
                groups.iter().map(|(group, counts)| {
                    [
                        Cell::new(group),
                        Cell::new(counts.processed),
                        Cell::new(counts.duplicates),
                        Cell::new(counts.parked),
                        Cell::new(counts.dead),
                        Cell::new(counts.ids),
                    ]
                }),
            )?;
        }
        if !holds.is_empty() {
            output.line("")?;
            output.table(
                ["held key", "topic", "waits for", "which is"],
                holds.iter().map(|hold| {
                    [
                        text(Some(&hold.key)),
                        Cell::new(&hold.topic),
                        Cell::new(hold.message_id.map_or_else(|| "-".to_owned(), |id| id.to_string())),
                        hold.status.map_or_else(|| Cell::new("-"), status_cell),
                    ]
                }),
            )?;
        }
        Ok(())
    })
}

fn said_of_lanes(lanes: &admin::LanesView) -> String {
    let mut owners: Vec<&str> = lanes.lanes.iter().filter_map(|lane| lane.owner.as_deref()).collect();
    let held = owners.len();
    owners.sort_unstable();
    owners.dedup();
    match owners.len() {
        0 => format!("{}, none held: no relay is running", lanes.count),
        1 => format!("{}, {held} held by {}", lanes.count, owners[0]),
        relays => format!("{}, {held} held by {relays} relays", lanes.count),
    }
}

/// All that is known of a message.
pub(super) fn message(view: &MessageView, output: &mut Output) -> Result<(), Failure> {
    let mut pairs = vec![
        ("message", Cell::new(view.message_id)),
        ("status", status_cell(view.status)),
        ("topic", Cell::new(&view.topic)),
        ("key", text(view.key.as_deref())),
        ("type", text(view.kind.as_deref())),
        ("seq", Cell::new(view.seq)),
        ("written", moment(Some(view.written_at))),
        ("happened", moment(Some(view.occurred_at))),
        ("attempts", Cell::new(view.attempts)),
    ];
    let moments =
        [("sent", view.sent_at), ("next attempt", view.next_attempt_at), ("locked until", view.locked_until)];
    pairs.extend(moments.into_iter().filter(|(_, at)| at.is_some()).map(|(name, at)| (name, moment(at))));
    let words = [("last error", &view.last_error), ("dead because", &view.dead_reason)];
    for (name, word) in words {
        if let Some(word) = word {
            pairs.push((name, Cell::new(shown(word, 500))));
        }
    }
    if view.held {
        pairs.push(("held", Cell::new("waits behind an earlier message of its key")));
    }
    if view.delivery_epoch > 0 {
        pairs.push(("delivery", Cell::new(format!("sent anew {}×", view.delivery_epoch))));
    }
    for acknowledgement in &view.acknowledgements {
        let said = acknowledgement.acknowledged_at.map_or_else(
            || "not yet".to_owned(),
            |at| format!("{} ({})", exact(at), relative(at, Utc::now())),
        );
        pairs.push(("acknowledged", Cell::new(format!("{}: {said}", acknowledgement.consumer_group))));
    }
    for (name, value) in &view.headers {
        pairs.push(("header", Cell::new(shown(&format!("{name}: {value}"), 200))));
    }
    pairs.push(("content type", Cell::new(shown(&view.content_type, 80))));
    pairs.push(("payload", Cell::new(shown(view.payload.get(), 2_000))));
    output.pairs(pairs)
}

/// Messages that fit.
pub(super) async fn list(desk: &Desk, options: List, output: &mut Output) -> Result<(), Failure> {
    let filter = ListFilter {
        statuses: options.statuses,
        topic: options.topic,
        key: options.key,
        consumer_group: options.group,
        unacknowledged_by: options.unacknowledged_by,
    };
    let mut page = page_request(options.page);
    page.newest_first = !options.oldest_first;
    let view = desk.list(filter, page).await?;
    output.answer(&view, |output| {
        if view.items.is_empty() && view.next.is_none() {
            return output.note("no messages");
        }
        output.table(
            ["message", "status", "topic", "key", "type", "attempts", "written", "last error"],
            view.items.iter().map(|item| {
                [
                    Cell::new(item.message_id),
                    status_cell(item.status),
                    Cell::new(&item.topic),
                    Cell::new(item.key.as_deref().map_or_else(|| "-".to_owned(), |key| shown(key, 24))),
                    Cell::new(item.kind.as_deref().map_or_else(|| "-".to_owned(), |kind| shown(kind, 24))),
                    Cell::new(item.attempts),
                    moment(Some(item.written_at)),
                    Cell::new(
                        item.last_error.as_deref().map_or_else(|| "-".to_owned(), |error| shown(error, 60)),
                    ),
                ]
            }),
        )?;
        more(view.next.as_deref(), output)
    })
}

/// How to see the next page.
pub(super) fn more(next: Option<&str>, output: &mut Output) -> Result<(), Failure> {
    next.map_or(Ok(()), |next| output.note(format!("more with --after {next}")))
}

/// The page that the options name.
pub(super) fn page_request(page: Page) -> PageRequest {
    PageRequest { limit: page.limit, after: page.after, newest_first: false }
}
