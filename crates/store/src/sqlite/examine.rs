//! What `postrider doctor` sees of a file.

use message::Finding;

use super::SqliteStore;
use crate::Error;

impl SqliteStore {
    /// Looks at the file and its settings. Changes nothing.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub async fn examine(&self) -> Result<Vec<Finding>, Error> {
        let (journal, damage): (String, String) = self
            .file
            .read(|connection| {
                let journal = connection.query_row("PRAGMA journal_mode", [], |row| row.get(0))?;
                let damage = connection.query_row("PRAGMA quick_check(1)", [], |row| row.get(0))?;
                Ok::<_, Error>((journal, damage))
            })
            .await?;
        let file = format!("file {}", self.path().display());
        let mut findings = vec![match damage.as_str() {
            "ok" => Finding::good(file, "whole; one machine, no copies: back it up"),
            damage => Finding::broken(file, format!("damaged: {damage}"), "restore it from a backup"),
        }];
        findings.push(match journal.as_str() {
            "wal" => Finding::good(
                "durability",
                "commits are flushed before they are answered (WAL, synchronous = FULL)",
            ),
            other => Finding::broken(
                "durability",
                format!("journal_mode is {other}"),
                "move it to a disk that SQLite can map into memory: WAL does not work over a network",
            ),
        });
        Ok(findings)
    }
}
