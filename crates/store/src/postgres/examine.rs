//! What `postrider doctor` sees of a PostgreSQL server.

use std::collections::HashMap;

use message::Finding;

use super::PostgresStore;
use super::error::Trouble;
use crate::Error;

/// Settings on which the promises stand.
const SETTINGS: &str = "SELECT name, setting FROM pg_settings WHERE name IN
    ('server_version', 'fsync', 'full_page_writes', 'synchronous_commit', 'synchronous_standby_names', 'autovacuum',
     'idle_in_transaction_session_timeout')";

/// How long the oldest snapshot has been held by anybody, and by whom.
const OLDEST: &str = "SELECT extract(epoch FROM max(clock_timestamp() - xact_start))::bigint,
           (SELECT count(*) FROM pg_prepared_xacts),
           (SELECT count(*) FROM pg_stat_replication)
    FROM pg_stat_activity WHERE backend_xmin IS NOT NULL AND pid <> pg_backend_pid()";

/// A snapshot that is held for so long keeps vacuum from its work.
const LONG: i64 = 10 * 60;

impl PostgresStore {
    /// Looks at the server's settings and at what holds it up. Changes nothing.
    ///
    /// # Errors
    /// When the server cannot be asked.
    pub async fn examine(&self) -> Result<Vec<Finding>, Error> {
        let mut settings: HashMap<String, String> = HashMap::new();
        for row in self.read(SETTINGS, &[]).await? {
            settings.insert(row.get(0), row.get(1));
        }
        let row = self.read(OLDEST, &[]).await?.pop();
        let row = row.ok_or_else(|| Error::Broken("the server says nothing of its sessions".to_owned()))?;
        let read = || Ok((row.try_get(0)?, row.try_get(1)?, row.try_get(2)?));
        let (oldest, prepared, standbys): (Option<i64>, i64, i64) =
            read().map_err(|error: tokio_postgres::Error| Error::from(Trouble::from(error)))?;
        let mut findings = judge(&settings, standbys);
        if let Some(oldest) = oldest.filter(|oldest| *oldest > LONG) {
            findings.push(Finding::doubtful(
                "old snapshot",
                format!(
                    "a transaction is open for {} minutes: sent messages cannot be vacuumed",
                    oldest / 60
                ),
                "end it (pg_stat_activity says whose it is), and set idle_in_transaction_session_timeout",
            ));
        }
        if prepared > 0 {
            findings.push(Finding::doubtful(
                "prepared transactions",
                format!("{prepared} wait for their second phase and hold locks and snapshots meanwhile"),
                "COMMIT PREPARED or ROLLBACK PREPARED what nobody will finish (pg_prepared_xacts)",
            ));
        }
        Ok(findings)
    }
}

fn judge(settings: &HashMap<String, String>, standbys: i64) -> Vec<Finding> {
    let is = |name: &str| settings.get(name).map_or("unknown", String::as_str);
    let mut findings =
        vec![Finding::good("server", format!("PostgreSQL {}, the primary", is("server_version")))];
    for (name, why) in [
        ("fsync", "a crash of the machine may lose or damage anything that was committed"),
        ("full_page_writes", "a crash of the machine may damage pages"),
    ] {
        findings.push(match is(name) {
            "off" => Finding::broken(
                name,
                format!("off: {why}"),
                format!("ALTER SYSTEM SET {name} = on, and reload"),
            ),
            value => Finding::good(name, value),
        });
    }
    findings.push(match is("synchronous_commit") {
        "off" => Finding::broken(
            "synchronous_commit",
            "off: a crash loses the last commits, messages among them, that were already answered",
            "set it to on for the application's user and for this one",
        ),
        value => Finding::good("synchronous_commit", value),
    });
    if standbys > 0 && is("synchronous_standby_names").is_empty() {
        findings.push(Finding::doubtful(
            "replication",
            format!("{standbys} standbys, all asynchronous: a failover loses the last commits, sent messages stay sent"),
            "name one in synchronous_standby_names if that must not be",
        ));
    }
    findings.push(match is("autovacuum") {
        "off" => Finding::broken(
            "autovacuum",
            "off: every sent message leaves a dead row that nobody removes",
            "ALTER SYSTEM SET autovacuum = on, and reload",
        ),
        value => Finding::good("autovacuum", value),
    });
    findings
}

#[cfg(test)]
mod tests {
    use message::Health;

    use super::*;

    #[test]
    fn settings_that_lose_messages_are_broken_and_those_that_surprise_are_doubtful() {
        let with = |name: &str, value: &str, standbys| {
            let mut settings: HashMap<String, String> = [
                ("server_version", "15.8"),
                ("fsync", "on"),
                ("full_page_writes", "on"),
                ("synchronous_commit", "on"),
                ("synchronous_standby_names", ""),
                ("autovacuum", "on"),
            ]
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .into();
            settings.insert(name.to_owned(), value.to_owned());
            judge(&settings, standbys).into_iter().map(|finding| finding.health).max()
        };
        assert_eq!(with("fsync", "on", 0), Some(Health::Good));
        for name in ["fsync", "full_page_writes", "synchronous_commit", "autovacuum"] {
            assert_eq!(with(name, "off", 0), Some(Health::Broken), "{name}");
        }
        assert_eq!(with("fsync", "on", 2), Some(Health::Doubtful));
        assert_eq!(with("synchronous_standby_names", "*", 2), Some(Health::Good));
    }
}
