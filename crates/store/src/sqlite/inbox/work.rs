//! Work that runs in the transaction of the mark: a function, or a statement from the configuration.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use rusqlite::types::Value;
use rusqlite::{Connection, Statement};

use crate::column::headers_json;
use crate::statement::{PARAMETERS, check_shape};
use crate::{Arrival, Error, Handled};

/// A handler that works on the store's own connection: group and arrival in, verdict out.
pub type SqlHandler = Arc<dyn Fn(&Connection, &str, &Arrival) -> Handled + Send + Sync>;

/// What is done for each message in the transaction of its mark.
pub(super) enum Job {
    /// Nothing.
    Nothing,
    /// One statement, or why it cannot be one.
    Statement(Result<String, String>),
    /// A function of the application.
    Function(SqlHandler),
}

/// Tables of ours whose definitions speak of failing without asking for it.
const OURS: &str = "'outbox_events', 'outbox_status', 'outbox_batches', 'outbox_counters'";

impl Job {
    pub(super) fn statement(sql: &str) -> Self {
        Self::Statement(check_shape(sql).map(|()| sql.to_owned()))
    }

    /// Whether a failure leaves nothing of the work behind, so that no savepoint is needed around it. SQLite undoes a
    /// statement that fails, unless somebody asked for `FAIL`: in the statement, or in a table or trigger it meets.
    pub(super) fn undoes_itself(&self, connection: &Connection) -> Result<bool, Error> {
        match self {
            Self::Nothing => Ok(true),
            Self::Function(_) => Ok(false),
            Self::Statement(Err(_)) => Ok(true),
            Self::Statement(Ok(sql)) => {
                let fails: bool = connection
                    .prepare_cached(&format!(
                        "SELECT EXISTS (SELECT 1 FROM sqlite_schema
                                        WHERE sql LIKE '%FAIL%' AND tbl_name NOT IN ({OURS}))"
                    ))?
                    .query_row([], |row| row.get(0))?;
                Ok(!fails && !sql.to_ascii_uppercase().contains("FAIL"))
            }
        }
    }

    /// Does the work. A function that panics fails its message: it leaves nothing behind, and the others go on.
    pub(super) fn run(&self, connection: &Connection, group: &str, arrival: &Arrival) -> Handled {
        match self {
            Self::Nothing => Handled::Done,
            Self::Statement(sql) => statement(sql, connection, group, arrival),
            Self::Function(handler) => {
                let run = AssertUnwindSafe(|| handler(connection, group, arrival));
                catch_unwind(run).unwrap_or_else(|panic| {
                    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
                    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
                    let text = text.unwrap_or_else(|| "no text".to_owned());
                    Handled::Retry { error: format!("the handler panicked: {text}"), after: None }
                })
            }
        }
    }
}

/// Whether `sql` is one statement that leaves the transaction alone and only uses the known parameters, on the
/// database at `connection`.
///
/// # Errors
/// Says what is wrong with it. A table that is not there (yet) is [`Error::Unavailable`]: a handler waits for it.
pub fn check_sql(connection: &Connection, sql: &str) -> Result<(), Error> {
    let refused = |why: String| Error::Refused(format!("the handler's SQL cannot be used: {why}"));
    check_shape(sql).map_err(refused)?;
    let statement = connection.prepare(sql).map_err(|error| match error.to_string() {
        missing if missing.contains("no such table") => {
            Error::Unavailable { reason: missing, retry_after: Duration::from_secs(1) }
        }
        other => refused(other),
    })?;
    for index in 1..=statement.parameter_count() {
        let name = statement.parameter_name(index).unwrap_or("?");
        if !PARAMETERS.contains(&name) {
            return Err(Error::Refused(format!(
                "the handler's SQL has the parameter `{name}`: use {}",
                PARAMETERS.join(", ")
            )));
        }
    }
    Ok(())
}

fn statement(
    sql: &Result<String, String>,
    connection: &Connection,
    group: &str,
    arrival: &Arrival,
) -> Handled {
    // A statement that cannot even be prepared fails for every message: none of them is to blame.
    let prepared = sql.as_ref().map_err(Clone::clone);
    let prepared = prepared.and_then(|sql| connection.prepare_cached(sql).map_err(|error| error.to_string()));
    let mut statement = match prepared {
        Ok(statement) => statement,
        Err(error) => {
            return Handled::Unavailable { error: format!("the handler's SQL cannot be used: {error}") };
        }
    };
    match run(&mut statement, group, arrival) {
        Ok(()) => Handled::Done,
        Err(error) => Handled::Retry { error: error.to_string(), after: None },
    }
}

fn run(statement: &mut Statement<'_>, group: &str, arrival: &Arrival) -> rusqlite::Result<()> {
    for index in 1..=statement.parameter_count() {
        let name = statement.parameter_name(index).unwrap_or_default().to_owned();
        statement.raw_bind_parameter(index, value(&name, group, arrival))?;
    }
    // A statement that returns rows is run to its end, or its later rows would never be written.
    let mut rows = statement.raw_query();
    while rows.next()?.is_some() {}
    Ok(())
}

fn value(name: &str, group: &str, arrival: &Arrival) -> Value {
    let message = &arrival.message;
    let optional = |text: &Option<String>| text.clone().map_or(Value::Null, Value::Text);
    match name {
        ":id" => Value::Text(message.id.to_string()),
        ":topic" => Value::Text(message.topic.clone()),
        ":type" => optional(&message.kind),
        ":key" => optional(&message.key),
        // Text where it can be, so that SQL's JSON functions can read it.
        ":payload" => match std::str::from_utf8(&message.payload) {
            Ok(text) => Value::Text(text.to_owned()),
            Err(_) => Value::Blob(message.payload.to_vec()),
        },
        ":headers" => Value::Text(headers_json(message)),
        ":occurred_at" => Value::Integer(message.occurred_at.timestamp_millis()),
        ":seq" => arrival.seq.map_or(Value::Null, Value::Integer),
        ":group" => Value::Text(group.to_owned()),
        _ => Value::Null,
    }
}
