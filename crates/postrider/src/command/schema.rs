//! `migrate` and `schema`: the shape of the store.

use comfy_table::Cell;
use serde_json::json;

use super::backend;
use super::failure::Failure;
use super::output::Output;
use crate::config::Config;

/// Brings the schema up to date, or says what that would do.
pub(super) async fn migrate(config: &Config, dry_run: bool, output: &mut Output) -> Result<(), Failure> {
    let steps = backend::pending(config).await?;
    if !dry_run && !steps.is_empty() {
        backend::open(config).await?;
    }
    let named: Vec<_> =
        steps.iter().map(|step| json!({ "version": step.version, "name": step.name })).collect();
    let store = backend::name(config);
    output.answer(&json!({ "store": store, "dryRun": dry_run, "steps": named }), |output| {
        if steps.is_empty() {
            return output.line(format!("{store} is up to date"));
        }
        let verb = if dry_run { "would apply" } else { "applied" };
        steps.iter().try_for_each(|step| output.line(format!("{verb} {}: {}", step.version, step.name)))
    })
}

/// Which steps the store has seen.
pub(super) async fn state(config: &Config, output: &mut Output) -> Result<(), Failure> {
    let waiting: Vec<u32> = backend::pending(config).await?.into_iter().map(|step| step.version).collect();
    let applied = |version: &u32| !waiting.contains(version);
    let steps = backend::steps(config)?;
    let rows: Vec<_> = steps
        .iter()
        .map(|step| json!({ "version": step.version, "name": step.name, "applied": applied(&step.version) }))
        .collect();
    let store = backend::name(config);
    output.answer(&json!({ "store": store, "steps": rows }), |output| {
        output.line(&store)?;
        let rows = steps.iter().map(|step| {
            let applied = if applied(&step.version) { "yes" } else { "no: run `postrider migrate`" };
            [Cell::new(step.version), Cell::new(step.name), Cell::new(applied)]
        });
        output.table(["version", "name", "applied"], rows)
    })
}

/// The whole schema of the configured store as SQL.
pub(super) fn print(config: &Config, output: &mut Output) -> Result<(), Failure> {
    let sql = backend::schema(&config.store.place)?;
    output.answer(&json!({ "sql": sql }), |output| output.raw(sql.as_bytes()))
}
