//! The log: to standard error, for people or as JSON.

use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt;

use super::Global;
use super::failure::{Exit, Failure};
use crate::config::{Log, LogFormat};

/// Starts the log. `RUST_LOG` decides over `-v` and `-q`, and those over the settings.
pub(super) fn start(log: &Log, global: &Global, serving: bool) -> Result<(), Failure> {
    let level = match (global.quiet, global.verbose) {
        (true, _) => "error",
        // The libraries below us have much to say at these levels, and nothing about messages.
        (_, 1) => {
            "info,postrider=debug,admin=debug,server=debug,relay=debug,inbox=debug,broker=debug,store=debug,sqlite=debug"
        }
        (_, 2..) => "trace",
        // A command that answers and ends should not talk about how.
        _ if !serving => "warn",
        _ => &log.level,
    };
    let filter = match std::env::var("RUST_LOG") {
        Ok(filter) if !filter.is_empty() => EnvFilter::try_new(&filter).map_err(|error| {
            Failure::usage(format!("RUST_LOG is `{filter}`, which is no filter: {error}"))
        })?,
        _ => EnvFilter::try_new(level).map_err(|error| {
            Failure::usage(format!("log.level is `{level}`, which is no filter: {error}"))
        })?,
    };
    let colour = std::io::IsTerminal::is_terminal(&std::io::stderr())
        && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let builder = fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match log.format {
        LogFormat::Text => builder.with_ansi(colour).try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    }
    .map_err(|error| Failure::new(Exit::Unexpected, format!("cannot start the log: {error}")))
}
