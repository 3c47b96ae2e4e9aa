//! The schema, step by step, under a lock that only one process has at a time.
//!
//! MySQL commits every change of a table by itself, so a step may stop in its middle; its statements can all be run
//! again. The lock belongs to a connection of its own and goes with it.

use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Error as Driver};

use super::error::Trouble;
use super::session::{close, connect, options, persist};
use crate::Error;

/// One step of the schema.
#[derive(Clone, Copy, Debug)]
pub struct Migration {
    /// Counted from 1 without gaps.
    pub version: u32,
    /// What it does, in a few words.
    pub name: &'static str,
    /// The statements.
    pub sql: &'static str,
}

/// Every step, oldest first. A step that was released is never changed; a new one is added.
pub const MIGRATIONS: [Migration; 5] = [
    Migration { version: 1, name: "outbox", sql: include_str!("migrations/1_outbox.sql") },
    Migration { version: 2, name: "inbox", sql: include_str!("migrations/2_inbox.sql") },
    Migration { version: 3, name: "versions", sql: include_str!("migrations/3_versions.sql") },
    Migration { version: 4, name: "forgotten", sql: include_str!("migrations/4_forgotten.sql") },
    Migration { version: 5, name: "keys", sql: include_str!("migrations/5_keys.sql") },
];

/// Functions for other languages and a trigger: useful, and not everybody may make them.
const FUNCTIONS: &str = include_str!("functions.sql");

/// How long one process waits for another that migrates, in seconds.
const PATIENCE: u32 = 60;

/// Brings the database at `url` up to date and says which steps that took.
///
/// # Errors
/// When a statement fails or the database is from a newer program.
pub async fn migrate(url: &str) -> Result<Vec<Migration>, Error> {
    on_its_own(url, bring).await
}

/// The steps that the database at `url` has not seen yet. Changes nothing.
///
/// # Errors
/// When the database cannot be reached or is from a newer program.
pub async fn pending(url: &str) -> Result<Vec<Migration>, Error> {
    on_its_own(url, missing).await
}

/// Does something on a connection of its own, and again when that breaks: every step can be.
async fn on_its_own<T>(url: &str, work: impl AsyncFn(&mut Conn) -> Result<T, Trouble>) -> Result<T, Error> {
    let options = options(url, 2)?;
    persist(async || {
        let mut connection = connect(options.clone()).await?;
        let done = work(&mut connection).await;
        close(connection).await;
        done
    })
    .await
}

/// The whole schema as SQL, for those who apply it with a tool of their own. The tool must know DELIMITER, as the
/// `mysql` and `mariadb` commands do.
pub fn schema() -> String {
    let mut schema =
        MIGRATIONS.map(|step| format!("-- {}: {}\n{}", step.version, step.name, step.sql)).join("\n");
    schema.push_str("\n-- functions\n");
    schema.push_str(FUNCTIONS);
    schema.push_str("\n-- what was applied\n");
    schema.push_str(TABLE);
    schema.push_str(";\n");
    for step in MIGRATIONS {
        schema.push_str(&format!(
            "INSERT IGNORE INTO postrider_migrations (version, name) VALUES ({}, '{}');\n",
            step.version, step.name
        ));
    }
    schema
}

const TABLE: &str = "CREATE TABLE IF NOT EXISTS postrider_migrations (
    version    INT UNSIGNED NOT NULL PRIMARY KEY,
    name       VARCHAR(64) NOT NULL,
    applied_at DATETIME(3) NOT NULL DEFAULT (utc_timestamp(3))
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin";

/// Brings the database of `connection` up to date.
pub(super) async fn bring(connection: &mut Conn) -> Result<Vec<Migration>, Trouble> {
    if missing(connection).await?.is_empty() {
        return Ok(Vec::new());
    }
    alone(connection).await?;
    let applied = apply(connection).await;
    done(connection).await?;
    applied
}

/// The lock of those who change the schema. Names of locks are the whole server's; databases beside this one need not
/// wait.
const LOCK: &str = "concat('postrider:', md5(database()))";

/// Waits until nobody else changes the schema.
pub(super) async fn alone(connection: &mut Conn) -> Result<(), Trouble> {
    let locked: Option<Option<i64>> =
        connection.query_first(format!("SELECT get_lock({LOCK}, {PATIENCE})")).await?;
    match locked.flatten() {
        Some(1) => Ok(()),
        _ => Err(Trouble::Final(Error::Unavailable {
            reason: "another process is changing the schema".to_owned(),
            retry_after: std::time::Duration::from_secs(5),
        })),
    }
}

/// Lets others change the schema.
pub(super) async fn done(connection: &mut Conn) -> Result<(), Trouble> {
    Ok(connection.query_drop(format!("DO release_lock({LOCK})")).await?)
}

