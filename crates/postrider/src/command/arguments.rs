//! The words of the command line.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use message::Status;

use super::failure::Failure;
use super::output::Output;
use crate::config::parse_listen;

const AFTER: &str = "\
Without a command, `serve`.

Settings come from --config, else $POSTRIDER_CONFIG, else ./postrider.toml,
else are built in. Any can be given as POSTRIDER__SECTION__SETTING=value.

Exit codes:
  0  done
  1  something unexpected
  2  the command line or the settings are wrong
  3  there is no such thing
  4  refused: not in the state things are in
  5  the store or the server cannot be used";

/// Carries messages from the database where they were written to everyone who must hear of them.
#[derive(Debug, Parser)]
#[command(name = "postrider", version, after_help = AFTER, disable_help_subcommand = true)]
pub(super) struct Arguments {
    #[command(flatten)]
    pub(super) global: Global,
    #[command(subcommand)]
    pub(super) command: Option<Command>,
}

/// What every command takes.
#[derive(Debug, Args)]
pub(super) struct Global {
    /// The file with the settings
    #[arg(long, short, global = true, value_name = "FILE", env = "POSTRIDER_CONFIG", hide_env_values = true)]
    pub(super) config: Option<PathBuf>,
    /// Answer in JSON, for scripts
    #[arg(long, global = true)]
    pub(super) json: bool,
    /// Log more; twice for everything
    #[arg(long, short, global = true, action = clap::ArgAction::Count, conflicts_with = "quiet")]
    pub(super) verbose: u8,
    /// Log errors only
    #[arg(long, short, global = true)]
    pub(super) quiet: bool,
}

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Run the producer's API, the relay and the consumers, or some of them
    Serve(Serve),
    /// Write a message to the outbox
    Send(Send),
    /// Show how everything is, or one message
    Status {
        /// A message; all of them together when left out
        id: Option<String>,
    },
    /// List messages, newest first
    List(List),
    /// Look at dead letters and mend them
    Dead {
        #[command(subcommand)]
        command: Dead,
    },
    /// Show the lanes and who works on them
    Lanes {
        #[command(subcommand)]
        command: Option<Lanes>,
    },
    /// Bring the store's schema up to date
    Migrate {
        /// Say what would be done and do nothing
        #[arg(long)]
        dry_run: bool,
    },
    /// Show which version of the schema the store has
    Schema {
        /// Print the whole schema as SQL instead
        #[arg(long)]
        print: bool,
    },
    /// Check or show the settings
    Config {
        #[command(subcommand)]
        command: ConfigCommand,
    },
    /// Show which topics go where, and who listens
    Routes,
    /// Show what is promised for each route and group, by what, and what can still happen
    Contract {
        /// As Markdown, to be kept beside the code
        #[arg(long, conflicts_with = "json")]
        markdown: bool,
    },
    /// Help to choose what a route should promise: questions, and a route to put into the settings
    Advise(Advise),
    /// Connect to the store and the brokers, and report what is unsafe or missing there, with the fix
    Doctor,
    /// Compare the outbox, the brokers and the inboxes message by message: what is missing, extra, duplicate or late
    Reconcile(Reconcile),
    /// Print completions for a shell
    Completions {
        /// Which shell
        shell: clap_complete::Shell,
    },
}

/// Answers to the questions of `advise`; the others are asked.
#[derive(Debug, Default, Args)]
pub(super) struct Advise {
    /// May a message be lost?
    #[arg(long, value_name = "yes|no", value_parser = parse_answer)]
    pub(super) lost: Option<bool>,
    /// Would a second arrival be worse than none? (Where it may be lost)
    #[arg(long, value_name = "yes|no", value_parser = parse_answer)]
    pub(super) once: Option<bool>,
    /// Does it matter how many are lost? (Where it may be lost)
    #[arg(long, value_name = "yes|no", value_parser = parse_answer)]
    pub(super) matters: Option<bool>,
    /// May its work be done twice? (Where it must not be lost)
    #[arg(long, value_name = "yes|no", value_parser = parse_answer)]
    pub(super) twice: Option<bool>,
    /// Is its work only to read from Kafka and write to Kafka? (Where it must not be done twice)
    #[arg(long, value_name = "yes|no", value_parser = parse_answer)]
    pub(super) kafka: Option<bool>,
    /// Can its work share a transaction with a mark, or recognise that it was done? (Where it must not be done twice)
    #[arg(long, value_name = "yes|no", value_parser = parse_answer)]
    pub(super) idempotent: Option<bool>,
    /// The topic of the route
    #[arg(long, default_value = "order-events", value_parser = parse_topic)]
    pub(super) topic: String,
}

fn parse_topic(text: &str) -> Result<String, message::Invalid> {
    message::check_topic(text).map(|()| text.to_owned())
}

pub(super) fn parse_answer(text: &str) -> Result<bool, String> {
    match text.to_ascii_lowercase().as_str() {
        "yes" | "y" => Ok(true),
        "no" | "n" => Ok(false),
        _ => Err("answer yes or no".to_owned()),
    }
}

