//! Metrics in the Prometheus text format, from counts that the store keeps as they change.

use std::fmt::Write as _;

use admin::{CountsView, InboxCountsView, LatencyView};
use axum::http::header;
use axum::response::{IntoResponse, Response};

use crate::health::{FlowView, Overdue, TransactionsView};

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
        let route = escaped(route);
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

/// Transactions of routes that send exactly once.
pub(crate) fn transactions(brokers: &[TransactionsView]) -> String {
    let (mut text, name) = (String::new(), "outbox_transactions_total");
    head(&mut text, name, "counter", "Transactions into a broker, by how they ended.");
    for TransactionsView { broker, committed, rolled_back, .. } in brokers {
        let broker = escaped(broker);
        line(&mut text, format_args!("{name}{{broker=\"{broker}\",end=\"committed\"}} {committed}"));
        line(&mut text, format_args!("{name}{{broker=\"{broker}\",end=\"rolled_back\"}} {rolled_back}"));
    }
    let name = "outbox_transaction_seconds";
    head(&mut text, name, "histogram", "Time that a transaction into a broker takes, however it ends.");
    for TransactionsView { broker, took, .. } in brokers {
        series(&mut text, name, &format!("broker=\"{}\"", escaped(broker)), took);
    }
    text
}

/// The inboxes of the consumer groups.
pub(crate) fn inbox(
    groups: &[(String, InboxCountsView)],
    lost: &[(String, u64)],
    deduplication: &[(String, &str, LatencyView)],
) -> String {
    type Read = fn(&InboxCountsView) -> Option<u64>;
    let (gauge, counter) = ("gauge", "counter");
    let families: [(&str, &str, &str, Read); 6] = [
        ("inbox_processed_total", counter, "Messages whose work is done.", |counts| Some(counts.processed)),
        ("inbox_duplicates_total", counter, "Arrivals recognised as done before.", |counts| {
            Some(counts.duplicates)
        }),
        ("inbox_parked", gauge, "Messages kept in the inbox for a later try.", |counts| Some(counts.parked)),
        ("inbox_dead", gauge, "Messages kept in the inbox for a person.", |counts| Some(counts.dead)),
        ("inbox_ids", gauge, "Ids kept to recognise duplicates.", |counts| Some(counts.ids)),
        (
            "inbox_ids_bytes",
            gauge,
            "Space that the ids take with their indexes, estimated; absent when the server does not say.",
            |counts| counts.id_bytes,
        ),
    ];
    let mut text = String::with_capacity(1024);
    for (name, kind, help, read) in families {
        head(&mut text, name, kind, help);
        for (group, counts) in groups {
            // Group names are letters, digits, dots, dashes and underscores: nothing to escape.
            if let Some(value) = read(counts) {
                line(&mut text, format_args!("{name}{{group=\"{group}\"}} {value}"));
            }
        }
    }
    let name = "inbox_lost_total";
    head(
        &mut text,
        name,
        "counter",
        "Messages lost by groups that handle them at most once or remember nothing.",
    );
    for (group, messages) in lost {
        line(&mut text, format_args!("{name}{{group=\"{group}\"}} {messages}"));
    }
    let name = "inbox_deduplication_seconds";
    let help = "Time that the inbox takes with a batch: to tell what is new (reserve) and to mark what is done (conclude), or \
                both and the handler's work in one transaction (process).";
    head(&mut text, name, "histogram", help);
    for (group, step, latency) in deduplication {
        series(&mut text, name, &format!("group=\"{group}\",step=\"{step}\""), latency);
    }
    text
}

/// What groups whose work is messages gave up: it is in the broker and not in an inbox.
pub(crate) fn dead_letters(groups: &[(String, u64)]) -> String {
    let mut text = String::new();
    let name = "inbox_dead_letters_total";
    head(&mut text, name, "counter", "Messages that a group which promises exactly-once gave up.");
    for (group, messages) in groups {
        line(&mut text, format_args!("{name}{{group=\"{group}\"}} {messages}"));
    }
    text
}

/// The flows of routes: into their brokers, or through a group.
pub(crate) fn flows(flows: &[FlowView]) -> String {
    type Read = fn(&FlowView) -> Option<f64>;
    let (gauge, counter) = ("gauge", "counter");
    let families: [(&str, &str, &str, Read); 4] = [
        ("route_total", counter, "Messages of a route that a broker took, or a group has done.", |flow| {
            Some(flow.total as f64)
        }),
        ("route_flow", gauge, "Messages of a route a minute, in the window that is watched.", |flow| {
            flow.now
        }),
        (
            "route_flow_usual",
            gauge,
            "Messages of a route a minute, usually; absent until that is known.",
            |flow| flow.usual,
        ),
        ("route_flow_dropped", gauge, "1 while the flow is suddenly less than usual.", |flow| {
            flow.dropped.map(|dropped| f64::from(u8::from(dropped)))
        }),
    ];
    let mut text = String::new();
    for (name, kind, help, read) in families {
        for (stage, of_group) in [("outbox", false), ("inbox", true)] {
            let mut flows = flows.iter().filter(|flow| flow.group.is_some() == of_group).peekable();
            if flows.peek().is_some() {
                head(&mut text, &format!("{stage}_{name}"), kind, help);
            }
            for flow in flows {
                let Some(value) = read(flow) else { continue };
                let group = flow.group.iter().map(|group| format!("group=\"{group}\",")).collect::<String>();
                let route = escaped(&flow.route);
                line(&mut text, format_args!("{stage}_{name}{{{group}route=\"{route}\"}} {value}"));
            }
        }
    }
    text
}

/// A route is named by whoever writes the configuration.
fn escaped(route: &str) -> String {
    route.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
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
    series(text, name, "", latency);
}

/// A histogram of one set of labels.
fn series(text: &mut String, name: &str, labels: &str, latency: &LatencyView) {
    let (joint, all) = match labels {
        "" => (String::new(), String::new()),
        labels => (format!("{labels},"), format!("{{{labels}}}")),
    };
    let mut below = 0;
    for (bound, count) in latency.bounds.iter().zip(&latency.counts) {
        below += count;
        line(text, format_args!("{name}_bucket{{{joint}le=\"{bound}\"}} {below}"));
    }
    let count: u64 = latency.counts.iter().sum();
    line(text, format_args!("{name}_bucket{{{joint}le=\"+Inf\"}} {count}"));
    line(text, format_args!("{name}_sum{all} {}", latency.sum));
    line(text, format_args!("{name}_count{all} {count}"));
}

fn head(text: &mut String, name: &str, kind: &str, help: &str) {
    line(text, format_args!("# HELP {name} {help}"));
    line(text, format_args!("# TYPE {name} {kind}"));
}

fn line(text: &mut String, content: std::fmt::Arguments<'_>) {
    writeln!(text, "{content}").expect("writing to a string cannot fail");
}