async fn apply(connection: &mut Conn) -> Result<Vec<Migration>, Trouble> {
    connection.query_drop(TABLE).await?;
    // Looked at again under the lock: another process may have been faster.
    let missing = missing(connection).await?;
    for step in &missing {
        for statement in statements(step.sql) {
            connection.query_drop(statement).await?;
        }
        connection
            .exec_drop(
                "INSERT INTO postrider_migrations (version, name) VALUES (?, ?)",
                (step.version, step.name),
            )
            .await?;
    }
    if !missing.is_empty() {
        functions(connection).await?;
    }
    Ok(missing)
}

async fn functions(connection: &mut Conn) -> Result<(), Trouble> {
    for statement in statements(FUNCTIONS) {
        match connection.query_drop(statement).await {
            Ok(()) => {}
            // Not allowed by the binary log's rules, or by the user's grants.
            Err(Driver::Server(error)) if matches!(error.code, 1044 | 1142 | 1227 | 1370 | 1418 | 1419) => {
                tracing::warn!(
                    error = error.message,
                    "the functions postrider_… and the trigger on outbox_events were not made: set \
                     log_bin_trust_function_creators = 1 or let an administrator run `postrider schema --print`; \
                     plain INSERTs work without them"
                );
                return Ok(());
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

async fn missing(connection: &mut Conn) -> Result<Vec<Migration>, Trouble> {
    let known = MIGRATIONS.last().map_or(0, |last| last.version);
    let there: Option<u8> = connection
        .query_first(
            "SELECT 1 FROM information_schema.tables
             WHERE table_schema = database() AND table_name = 'postrider_migrations'",
        )
        .await?;
    let found: u32 = match there {
        None => 0,
        Some(_) => {
            let version: Option<Option<u32>> =
                connection.query_first("SELECT max(version) FROM postrider_migrations").await?;
            version.flatten().unwrap_or(0)
        }
    };
    if found > known {
        return Err(Trouble::Final(Error::Broken(format!(
            "the database has schema version {found} and this program knows {known}: use a newer one"
        ))));
    }
    Ok(MIGRATIONS.into_iter().filter(|step| step.version > found).collect())
}

/// Whether the schema is up to date, for those who change it with a tool of their own.
pub(super) async fn check(connection: &mut Conn) -> Result<(), Trouble> {
    match missing(connection).await?.first() {
        None => Ok(()),
        Some(step) => Err(Trouble::Final(Error::Broken(format!(
            "the database lacks step {} ({}) of the schema: run `postrider migrate`",
            step.version, step.name
        )))),
    }
}

/// Whether rows that are deleted count themselves out.
pub(super) async fn has_trigger(connection: &mut Conn) -> Result<bool, Trouble> {
    let found: Option<u8> = connection
        .query_first(
            "SELECT 1 FROM information_schema.triggers
             WHERE trigger_schema = database() AND trigger_name = 'outbox_removed'",
        )
        .await?;
    Ok(found.is_some())
}

/// The statements of a script, cut where the `mysql` command would cut them.
fn statements(script: &str) -> Vec<String> {
    let mut delimiter = ";";
    let mut statements = Vec::new();
    let mut statement = String::new();
    for line in script.lines() {
        if let Some(other) = line.strip_prefix("DELIMITER ") {
            delimiter = other.trim();
        } else if line.trim_start().starts_with("--") {
            // Comments of ours stand on lines of their own.
        } else if let Some(last) = line.trim_end().strip_suffix(delimiter) {
            statement.push_str(last);
            statements.push(std::mem::take(&mut statement));
        } else {
            statement.push_str(line);
            statement.push('\n');
        }
    }
    statements.push(statement);
    statements.retain(|statement| !statement.trim().is_empty());
    statements
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_is_cut_at_its_delimiters() {
        let script = "-- a; b\nCREATE a\n(b);\nDELIMITER //\nBEGIN\n  x;\nEND //\nDELIMITER ;\nDROP c;\n";
        assert_eq!(statements(script), ["CREATE a\n(b)", "BEGIN\n  x;\nEND ", "DROP c"]);
    }

    #[test]
    fn what_a_step_copies_from_tables_in_use_it_does_not_lock() {
        let forgotten = statements(MIGRATIONS[3].sql);
        let copies =
            forgotten.iter().position(|statement| statement.contains("FROM inbox_ids")).expect("one");
        assert_eq!(forgotten[copies - 1], "SET TRANSACTION ISOLATION LEVEL READ COMMITTED");
    }

    #[test]
    fn steps_are_counted_without_gaps() {
        for (place, step) in MIGRATIONS.iter().enumerate() {
            assert_eq!(step.version as usize, place + 1, "{}", step.name);
        }
    }
}