/// What `serve` runs.
#[derive(Debug, Default, Args)]
pub(super) struct Serve {
    /// Run only these parts, separated by commas
    #[arg(long, value_delimiter = ',', value_name = "PARTS")]
    pub(super) only: Vec<Part>,
    /// Where the producer's API listens, instead of producer.listen
    #[arg(long, value_name = "ADDRESS", value_parser = parse_listen)]
    pub(super) listen_producer: Option<SocketAddr>,
    /// Where the consumer's API listens, instead of consumer.listen
    #[arg(long, value_name = "ADDRESS", value_parser = parse_listen)]
    pub(super) listen_consumer: Option<SocketAddr>,
}

/// A part of the whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Part {
    /// The producer's API
    Producer,
    /// The relay
    Relay,
    /// The consumer groups and their API
    Consumer,
}

/// What `reconcile` compares. It exits with 1 when something is missing, extra or duplicate.
#[derive(Debug, Args)]
pub(super) struct Reconcile {
    /// What was written since then: a time such as 2026-05-01T08:00:00Z, or how long ago, such as 2h
    #[arg(long, default_value = "1d", value_name = "TIME", value_parser = parse_moment)]
    pub(super) since: Moment,
    /// And before then; when left out, so long ago as --patience says: what is still on its way is not judged
    #[arg(long, value_name = "TIME", value_parser = parse_moment)]
    pub(super) until: Option<Moment>,
    /// Only of this topic
    #[arg(long)]
    pub(super) topic: Option<String>,
    /// How long a group may take before a message counts as straggling
    #[arg(long, default_value = "1m", value_name = "DURATION", value_parser = humantime::parse_duration)]
    pub(super) patience: Duration,
    /// How many messages of each kind to name
    #[arg(long, default_value_t = 20, value_name = "N")]
    pub(super) show: usize,
}

/// A moment, said as a time or as how long ago it was.
#[derive(Clone, Copy, Debug)]
pub(super) enum Moment {
    At(DateTime<Utc>),
    Ago(Duration),
}

impl Moment {
    /// Not before 1970, which some brokers know nothing of.
    pub(super) fn from(self, now: DateTime<Utc>) -> DateTime<Utc> {
        let time = match self {
            Self::At(time) => Some(time),
            Self::Ago(age) => TimeDelta::from_std(age).ok().and_then(|age| now.checked_sub_signed(age)),
        };
        time.unwrap_or_default().max(DateTime::UNIX_EPOCH)
    }
}

fn parse_moment(text: &str) -> Result<Moment, String> {
    if let Ok(time) = DateTime::parse_from_rfc3339(text) {
        return Ok(Moment::At(time.to_utc()));
    }
    let wrong = |_| "use a time such as 2026-05-01T08:00:00Z, or how long ago, such as 2h or 30m".to_owned();
    humantime::parse_duration(text).map(Moment::Ago).map_err(wrong)
}

#[derive(Debug, Args)]
pub(super) struct Send {
    /// Where it goes
    pub(super) topic: String,
    /// The message: JSON, or else a text; `@file` reads a file and `-` the standard input
    #[arg(allow_hyphen_values = true)]
    pub(super) message: String,
    /// Take the message as a text even if it is JSON
    #[arg(long)]
    pub(super) text: bool,
    /// What happened, such as OrderPlaced
    #[arg(long = "type", value_name = "TYPE")]
    pub(super) kind: Option<String>,
    /// Messages of one topic and key arrive in order
    #[arg(long)]
    pub(super) key: Option<String>,
    /// A header; may be repeated
    #[arg(long = "header", value_name = "NAME=VALUE", value_parser = parse_header)]
    pub(super) headers: Vec<(String, String)>,
    /// The id of the message, a UUID; a fresh one when left out
    #[arg(long, value_name = "UUID")]
    pub(super) id: Option<String>,
    /// Make the id from the message: `content`, or fields such as `orderId,payment.attempt`
    #[arg(long, value_name = "content|FIELDS", conflicts_with = "id")]
    pub(super) id_from: Option<String>,
    /// The group that must acknowledge it; every group of the topic when left out
    #[arg(long)]
    pub(super) group: Option<String>,
    /// Send it when so much time has passed, such as 10m, and not before
    #[arg(long, value_name = "DURATION")]
    pub(super) deliver_after: Option<String>,
    /// Do not send it any more when so much time has passed: it is Dead then
    #[arg(long, value_name = "DURATION")]
    pub(super) expires_after: Option<String>,
    /// Write it once, however often this command is repeated with the same key
    #[arg(long, value_name = "KEY")]
    pub(super) idempotency_key: Option<String>,
}

