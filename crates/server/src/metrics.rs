//! Metrics in the Prometheus text format, from counts that the store keeps as they change.

use std::fmt::Write as _;

use admin::{CountsView, InboxCountsView, LatencyView};
use axum::http::header;
use axum::response::{IntoResponse, Response};

use crate::health::Overdue;

/// The outbox.
pub(crate) fn outbox(counts: &CountsView, lost: &[(String, u64)], overdue: &[Overdue]) -> String {
    let mut text = String::with_capacity(4096);
    let gauge = "gauge";
    let counter = "counter";
    one(
        &mut text,
        "outbox_pending_count",
        gauge,
        "Messages that wait to be sent: Pending and Failed, not InFlight.",
        counts.pending + counts.failed,
    );
    one(
        &mut text,
        "outbox_oldest_age",
        gauge,
        "Age in seconds of the oldest message that is not sent; 0 when there is none.",
        counts.oldest_age.unwrap_or(0.0),
    );
    one(
        &mut text,
        "outbox_publish_success_total",
        counter,
        "Messages that a broker has confirmed.",
        counts.publish_success_total,
    );
    one(
        &mut text,
        "outbox_publish_failure_total",
        counter,
        "Tries to publish in vain, probes of a closed-off destination included.",
        counts.publish_failure_total,
    );
    one(&mut text, "outbox_dead_total", counter, "Messages that became Dead.", counts.dead_total);
    head(&mut text, "outbox_lost_total", counter, "Messages lost on routes that send at most once.");
    for (route, messages) in lost {
        // A route is named by whoever writes the configuration.
        let route = route.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
        line(&mut text, format_args!("outbox_lost_total{{route=\"{route}\"}} {messages}"));
    }
    type Read = fn(&Overdue) -> u64;
    let families: [(&str, &str, &str, Read); 3] = [
        ("outbox_overdue", gauge, "Messages that a group has not acknowledged in time.", |one| one.overdue),
        (
            "outbox_unprocessed",
            gauge,
            "Messages that a group has not acknowledged though they were sent again as often as they may be.",
            |one| one.given_up,
        ),
        (
            "outbox_redelivered_total",
            counter,
            "Messages sent again because a group did not acknowledge them in time.",
            |one| one.redelivered,
        ),
    ];
    for (name, kind, help, read) in families {
        head(&mut text, name, kind, help);
        for one in overdue {
            line(&mut text, format_args!("{name}{{group=\"{}\"}} {}", one.group, read(one)));
        }
    }
    histogram(
        &mut text,
        "outbox_write_to_sent_seconds",
        "Time from writing a message to its confirmation by the broker.",
        &counts.write_to_sent,
    );
    histogram(
        &mut text,
        "outbox_sent_to_acknowledged_seconds",
        "Time from the confirmation of a message to its acknowledgement by a consumer group.",
        &counts.sent_to_acknowledged,
    );
    text
}

/// The inboxes of the consumer groups.
pub(crate) fn inbox(groups: &[(String, InboxCountsView)], lost: &[(String, u64)]) -> String {
    type Read = fn(&InboxCountsView) -> u64;
    let families: [(&str, &str, &str, Read); 4] = [
        ("inbox_processed_total", "counter", "Messages whose work is done.", |counts| counts.processed),
        ("inbox_duplicates_total", "counter", "Arrivals recognised as done before.", |counts| {
            counts.duplicates
        }),
        ("inbox_parked", "gauge", "Messages kept in the inbox for a later try.", |counts| counts.parked),
        ("inbox_dead", "gauge", "Messages kept in the inbox for a person.", |counts| counts.dead),
    ];
    let mut text = String::with_capacity(1024);
    for (name, kind, help, read) in families {
        head(&mut text, name, kind, help);
        for (group, counts) in groups {
            // Group names are letters, digits, dots, dashes and underscores: nothing to escape.
            line(&mut text, format_args!("{name}{{group=\"{group}\"}} {}", read(counts)));
        }
    }
    let name = "inbox_lost_total";
    head(&mut text, name, "counter", "Messages lost by groups that handle them at most once.");
    for (group, messages) in lost {
        line(&mut text, format_args!("{name}{{group=\"{group}\"}} {messages}"));
    }
    text
}

/// The answer to a scrape.
pub(crate) fn answer(text: String) -> Response {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}

fn one(text: &mut String, name: &str, kind: &str, help: &str, value: impl std::fmt::Display) {
    head(text, name, kind, help);
    line(text, format_args!("{name} {value}"));
}

fn histogram(text: &mut String, name: &str, help: &str, latency: &LatencyView) {
    head(text, name, "histogram", help);
    let mut below = 0;
    for (bound, count) in latency.bounds.iter().zip(&latency.counts) {
        below += count;
        line(text, format_args!("{name}_bucket{{le=\"{bound}\"}} {below}"));
    }
    let all: u64 = latency.counts.iter().sum();
    line(text, format_args!("{name}_bucket{{le=\"+Inf\"}} {all}"));
    line(text, format_args!("{name}_sum {}", latency.sum));
    line(text, format_args!("{name}_count {all}"));
}

fn head(text: &mut String, name: &str, kind: &str, help: &str) {
    line(text, format_args!("# HELP {name} {help}"));
    line(text, format_args!("# TYPE {name} {kind}"));
}

fn line(text: &mut String, content: std::fmt::Arguments<'_>) {
    writeln!(text, "{content}").expect("writing to a string cannot fail");
}
