//! Which servers this store works on. Asked once, at the start: a promise that a server cannot keep must be refused
//! before anybody relies on it.

use mysql_async::Conn;
use mysql_async::prelude::Queryable;

use super::error::Trouble;
use super::row::Read;
use crate::Error;

/// What a server says of itself.
#[derive(Clone, Debug, Default)]
pub(super) struct Variables {
    /// "10.11.6-MariaDB-log", "8.0.36".
    version: String,
    read_only: bool,
    super_read_only: bool,
    /// A Galera node.
    wsrep_on: bool,
    log_bin: bool,
    binlog_format: String,
    max_allowed_packet: u64,
}

/// A batch of messages, and what is said of it, must fit.
const LEAST_PACKET: u64 = 4 << 20;

pub(super) async fn ask(connection: &mut Conn) -> Result<Variables, Trouble> {
    let rows: Vec<mysql_async::Row> = connection
        .query(
            "SHOW GLOBAL VARIABLES WHERE Variable_name IN ('version', 'read_only', 'super_read_only', 'wsrep_on',
             'log_bin', 'binlog_format', 'max_allowed_packet')",
        )
        .await?;
    let mut variables = Variables::default();
    for mut row in rows {
        let (name, value) = (row.text(0)?, row.text(1)?);
        let on = matches!(value.as_str(), "ON" | "1");
        match name.as_str() {
            "version" => variables.version = value,
            "read_only" => variables.read_only = on,
            "super_read_only" => variables.super_read_only = on,
            "wsrep_on" => variables.wsrep_on = on,
            "log_bin" => variables.log_bin = on,
            "binlog_format" => variables.binlog_format = value,
            _ => variables.max_allowed_packet = value.parse().unwrap_or(LEAST_PACKET),
        }
    }
    Ok(variables)
}

/// Why the store does not work on such a server, and what to do.
pub(super) fn check(server: &Variables) -> Result<(), Error> {
    let refuse = |why: String| Err(Error::Refused(why));
    let Some((least, name)) = least(&server.version) else {
        return refuse(format!("the server calls itself `{}`: use MySQL or MariaDB", server.version));
    };
    if numbers(&server.version) < least {
        return refuse(format!(
            "{name} {} is too old: it needs {}.{}.{} or newer, for SKIP LOCKED, JSON_TABLE and checked columns",
            server.version, least[0], least[1], least[2]
        ));
    }
    if server.wsrep_on {
        return refuse(
            "the server is a node of a Galera cluster (wsrep_on = ON): writes on several nodes are only compared \
             when they commit, so two relays could hold one lane and updates be lost. Use a single server, or one \
             with ordinary replication"
                .to_owned(),
        );
    }
    if server.read_only || server.super_read_only {
        return refuse(
            "the server is read-only, so it is a replica or is being switched over: name the primary in the URL"
                .to_owned(),
        );
    }
    if server.log_bin && server.binlog_format == "STATEMENT" {
        return refuse(
            "binlog_format = STATEMENT cannot record transactions at READ COMMITTED: set it to ROW or MIXED"
                .to_owned(),
        );
    }
    if server.max_allowed_packet < LEAST_PACKET {
        return refuse(format!(
            "max_allowed_packet is {}: set it to {LEAST_PACKET} or more, so that a batch fits",
            server.max_allowed_packet
        ));
    }
    Ok(())
}

/// The oldest version that will do, and the product's name.
fn least(version: &str) -> Option<([u32; 3], &'static str)> {
    if version.contains("MariaDB") {
        return Some(([10, 6, 0], "MariaDB"));
    }
    version.starts_with(|first: char| first.is_ascii_digit()).then_some(([8, 0, 16], "MySQL"))
}

/// The numbers at the start of a version. MariaDB may say "5.5.5-10.11.6-MariaDB".
fn numbers(version: &str) -> [u32; 3] {
    let version = version.strip_prefix("5.5.5-").unwrap_or(version);
    let mut numbers = version.split(|c: char| !c.is_ascii_digit()).map_while(|part| part.parse().ok());
    [(); 3].map(|()| numbers.next().unwrap_or(0))
}

/// Tables of ours that are not kept as they must be: a server may have put another engine or character set in place.
pub(super) async fn check_tables(connection: &mut Conn) -> Result<(), Trouble> {
    let wrong: Option<(String, String, String)> = connection
        .query_first(
            "SELECT table_name, coalesce(engine, 'none'), coalesce(table_collation, 'none')
             FROM information_schema.tables
             WHERE table_schema = database() AND table_type = 'BASE TABLE'
             AND table_name IN ('outbox_events', 'outbox_holds', 'outbox_lanes', 'outbox_batches', 'outbox_counters', 'inbox_ids', 'inbox_parked')
             AND (engine <> 'InnoDB' OR table_collation NOT LIKE 'utf8mb4%') LIMIT 1",
        )
        .await?;
    match wrong {
        None => Ok(()),
        Some((table, engine, collation)) => Err(Trouble::Final(Error::Refused(format!(
            "the table {table} has the engine {engine} and the collation {collation}: it needs InnoDB, which keeps \
             transactions, and utf8mb4, which keeps every character; convert it with ALTER TABLE"
        )))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(version: &str) -> Variables {
        Variables { version: version.to_owned(), max_allowed_packet: 16 << 20, ..Variables::default() }
    }

    #[test]
    fn servers_that_keep_the_promises_are_taken() {
        for version in
            ["10.6.0-MariaDB", "5.5.5-10.11.6-MariaDB-log", "11.4.2-MariaDB", "8.0.16", "8.4.0", "9.1.0-log"]
        {
            check(&server(version)).expect(version);
        }
        check(&Variables { log_bin: true, binlog_format: "MIXED".to_owned(), ..server("8.0.36") })
            .expect("MIXED");
    }

    #[test]
    fn servers_that_cannot_keep_them_are_refused_with_the_reason() {
        let cases = [
            (server("10.5.23-MariaDB"), "10.6.0 or newer"),
            (server("5.5.5-10.4.1-MariaDB"), "10.6.0 or newer"),
            (server("8.0.15"), "8.0.16 or newer"),
            (server("5.7.44-log"), "8.0.16 or newer"),
            (server("TiDB"), "use MySQL or MariaDB"),
            (Variables { wsrep_on: true, ..server("10.11.6-MariaDB") }, "Galera"),
            (Variables { read_only: true, ..server("8.0.36") }, "replica"),
            (Variables { super_read_only: true, ..server("8.0.36") }, "replica"),
            (
                Variables { log_bin: true, binlog_format: "STATEMENT".to_owned(), ..server("8.0.36") },
                "ROW or MIXED",
            ),
            (Variables { max_allowed_packet: 1 << 20, ..server("8.0.36") }, "max_allowed_packet"),
        ];
        for (server, expected) in cases {
            let error = check(&server).expect_err(expected).to_string();
            assert!(error.contains(expected), "{error:?} should say {expected:?}");
        }
    }
}
