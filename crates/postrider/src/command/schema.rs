//! `migrate` and `schema`: the shape of the store.

use comfy_table::Cell;
use serde_json::json;
use store::sqlite::MIGRATIONS;

use super::failure::{Exit, Failure};
use super::output::Output;
use super::world;
use crate::config::Config;

/// Brings the schema up to date, or says what that would do.
pub(super) fn migrate(config: &Config, dry_run: bool, output: &mut Output) -> Result<(), Failure> {
    let steps = pending(config)?;
    if !dry_run && !steps.is_empty() {
        world::open_store(config)?;
    }
    let named: Vec<_> =
        steps.iter().map(|(version, name)| json!({ "version": version, "name": name })).collect();
    let path = config.store.path.display().to_string();
    output.answer(&json!({ "store": path, "dryRun": dry_run, "steps": named }), |output| {
        if steps.is_empty() {
            return output.line(format!("{path} is up to date"));
        }
        let verb = if dry_run { "would apply" } else { "applied" };
        steps.iter().try_for_each(|(version, name)| output.line(format!("{verb} {version}: {name}")))
    })
}

/// Which steps the store has seen.
pub(super) fn state(config: &Config, output: &mut Output) -> Result<(), Failure> {
    let waiting: Vec<u32> = pending(config)?.into_iter().map(|(version, _)| version).collect();
    let applied = |version: &u32| !waiting.contains(version);
    let rows: Vec<_> = MIGRATIONS
        .iter()
        .map(|step| json!({ "version": step.version, "name": step.name, "applied": applied(&step.version) }))
        .collect();
    let path = config.store.path.display().to_string();
    output.answer(&json!({ "store": path, "steps": rows }), |output| {
        output.line(&path)?;
        let rows = MIGRATIONS.iter().map(|step| {
            let applied = if applied(&step.version) { "yes" } else { "no: run `postrider migrate`" };
            [Cell::new(step.version), Cell::new(step.name), Cell::new(applied)]
        });
        output.table(["version", "name", "applied"], rows)
    })
}

/// The whole schema as SQL.
pub(super) fn print(output: &mut Output) -> Result<(), Failure> {
    let sql = store::sqlite::schema();
    output.answer(&json!({ "sql": sql }), |output| output.raw(sql.as_bytes()))
}

/// The steps that are still to be taken.
fn pending(config: &Config) -> Result<Vec<(u32, &'static str)>, Failure> {
    let steps = store::sqlite::pending(&config.store.path)
        .map_err(|error| Failure::new(Exit::Unavailable, error.to_string()))?;
    Ok(steps.into_iter().map(|step| (step.version, step.name)).collect())
}
