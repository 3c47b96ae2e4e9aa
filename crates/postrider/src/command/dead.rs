//! `dead`: looking at dead letters and mending them.

mod edit;

use std::io::{IsTerminal, Write};

use admin::{BulkAnswer, Desk, ListFilter, PageRequest, ParkedView, Progress};
use comfy_table::Cell;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};
use serde_json::json;

use super::ACTOR;
use super::arguments::{DeadList, Which};
use super::failure::{Exit, Failure};
use super::inspect::{message, more, page_request};
use super::output::{Output, moment, shown, text};

pub(super) use edit::edit;

/// What is done with dead letters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    Requeue,
    Discard,
}

impl Action {
    fn done(self) -> &'static str {
        match self {
            Self::Requeue => "requeued",
            Self::Discard => "discarded",
        }
    }
}

/// Dead letters, newest first.
pub(super) async fn list(desk: &Desk, options: DeadList, output: &mut Output) -> Result<(), Failure> {
    if let Some(group) = &options.group {
        return parked(desk, group, options.page, output).await;
    }
    let mut page = page_request(options.page);
    page.newest_first = true;
    let view = desk.list(ListFilter::dead(options.topic, options.key), page).await?;
    output.answer(&view, |output| {
        if view.items.is_empty() && view.next.is_none() {
            return output.note("no dead letters");
        }
        output.table(
            ["message", "topic", "key", "type", "attempts", "written", "dead because", "last error"],
            view.items.iter().map(|item| {
                [
                    Cell::new(item.message_id),
                    Cell::new(&item.topic),
                    text(item.key.as_deref()),
                    text(item.kind.as_deref()),
                    Cell::new(item.attempts),
                    moment(Some(item.written_at)),
                    text(item.dead_reason.as_deref()),
                    text(item.last_error.as_deref()),
                ]
            }),
        )?;
        more(view.next.as_deref(), output)
    })
}

/// What a consumer group keeps in its inbox.
async fn parked(
    desk: &Desk,
    group: &str,
    page: super::arguments::Page,
    output: &mut Output,
) -> Result<(), Failure> {
    let view = desk.parked(group, page_request(page)).await?;
    output.answer(&view, |output| {
        if view.items.is_empty() && view.next.is_none() {
            return output.note(format!("nothing is kept in the inbox of {group}"));
        }
        output.table(
            ["message", "topic", "key", "type", "attempts", "dead", "next attempt", "last error"],
            view.items.iter().map(|item| {
                [
                    Cell::new(item.message_id),
                    Cell::new(&item.topic),
                    text(item.key.as_deref()),
                    text(item.kind.as_deref()),
                    Cell::new(item.attempts),
                    Cell::new(if item.dead { "yes" } else { "no" }),
                    moment(item.next_attempt_at),
                    text(Some(&item.last_error)),
                ]
            }),
        )?;
        more(view.next.as_deref(), output)
    })
}

/// A dead letter and how it came to that.
pub(super) async fn show(
    desk: &Desk,
    id: &str,
    group: Option<&str>,
    output: &mut Output,
) -> Result<(), Failure> {
    if let Some(group) = group {
        let found = find_parked(desk, group, id).await?;
        return output.answer(&found, |output| {
            output.pairs([
                ("message", Cell::new(found.message_id)),
                ("group", Cell::new(group)),
                ("topic", Cell::new(&found.topic)),
                ("key", text(found.key.as_deref())),
                ("type", text(found.kind.as_deref())),
                ("attempts", Cell::new(found.attempts)),
                ("dead", Cell::new(if found.dead { "yes" } else { "no" })),
                ("next attempt", moment(found.next_attempt_at)),
                ("last error", Cell::new(shown(&found.last_error, 500))),
                ("payload", Cell::new(shown(found.payload.get(), 2_000))),
            ])
        });
    }
    let view = desk.dead_show(id).await?;
    output.answer(&view, |output| {
        message(&view.message, output)?;
        if view.history.is_empty() {
            return Ok(());
        }
        output.line("")?;
        output.table(
            ["tried", "outcome", "error"],
            view.history.iter().map(|attempt| {
                [moment(Some(attempt.at)), Cell::new(&attempt.outcome), Cell::new(shown(&attempt.error, 200))]
            }),
        )
    })
}

async fn find_parked(desk: &Desk, group: &str, id: &str) -> Result<ParkedView, Failure> {
    let wanted = desk.parse_id(id)?;
    let mut page = PageRequest { limit: PageRequest::MOST, ..PageRequest::default() };
    loop {
        let view = desk.parked(group, page.clone()).await?;
        if let Some(found) = view.items.into_iter().find(|item| item.message_id == wanted) {
            return Ok(found);
        }
        match view.next {
            Some(next) => page.after = Some(next),
            None => {
                let text = format!("the inbox of {group} does not keep a message {wanted}");
                return Err(Failure::new(Exit::NotFound, text));
            }
        }
    }
}

