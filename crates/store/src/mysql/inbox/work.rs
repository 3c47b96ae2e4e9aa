//! Work that runs in the transaction of the mark: a statement from the configuration.

use std::time::Duration;

use mysql_async::consts::StatusFlags;
use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Error as Driver, Statement, Value};

use super::super::error::Trouble;
use super::super::row::at;
use super::super::session::Tx;
use crate::column::headers_json;
use crate::statement::{PARAMETERS, check_shape};
use crate::{Arrival, Error, Handled};

/// Statements that do their work, or none of it, inside a transaction. All others end it without a word, or leave
/// something behind on the connection.
const KINDS: [&str; 8] = ["INSERT", "REPLACE", "UPDATE", "DELETE", "SELECT", "WITH", "CALL", "DO"];

/// What is done for each message in the transaction of its mark.
pub(super) enum Job {
    /// Nothing.
    Nothing,
    /// One statement, or why it cannot be one.
    Statement(Result<Handler, String>),
}

/// A statement with the names of its parameters, in order.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Handler {
    sql: String,
    names: Vec<String>,
    /// A procedure: what it did before it failed is not undone with it.
    procedure: bool,
}

/// Work that the database has agreed to do.
pub(super) enum Ready<'a> {
    Nothing,
    Statement(Statement, &'a Handler),
}

impl Job {
    pub(super) fn statement(sql: &str) -> Self {
        Self::Statement(Handler::read(sql))
    }

    /// Prepares the work. When that fails, it fails for every message and none is to blame: why.
    pub(super) async fn prepare(&self, tx: &mut Tx<'_>) -> Result<Result<Ready<'_>, String>, Trouble> {
        let unusable = |why: &str| format!("the handler's SQL cannot be used: {why}");
        match self {
            Self::Nothing => Ok(Ok(Ready::Nothing)),
            Self::Statement(Err(why)) => Ok(Err(unusable(why))),
            Self::Statement(Ok(handler)) => match tx.prep(handler.sql.as_str()).await {
                Ok(statement) => Ok(Ok(Ready::Statement(statement, handler))),
                Err(error) => match Trouble::from(error) {
                    Trouble::Final(Error::Broken(why)) => Ok(Err(unusable(&why))),
                    trouble => Err(trouble),
                },
            },
        }
    }
}

impl Ready<'_> {
    /// Does the work for one message. What fails leaves nothing behind: the database undoes a statement that fails.
    pub(super) async fn run(
        &self,
        tx: &mut Tx<'_>,
        group: &str,
        arrival: &Arrival,
    ) -> Result<Handled, Trouble> {
        let Self::Statement(statement, handler) = self else { return Ok(Handled::Done) };
        if handler.procedure {
            tx.query_drop("SAVEPOINT work").await?;
        }
        let values: Vec<Value> = handler.names.iter().map(|name| value(name, group, arrival)).collect();
        let Err(error) = tx.exec_drop(statement, values).await else {
            let whole = |ok: &mysql_async::OkPacket<'_>| {
                ok.status_flags().contains(StatusFlags::SERVER_STATUS_IN_TRANS)
            };
            return match handler.procedure && !tx.last_ok_packet().is_none_or(whole) {
                false => Ok(Handled::Done),
                true => Err(Trouble::Final(Error::Broken(format!(
                    "the handler of {group} ended the store's transaction at message {}: its procedure must not \
                     commit, roll back or change tables",
                    arrival.message.id
                )))),
            };
        };
        let (told, unusable) = match &error {
            // What the statement itself leads to, with some values or with any: a table that a procedure misses, say.
            Driver::Server(server) => {
                (format!("{} (error {})", server.message, server.code), server.state.starts_with("42"))
            }
            other => (other.to_string(), false),
        };
        match Trouble::from(error) {
            Trouble::Final(Error::Broken(_)) => {}
            // A deadlock or a lost connection took the whole transaction with it.
            trouble => return Err(trouble),
        }
        if handler.procedure {
            tx.query_drop("ROLLBACK TO SAVEPOINT work").await?;
        }
        Ok(match unusable {
            true => Handled::Unavailable { error: format!("the handler's SQL cannot be used: {told}") },
            false => Handled::Retry { error: told, after: None },
        })
    }
}

/// Whether `sql` is one statement that leaves the transaction alone and only uses the known parameters, on the
/// database at `connection`.
pub(super) async fn check(connection: &mut Conn, sql: &str) -> Result<(), Trouble> {
    let refused = |why: String| Error::Refused(format!("the handler's SQL cannot be used: {why}"));
    let handler = Handler::read(sql).map_err(refused)?;
    match connection.prep(handler.sql.as_str()).await {
        Ok(_) => Ok(()),
        // A handler waits for a table that is not there yet.
        Err(Driver::Server(error)) if error.code == 1146 => Err(Trouble::Final(Error::Unavailable {
            reason: error.message,
            retry_after: Duration::from_secs(1),
        })),
        Err(error) => match Trouble::from(error) {
            Trouble::Final(Error::Broken(why)) => Err(refused(why).into()),
            trouble => Err(trouble),
        },
    }
}

