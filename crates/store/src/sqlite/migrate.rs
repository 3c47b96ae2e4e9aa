//! The schema, step by step.

use std::path::Path;

use rusqlite::Connection;
use sqlite::{Error, Migration};

const TABLE: &str = "postrider_migrations";

/// Every step, oldest first. A step that was released is never changed; a new one is added.
pub const MIGRATIONS: [Migration; 4] = [
    Migration { version: 1, name: "outbox", sql: include_str!("migrations/1_outbox.sql") },
    Migration { version: 2, name: "inbox", sql: include_str!("migrations/2_inbox.sql") },
    Migration { version: 3, name: "versions", sql: include_str!("migrations/3_versions.sql") },
    Migration { version: 4, name: "forgotten", sql: include_str!("migrations/4_forgotten.sql") },
];

/// Brings `connection` up to date and says which steps that took.
///
/// # Errors
/// When a statement fails or the file is from a newer program.
pub fn migrate(connection: &mut Connection) -> Result<Vec<Migration>, Error> {
    sqlite::migrate(connection, TABLE, &MIGRATIONS)
}

/// The steps that the file at `path` has not seen yet. Changes nothing, not even by creating the file.
///
/// # Errors
/// When the file cannot be read or is from a newer program.
pub fn pending(path: &Path) -> Result<Vec<Migration>, Error> {
    if !path.exists() {
        return Ok(MIGRATIONS.to_vec());
    }
    let flags = rusqlite::OpenFlags::SQLITE_OPEN_READ_ONLY;
    sqlite::pending(&Connection::open_with_flags(path, flags)?, TABLE, &MIGRATIONS)
}

/// The whole schema as SQL, for those who apply it with a tool of their own.
pub fn schema() -> String {
    MIGRATIONS.map(|step| format!("-- {}: {}\n{}", step.version, step.name, step.sql)).join("\n")
}
