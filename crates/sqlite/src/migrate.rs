//! Versioned schema changes, each applied once, in order, in a transaction of its own.
//!
//! Applied versions are kept in a table of ours rather than in `user_version`, because the file may be
//! the application's own and that number may be in use.

use rusqlite::{Connection, OptionalExtension, TransactionBehavior};

use crate::Error;

/// One step of a schema.
#[derive(Clone, Copy, Debug)]
pub struct Migration {
    /// Counted from 1 without gaps.
    pub version: u32,
    /// What it does, in a few words.
    pub name: &'static str,
    /// The statements.
    pub sql: &'static str,
}

/// Applies the migrations that `connection` has not seen yet and returns them. Safe to run from several
/// processes at once: the lock is taken before looking.
///
/// # Errors
/// When a statement fails, or the file is from a newer program.
pub fn migrate(
    connection: &mut Connection,
    table: &'static str,
    migrations: &[Migration],
) -> Result<Vec<Migration>, Error> {
    let missing = pending(connection, table, migrations)?;
    if missing.is_empty() {
        return Ok(missing);
    }
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    transaction.execute_batch(&format!(
        "CREATE TABLE IF NOT EXISTS {table} (
             version INTEGER PRIMARY KEY,
             name TEXT NOT NULL,
             applied_at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ', 'now'))
         ) STRICT"
    ))?;
    // Looked at again under the lock: another process may have been faster.
    let missing = pending(&transaction, table, migrations)?;
    for migration in &missing {
        transaction.execute_batch(migration.sql)?;
        transaction.execute(
            &format!("INSERT INTO {table} (version, name) VALUES (?1, ?2)"),
            (migration.version, migration.name),
        )?;
    }
    transaction.commit()?;
    Ok(missing)
}

/// The migrations that `connection` has not seen yet.
///
/// # Errors
/// When the file is from a newer program.
pub fn pending(
    connection: &Connection,
    table: &'static str,
    migrations: &[Migration],
) -> Result<Vec<Migration>, Error> {
    let known = migrations.last().map_or(0, |last| last.version);
    let exists = connection
        .query_row("SELECT 1 FROM sqlite_schema WHERE type = 'table' AND name = ?1", [table], |_| Ok(()))
        .optional()?
        .is_some();
    let found = if exists {
        connection
            .query_row(&format!("SELECT coalesce(max(version), 0) FROM {table}"), [], |row| row.get(0))?
    } else {
        0
    };
    if found > known {
        return Err(Error::Newer { found, known });
    }
    Ok(migrations.iter().filter(|migration| migration.version > found).copied().collect())
}
