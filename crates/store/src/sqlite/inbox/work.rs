//! Work that runs in the transaction of the mark: a function, or a statement from the configuration.

use std::sync::Arc;

use rusqlite::types::Value;
use rusqlite::{Connection, Statement};

use super::super::row::headers_json;
use crate::{Arrival, Error, Handled};

/// A handler that works on the store's own connection: group and arrival in, verdict out.
pub type SqlHandler = Arc<dyn Fn(&Connection, &str, &Arrival) -> Handled + Send + Sync>;

/// What a statement may refer to.
const PARAMETERS: [&str; 9] =
    [":id", ":topic", ":type", ":key", ":payload", ":headers", ":occurred_at", ":seq", ":group"];

/// Whether `sql` is one statement that only uses the known parameters, on the database at `connection`.
///
/// # Errors
/// Says what is wrong with it.
pub fn check_sql(connection: &Connection, sql: &str) -> Result<(), Error> {
    let statement = connection
        .prepare(sql)
        .map_err(|error| Error::Refused(format!("the handler's SQL cannot be used: {error}")))?;
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

/// A handler that runs `sql` for each message.
pub(super) fn statement(sql: String) -> SqlHandler {
    Arc::new(move |connection, group, arrival| {
        // A statement that cannot even be prepared fails for every message: none of them is to blame.
        let mut statement = match connection.prepare_cached(&sql) {
            Ok(statement) => statement,
            Err(error) => {
                return Handled::Unavailable { error: format!("the handler's SQL cannot be used: {error}") };
            }
        };
        match run(&mut statement, group, arrival) {
            Ok(()) => Handled::Done,
            Err(error) => Handled::Retry { error: error.to_string(), after: None },
        }
    })
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