impl Handler {
    /// Puts a `?` for each `:name`, outside of texts and comments. Says what is wrong.
    fn read(sql: &str) -> Result<Self, String> {
        check_shape(sql)?;
        let mut handler = Self { sql: String::with_capacity(sql.len()), names: Vec::new(), procedure: false };
        let mut rest = sql;
        while let Some(first) = rest.chars().next() {
            let skip = match first {
                '-' if rest.starts_with("-- ") => rest.find('\n').unwrap_or(rest.len()),
                '#' => rest.find('\n').unwrap_or(rest.len()),
                '/' if rest.starts_with("/*") => rest[2..].find("*/").map_or(rest.len(), |end| end + 4),
                '\'' | '"' | '`' => quoted(rest, first),
                ':' => {
                    let end = rest[1..].find(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
                    let name = &rest[..end.map_or(rest.len(), |end| end + 1)];
                    if name.len() > 1 {
                        if !PARAMETERS.contains(&name) {
                            return Err(format!(
                                "it has the parameter `{name}`: use {}",
                                PARAMETERS.join(", ")
                            ));
                        }
                        handler.names.push(name.to_owned());
                        handler.sql.push('?');
                        rest = &rest[name.len()..];
                        continue;
                    }
                    1
                }
                '?' => return Err("it has the parameter `?`: use names, such as :id".to_owned()),
                other => other.len_utf8(),
            };
            handler.sql.push_str(&rest[..skip]);
            rest = &rest[skip..];
        }
        let word: String = handler
            .sql
            .trim_start_matches(['(', ' ', '\n', '\t'])
            .chars()
            .take_while(char::is_ascii_alphabetic)
            .collect();
        let word = word.to_ascii_uppercase();
        if !KINDS.contains(&word.as_str()) {
            return Err(format!("it starts with `{word}`: use {}", KINDS.join(", ")));
        }
        handler.procedure = word == "CALL";
        Ok(handler)
    }
}

/// The length of a quoted text at the start of `rest`. A backslash hides the quote behind it.
fn quoted(rest: &str, quote: char) -> usize {
    let mut escaped = false;
    for (place, c) in rest.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' if quote != '`' => escaped = true,
            _ if c == quote => return place + 1,
            _ => {}
        }
    }
    rest.len()
}

fn value(name: &str, group: &str, arrival: &Arrival) -> Value {
    let message = &arrival.message;
    match name {
        ":id" => message.id.to_string().into(),
        ":topic" => message.topic.as_str().into(),
        ":type" => message.kind.as_deref().into(),
        ":key" => message.key.as_deref().into(),
        ":payload" => Value::Bytes(message.payload.to_vec()),
        ":headers" => headers_json(message).into(),
        ":occurred_at" => at(message.occurred_at.timestamp_millis()),
        ":seq" => arrival.seq.into(),
        ":group" => group.into(),
        _ => Value::NULL,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_become_places_outside_of_texts_and_comments() {
        let sql = r#"INSERT INTO t (a, `:id`, c) /* :topic */ VALUES (:id, ':key \' :seq', ":type") -- :group
                     ON DUPLICATE KEY UPDATE n = @n := :seq"#;
        let handler = Handler::read(sql).expect("it can be used");
        assert_eq!(handler.names, [":id", ":seq"]);
        assert!(handler.sql.contains("VALUES (?, ':key \\' :seq', \":type\") -- :group"), "{}", handler.sql);
        assert!(handler.sql.ends_with("@n := ?") && handler.sql.contains("`:id`"), "{}", handler.sql);
        assert!(!handler.procedure);
        assert!(Handler::read("call p(:id)").expect("a procedure").procedure);
    }

    #[test]
    fn what_would_end_the_transaction_or_cannot_be_filled_in_is_refused() {
        let cases = [
            ("COMMIT", "COMMIT"),
            ("TRUNCATE t", "starts with `TRUNCATE`"),
            ("SET autocommit = 0", "starts with `SET`"),
            ("START TRANSACTION", "starts with `START`"),
            ("INSERT INTO t VALUES (:name)", "`:name`"),
            ("INSERT INTO t VALUES (?)", "`?`"),
            ("DELETE FROM t; DELETE FROM u", "more than one"),
            ("", "empty"),
        ];
        for (sql, expected) in cases {
            let error = Handler::read(sql).expect_err(expected);
            assert!(error.contains(expected), "{error:?} should say {expected:?}");
        }
    }
}
