//! What `postrider doctor` sees of a MySQL or MariaDB server.

use std::collections::HashMap;

use message::Finding;
use mysql_async::prelude::Queryable;

use super::MysqlStore;
use super::row::Read;
use crate::Error;

impl MysqlStore {
    /// Looks at the server's settings and at what holds it up. Changes nothing.
    ///
    /// # Errors
    /// When the server cannot be asked.
    pub async fn examine(&self) -> Result<Vec<Finding>, Error> {
        let mut connection = self.pool.get_conn().await?;
        let rows: Vec<mysql_async::Row> = connection
            .query(
                "SHOW GLOBAL VARIABLES WHERE Variable_name IN ('version', 'innodb_flush_log_at_trx_commit', 'log_bin',
                 'sync_binlog', 'innodb_doublewrite', 'max_allowed_packet')",
            )
            .await?;
        let mut settings = HashMap::new();
        for mut row in rows {
            settings.insert(row.text(0)?, row.text(1)?);
        }
        Ok(judge(&settings))
    }
}

fn judge(settings: &HashMap<String, String>) -> Vec<Finding> {
    let is = |name: &str| settings.get(name).map_or("unknown", String::as_str);
    let mut findings = vec![Finding::good("server", is("version"))];
    findings.push(match is("innodb_flush_log_at_trx_commit") {
        "1" => {
            Finding::good("innodb_flush_log_at_trx_commit", "1: commits are on disk before they are answered")
        }
        value => Finding::broken(
            "innodb_flush_log_at_trx_commit",
            format!("{value}: a crash loses the last second of commits, messages among them"),
            "SET GLOBAL innodb_flush_log_at_trx_commit = 1, and in the server's file",
        ),
    });
    if is("innodb_doublewrite") == "OFF" {
        findings.push(Finding::broken(
            "innodb_doublewrite",
            "OFF: a crash of the machine may leave half-written pages",
            "switch it on unless the file system writes pages whole",
        ));
    }
    if is("log_bin") == "ON" && is("sync_binlog") != "1" {
        findings.push(Finding::doubtful(
            "sync_binlog",
            format!(
                "{}: after a crash replicas may miss what the primary has, or have what it lost",
                is("sync_binlog")
            ),
            "SET GLOBAL sync_binlog = 1",
        ));
    }
    findings
}

#[cfg(test)]
mod tests {
    use message::Health;

    use super::*;

    #[test]
    fn settings_that_lose_messages_are_broken_and_those_that_surprise_are_doubtful() {
        let with = |name: &str, value: &str| {
            let mut settings: HashMap<String, String> = [
                ("version", "10.11.6-MariaDB"),
                ("innodb_flush_log_at_trx_commit", "1"),
                ("innodb_doublewrite", "ON"),
                ("log_bin", "ON"),
                ("sync_binlog", "1"),
            ]
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .into();
            settings.insert(name.to_owned(), value.to_owned());
            judge(&settings).into_iter().map(|finding| finding.health).max()
        };
        assert_eq!(with("version", "8.0.36"), Some(Health::Good));
        assert_eq!(with("innodb_flush_log_at_trx_commit", "2"), Some(Health::Broken));
        assert_eq!(with("innodb_doublewrite", "OFF"), Some(Health::Broken));
        assert_eq!(with("sync_binlog", "0"), Some(Health::Doubtful));
        assert_eq!(with("log_bin", "OFF"), Some(Health::Good));
    }
}