#[derive(Debug, Args)]
pub(super) struct List {
    /// Only these; may be repeated
    #[arg(long = "status", value_delimiter = ',', value_name = "STATUS")]
    pub(super) statuses: Vec<Status>,
    /// Only of this topic
    #[arg(long)]
    pub(super) topic: Option<String>,
    /// Only of this key
    #[arg(long)]
    pub(super) key: Option<String>,
    /// Only what this group must acknowledge
    #[arg(long)]
    pub(super) group: Option<String>,
    /// Only what is sent and this group has not acknowledged
    #[arg(long, value_name = "GROUP")]
    pub(super) unacknowledged_by: Option<String>,
    /// From the oldest to the newest
    #[arg(long)]
    pub(super) oldest_first: bool,
    #[command(flatten)]
    pub(super) page: Page,
}

#[derive(Clone, Debug, Args)]
pub(super) struct Page {
    /// How many at most
    #[arg(long, default_value_t = 100, value_name = "N")]
    pub(super) limit: usize,
    /// Go on after this place, which the page before named
    #[arg(long, value_name = "PLACE")]
    pub(super) after: Option<String>,
}

#[derive(Debug, Subcommand)]
pub(super) enum Dead {
    /// List dead letters, newest first
    List(DeadList),
    /// Show a dead letter and how it came to that
    Show {
        /// Which message
        id: String,
        /// Look in the inbox of this consumer group instead of the outbox
        #[arg(long, value_name = "GROUP")]
        group: Option<String>,
    },
    /// Send dead letters again
    Requeue(Which),
    /// Mend a dead letter and send it again
    Edit(Edit),
    /// Give up dead letters; the audit keeps a record
    Discard(Which),
}

#[derive(Debug, Args)]
pub(super) struct DeadList {
    /// Only of this topic
    #[arg(long)]
    pub(super) topic: Option<String>,
    /// Only of this key
    #[arg(long)]
    pub(super) key: Option<String>,
    /// What is kept in the inbox of this consumer group instead of in the outbox
    #[arg(long, value_name = "GROUP")]
    pub(super) group: Option<String>,
    #[command(flatten)]
    pub(super) page: Page,
}

/// Some dead letters by id, or many at once.
#[derive(Debug, Args)]
pub(super) struct Which {
    /// Which messages
    #[arg(required_unless_present_any = ["all", "topic", "key"], conflicts_with_all = ["all", "topic", "key"])]
    pub(super) ids: Vec<String>,
    /// All dead letters
    #[arg(long, conflicts_with_all = ["topic", "key"])]
    pub(super) all: bool,
    /// All of this topic
    #[arg(long)]
    pub(super) topic: Option<String>,
    /// All of this key
    #[arg(long)]
    pub(super) key: Option<String>,
    /// In the inbox of this consumer group instead of in the outbox
    #[arg(long, value_name = "GROUP", conflicts_with_all = ["all", "topic", "key"])]
    pub(super) group: Option<String>,
    /// Say what would be done and do nothing
    #[arg(long)]
    pub(super) dry_run: bool,
    /// Do not ask before many are given up, nor before one is sent again that is older than its consumers remember
    #[arg(long, short)]
    pub(super) yes: bool,
}

#[derive(Debug, Args)]
pub(super) struct Edit {
    /// Which message
    pub(super) id: String,
    /// The new payload; `@file` reads a file and `-` the standard input. Without any of these options, $EDITOR opens
    #[arg(long, allow_hyphen_values = true)]
    pub(super) payload: Option<String>,
    /// The new media type
    #[arg(long, value_name = "TYPE")]
    pub(super) content_type: Option<String>,
    /// A header; may be repeated. Those given replace all that the message has
    #[arg(long = "header", value_name = "NAME=VALUE", value_parser = parse_header)]
    pub(super) headers: Vec<(String, String)>,
}

#[derive(Debug, Subcommand)]
pub(super) enum Lanes {
    /// Change how many lanes there are; running relays drain first
    Set {
        /// A power of two, 1024 at most
        count: u16,
    },
}

#[derive(Debug, Subcommand)]
pub(super) enum ConfigCommand {
    /// Say whether the settings are good
    Check,
    /// Print the settings in force, secrets left out
    Show,
}

fn parse_header(text: &str) -> Result<(String, String), String> {
    text.split_once('=')
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .ok_or_else(|| "write a header as name=value".to_owned())
}

/// Prints the completions of `shell`.
pub(super) fn completions(shell: clap_complete::Shell, output: &mut Output) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Arguments::command(), "postrider", &mut script);
    output.raw(&script)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_are_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn a_moment_is_a_time_or_how_long_ago_it_was() {
        let now = DateTime::from_timestamp(10_000, 0).expect("a time");
        let read = |text| parse_moment(text).map(|moment| moment.from(now).timestamp());
        assert_eq!(read("1h"), Ok(6_400));
        assert_eq!(read("1970-01-01T01:00:00+01:00"), Ok(0));
        assert_eq!(read("200years"), Ok(0));
        assert!(read("yesterday").expect_err("nobody knows when").contains("2h"));
    }
}
