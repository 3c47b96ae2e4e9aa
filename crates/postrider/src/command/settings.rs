//! `config check`, `config show` and `routes`: what Postrider was told.

use comfy_table::Cell;
use serde_json::json;

use super::failure::Failure;
use super::output::{Output, text};
use super::{fit, world};
use crate::config::{self, Config, Loaded};

/// Says that the settings are good, where they came from, and what may surprise.
pub(super) fn check(loaded: &Loaded, output: &mut Output) -> Result<(), Failure> {
    fit::check(&loaded.config)?;
    let file = loaded.file.as_ref().map(|file| file.display().to_string());
    let warnings: Vec<String> = loaded.warnings.iter().map(ToString::to_string).collect();
    let value = json!({ "ok": true, "file": file, "variables": loaded.variables, "warnings": warnings });
    output.answer(&value, |output| {
        let source = file.as_deref().unwrap_or("built-in settings");
        output.line(format!("{source}: good"))?;
        if !loaded.variables.is_empty() {
            output.line(format!("  with {}", loaded.variables.join(", ")))?;
        }
        warnings.iter().try_for_each(|warning| output.line(format!("warning: {warning}")))
    })
}

/// Prints the settings in force.
pub(super) fn show(loaded: &Loaded, output: &mut Output) -> Result<(), Failure> {
    let text = loaded.config.to_toml();
    let value: serde_json::Value = toml::from_str::<toml::Table>(&text)
        .map(|table| json!(table))
        .map_err(|error| Failure::usage(format!("the settings cannot be shown: {error}")))?;
    output.answer(&value, |output| output.raw(text.as_bytes()))
}

/// Which topics go where, and who listens.
pub(super) fn routes(config: &Config, output: &mut Output) -> Result<(), Failure> {
    let topology = world::topology(config);
    let value = json!({ "routes": topology.routes, "consumers": topology.consumers });
    output.answer(&value, |output| {
        let heading =
            ["route", "topics", "broker", "semantics", "order", "on dead", "attempts", "gives up", "why"];
        output.table(
            heading,
            config.routes.iter().map(|(name, route)| {
                let topics: Vec<&str> = route.topics.iter().map(|topic| topic.as_str()).collect();
                [
                    Cell::new(name),
                    Cell::new(topics.join(" ")),
                    Cell::new(&route.broker),
                    Cell::new(route.semantics),
                    Cell::new(config::order(route.order)),
                    Cell::new(config::on_dead(route.on_dead)),
                    Cell::new(route.retry.max_attempts),
                    Cell::new(config::duration_text(route.retry.give_up_after)),
                    text(route.why.as_deref()),
                ]
            }),
        )?;
        if config.consumers.is_empty() {
            return Ok(());
        }
        output.line("")?;
        output.table(
            ["group", "topics", "broker", "handler", "dedup", "keeps ids"],
            config.consumers.iter().map(|(name, consumer)| {
                [
                    Cell::new(name),
                    Cell::new(consumer.topics.join(" ")),
                    Cell::new(&consumer.broker),
                    Cell::new(consumer.handler.kind()),
                    Cell::new(consumer.dedup.word()),
                    Cell::new(config::duration_text(consumer.keep_ids)),
                ]
            }),
        )
    })
}