/// Requeues or discards some by id, or all that fit.
pub(super) async fn mend(
    desk: &Desk,
    action: Action,
    which: Which,
    output: &mut Output,
) -> Result<(), Failure> {
    if which.ids.is_empty() {
        return mend_matching(desk, action, which, output).await;
    }
    let mut answers = Vec::new();
    // All ids are tried: the last failure is told, and what was done before it is told too.
    let mut failure = None;
    for id in &which.ids {
        let done = match (&which.group, which.dry_run) {
            (Some(group), true) => find_parked(desk, group, id).await.map(|_| None),
            (None, true) => desk.dead_show(id).await.map(|_| None).map_err(Failure::from),
            (Some(group), false) => match action {
                Action::Requeue => desk.unpark(group, id, ACTOR).await,
                Action::Discard => desk.drop_parked(group, id, ACTOR).await,
            }
            .map(Some)
            .map_err(Failure::from),
            (None, false) => match action {
                Action::Requeue => desk.requeue(id, which.yes, ACTOR).await,
                Action::Discard => desk.discard(id, ACTOR).await,
            }
            .map(Some)
            .map_err(Failure::from),
        };
        match done {
            Ok(Some(answer)) => answers.push(json!(answer)),
            Ok(None) => answers.push(json!({ "messageId": id, "action": "none", "dryRun": true })),
            Err(error) => {
                if let Some(earlier) = failure.replace(error) {
                    output.failure(&earlier);
                }
            }
        }
    }
    let count = answers.len();
    output.answer(&answers, |output| match (count, which.dry_run) {
        (0, _) => Ok(()),
        (_, true) => output.line(format!("{count} would be {}", action.done())),
        (_, false) => output.line(format!("{count} {}", action.done())),
    })?;
    failure.map_or(Ok(()), Err)
}

async fn mend_matching(
    desk: &Desk,
    action: Action,
    which: Which,
    output: &mut Output,
) -> Result<(), Failure> {
    let filter = ListFilter::dead(which.topic.clone(), which.key.clone());
    if action == Action::Discard && !which.dry_run && !which.yes && !confirmed(desk, &filter).await? {
        return Err(Failure::new(Exit::Refused, "nothing was discarded"));
    }
    let bar = progress_bar(output.is_json());
    if which.all {
        bar.set_length(desk.counts().await?.dead);
    }
    let advance = |progress: Progress| {
        bar.set_length(progress.matched.max(bar.length().unwrap_or_default()));
        bar.set_position(progress.done);
    };
    let answer = match action {
        Action::Requeue => desk.requeue_matching(filter, which.dry_run, which.yes, ACTOR, advance).await,
        Action::Discard => desk.discard_matching(filter, which.dry_run, ACTOR, advance).await,
    };
    bar.finish_and_clear();
    report(&answer?, action, output)
}

fn report(answer: &BulkAnswer, action: Action, output: &mut Output) -> Result<(), Failure> {
    output.answer(answer, |output| {
        if answer.dry_run {
            return output.line(format!("{} would be {}", answer.matched, action.done()));
        }
        output.line(format!("{} of {} {}", answer.done, answer.matched, action.done()))?;
        answer
            .refused
            .iter()
            .try_for_each(|refusal| output.note(format!("{}: {}", refusal.message_id, refusal.detail)))
    })?;
    if answer.refused.is_empty() {
        return Ok(());
    }
    let text = format!("{} were left as they are", answer.refused.len());
    Err(Failure::new(Exit::Refused, text))
}

/// Asks the person at the terminal; a script has said what it wants.
async fn confirmed(desk: &Desk, filter: &ListFilter) -> Result<bool, Failure> {
    if !(std::io::stdin().is_terminal() && std::io::stderr().is_terminal()) {
        return Ok(true);
    }
    let found = desk.discard_matching(filter.clone(), true, ACTOR, |_| {}).await?.matched;
    if found == 0 {
        return Ok(true);
    }
    let _ = write!(std::io::stderr(), "give up {found} dead letters for good? [y/N] ");
    let mut answer = String::new();
    std::io::stdin()
        .read_line(&mut answer)
        .map_err(|error| Failure::usage(format!("cannot read the answer: {error}")))?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}

fn progress_bar(json: bool) -> ProgressBar {
    let target = if json { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
    let style = ProgressStyle::with_template("{wide_bar} {pos}/{len}  {rate}  {eta} left")
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        // The library's own rate has four decimals.
        .with_key("rate", |state: &ProgressState, out: &mut dyn std::fmt::Write| {
            let _ = write!(out, "{:.0}/s", state.per_sec());
        });
    ProgressBar::with_draw_target(Some(0), target).with_style(style)
}
