//! Work that runs in the transaction of the mark: a statement from the configuration.
//!
//! Its parameters are named (`:id`, `:payload` …). PostgreSQL numbers them and infers the type of each from where it
//! stands, so a handler writes into a `uuid`, a `jsonb` or a `bytea` column without a cast; values are sent as text, ids and
//! bytes as they are where they are wanted so.

use std::collections::HashMap;
use std::error::Error as StdError;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{Format, IsNull, ToSql, Type, to_sql_checked};

use super::super::PostgresStore;
use super::super::connection::{Transaction, repeat};
use super::super::error::Trouble;
use crate::column::headers_json;
use crate::statement::{PARAMETERS, check_shape};
use crate::{Arrival, Error, Work};

/// From so many messages on, PostgreSQL reads and plans the statement once for all instead of once for each.
const FEW: usize = 4;

/// What is done for each message in the transaction of its mark.
pub(super) enum Job {
    /// Nothing.
    Nothing,
    /// One statement, or why it cannot be one.
    Statement(Result<Arc<Statement>, String>),
}

/// A statement with numbered parameters.
#[derive(Debug)]
pub(super) struct Statement {
    sql: String,
    /// Which value each parameter has, and its type.
    parameters: Vec<(&'static str, Type)>,
}

/// Statements that were looked at: their types need be asked for once.
#[derive(Debug, Default)]
pub(in super::super) struct Statements(Mutex<HashMap<String, Arc<Statement>>>);

impl Statements {
    /// After a failure it is looked at again: a column may have another type by now.
    pub(super) fn forget(&self, work: &Work) {
        if let Work::Sql(sql) = work {
            self.0.lock().expect("nobody panics while a statement is copied").remove(sql);
        }
    }
}

/// Why work was not done.
pub(super) enum Fault {
    /// This message's.
    Message(String),
    /// No message could be worked on.
    Unusable(String),
    /// The transaction is over.
    Store(Trouble),
}

impl From<Trouble> for Fault {
    fn from(trouble: Trouble) -> Self {
        let Some(code) = trouble.code().map(|code| code.code().to_owned()) else {
            return Self::Store(trouble);
        };
        match &code[..2] {
            // What the values lead to: a constraint, a bad number, an exception that somebody raises.
            "21" | "22" | "23" | "27" | "44" | "P0" => Self::Message(Error::from(trouble).to_string()),
            // What the statement itself leads to.
            "0A" | "26" | "3F" | "42" => {
                Self::Unusable(format!("the handler's SQL cannot be used: {}", Error::from(trouble)))
            }
            _ => Self::Store(trouble),
        }
    }
}

impl PostgresStore {
    /// Whether `sql` is one statement that leaves the transaction alone and only uses the known parameters.
    pub(super) async fn check_sql(&self, sql: &str) -> Result<(), Error> {
        let refused = |why: String| Error::Refused(format!("the handler's SQL cannot be used: {why}"));
        check_shape(sql).map_err(refused)?;
        let (numbered, _) = number(sql).map_err(refused)?;
        let types = repeat(|| async {
            let tx = self.connections.transaction().await?;
            tx.begin_reading().await?;
            let types = tx.parameter_types(&numbered).await;
            let missing = types.as_ref().err().and_then(Trouble::code) == Some(&SqlState::UNDEFINED_TABLE);
            tx.end(types).await.map_err(|trouble| match trouble {
                trouble if missing => {
                    let reason = reason(trouble);
                    Trouble::Store(Error::Unavailable { reason, retry_after: Duration::from_secs(1) })
                }
                trouble if trouble.code().is_some_and(|code| code.code().starts_with("42")) => {
                    Trouble::Store(refused(reason(trouble)))
                }
                trouble => trouble,
            })
        })
        .await?;
        drop(types);
        Ok(())
    }

    /// The statement as PostgreSQL knows it, or why it cannot be used for any message.
    pub(super) async fn statement(&self, sql: &str) -> Result<Result<Arc<Statement>, String>, Error> {
        let known =
            self.statements.0.lock().expect("nobody panics while a statement is copied").get(sql).cloned();
        if let Some(known) = known {
            return Ok(Ok(known));
        }
        if let Err(error) = self.check_sql(sql).await {
            return match error {
                Error::Refused(why) => Ok(Err(why)),
                // A table that is not there yet: no message is to blame, and the rest of the store works.
                Error::Unavailable { reason, retry_after } if retry_after == Duration::from_secs(1) => {
                    Ok(Err(format!("the handler's SQL cannot be used: {reason}")))
                }
                other => Err(other),
            };
        }
        let (numbered, names) = number(sql).map_err(Error::Refused)?;
        let types = repeat(|| async {
            let tx = self.connections.transaction().await?;
            tx.begin_reading().await?;
            let types = tx.parameter_types(&numbered).await;
            tx.end(types).await
        })
        .await?;
        let statement =
            Arc::new(Statement { sql: numbered, parameters: names.into_iter().zip(types).collect() });
        self.statements
            .0
            .lock()
            .expect("nobody panics while a statement is copied")
            .insert(sql.to_owned(), statement.clone());
        Ok(Ok(statement))
    }
}

/// What PostgreSQL said, without our own words around it.
fn reason(trouble: Trouble) -> String {
    match trouble {
        Trouble::Database(error) => super::super::error::text(&error),
        other => Error::from(other).to_string(),
    }
}

impl Job {
    /// Does the work of all these, in order, in one trip. The first that fails ends it.
    pub(super) async fn run_all(
        &self,
        tx: &Transaction,
        group: &str,
        arrivals: &[&Arrival],
    ) -> Result<(), Fault> {
        let statement = match self {
            Self::Nothing => return Ok(()),
            Self::Statement(Ok(statement)) => statement,
            Self::Statement(Err(why)) => return Err(Fault::Unusable(why.clone())),
        };
        // Gone before the transaction is: a pooler may give the connection to somebody else then.
        let prepared = match arrivals.len() {
            0..FEW => None,
            _ => Some(tx.prepare(&statement.sql, &statement.types()).await?),
        };
        let runs = arrivals.iter().map(|arrival| statement.run(tx, prepared.as_ref(), group, arrival));
        let mut runs: Vec<Pin<Box<_>>> = runs.map(Box::pin).collect();
        let mut done: Vec<Option<Result<(), Trouble>>> = Vec::with_capacity(runs.len());
        // All are sent when they are first polled; the answers come in the same order.
        for run in &mut runs {
            let first = poll_fn(|context| Poll::Ready(run.as_mut().poll(context))).await;
            done.push(match first {
                Poll::Ready(result) => Some(result),
                Poll::Pending => None,
            });
        }
        // Every answer is waited for: the next statement must not meet one of these.
        for (run, done) in runs.into_iter().zip(&mut done) {
            if done.is_none() {
                *done = Some(run.await);
            }
        }
        for result in done.into_iter().flatten() {
            result?;
        }
        Ok(())
    }
}

impl Statement {
    fn types(&self) -> Vec<Type> {
        self.parameters.iter().map(|(_, type_)| type_.clone()).collect()
    }

    async fn run(
        &self,
        tx: &Transaction,
        prepared: Option<&tokio_postgres::Statement>,
        group: &str,
        arrival: &Arrival,
    ) -> Result<(), Trouble> {
        let values: Vec<Value> =
            self.parameters.iter().map(|(name, type_)| value(name, type_, group, arrival)).collect();
        if let Some(prepared) = prepared {
            let values: Vec<_> = values.iter().map(|value| value as &(dyn ToSql + Sync)).collect();
            return tx.run(prepared, &values).await;
        }
        let parameters: Vec<(&(dyn ToSql + Sync), Type)> = values
            .iter()
            .zip(&self.parameters)
            .map(|(value, (_, type_))| (value as &(dyn ToSql + Sync), type_.clone()))
            .collect();
        tx.query(&self.sql, &parameters).await?;
        Ok(())
    }
}

/// A value of a message.
#[derive(Debug)]
enum Value {
    /// As text, whatever type it becomes.
    Text(Option<Vec<u8>>),
    /// As the type has it.
    Binary(Bytes),
}

impl ToSql for Value {
    fn to_sql(&self, _: &Type, out: &mut BytesMut) -> Result<IsNull, Box<dyn StdError + Sync + Send>> {
        out.extend_from_slice(match self {
            Self::Text(None) => return Ok(IsNull::Yes),
            Self::Text(Some(text)) => text,
            Self::Binary(bytes) => bytes,
        });
        Ok(IsNull::No)
    }

    fn accepts(_: &Type) -> bool {
        true
    }

    fn encode_format(&self, _: &Type) -> Format {
        match self {
            Self::Text(_) => Format::Text,
            Self::Binary(_) => Format::Binary,
        }
    }

    to_sql_checked!();
}

fn value(name: &str, type_: &Type, group: &str, arrival: &Arrival) -> Value {
    let message = &arrival.message;
    if name == ":id" && *type_ == Type::UUID {
        return Value::Binary(Bytes::copy_from_slice(message.id.0.as_bytes()));
    }
    if name == ":payload" && *type_ == Type::BYTEA {
        return Value::Binary(message.payload.clone());
    }
    let text = |text: &str| Some(text.as_bytes().to_vec());
    let number = [Type::INT8, Type::INT4, Type::NUMERIC, Type::FLOAT8].contains(type_);
    let value = match name {
        ":id" => text(&message.id.to_string()),
        ":topic" => text(&message.topic),
        ":type" => message.kind.as_deref().and_then(text),
        ":key" => message.key.as_deref().and_then(text),
        ":payload" => Some(message.payload.to_vec()),
        ":headers" => text(&headers_json(message)),
        ":occurred_at" if number => text(&message.occurred_at.timestamp_millis().to_string()),
        ":occurred_at" => text(&message.occurred_at.to_rfc3339()),
        ":seq" => arrival.seq.and_then(|seq| text(&seq.to_string())),
        ":group" => text(group),
        _ => None,
    };
    match value {
        // As text a backslash would start an escape.
        Some(bytes) if *type_ == Type::BYTEA => Value::Binary(bytes.into()),
        value => Value::Text(value),
    }
}

/// `sql` with `$1`, `$2` … in the places of its named parameters, and their names. Each place has its own number, so
/// that one parameter may be a text here and JSON there.
fn number(sql: &str) -> Result<(String, Vec<&'static str>), String> {
    let mut out = String::with_capacity(sql.len());
    let mut names = Vec::new();
    let mut rest = sql;
    while let Some(first) = rest.chars().next() {
        let length = match first {
            '\'' => quoted(rest, '\'', out.ends_with(['e', 'E'])),
            '"' => quoted(rest, '"', false),
            '-' if rest.starts_with("--") => rest.find('\n').unwrap_or(rest.len()),
            '/' if rest.starts_with("/*") => rest[2..].find("*/").map_or(rest.len(), |end| end + 4),
            '$' => match dollar_quoted(rest) {
                Some(length) => length,
                None if rest[1..].starts_with(|c: char| c.is_ascii_digit()) => {
                    return Err(format!("it has a numbered parameter: use {}", PARAMETERS.join(", ")));
                }
                None => 1,
            },
            ':' if rest.starts_with("::") => 2,
            ':' => match parameter(rest) {
                0 => 1,
                length => {
                    let name = &rest[..length];
                    let known = PARAMETERS.iter().find(|known| **known == name);
                    let known = known.ok_or_else(|| {
                        format!("it has the parameter `{name}`: use {}", PARAMETERS.join(", "))
                    })?;
                    names.push(*known);
                    out.push_str(&format!("${}", names.len()));
                    rest = &rest[length..];
                    continue;
                }
            },
            other => other.len_utf8(),
        };
        out.push_str(&rest[..length]);
        rest = &rest[length..];
    }
    Ok((out, names))
}

/// How long a parameter's name is, with its colon; nothing for a bare colon (`[1:2]`).
fn parameter(rest: &str) -> usize {
    let name = &rest[1..];
    if !name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_') {
        return 0;
    }
    1 + name.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).unwrap_or(name.len())
}

/// How long a quoted text or name is; in an `E''` text a backslash keeps the quote after it from ending it.
fn quoted(rest: &str, quote: char, escapes: bool) -> usize {
    let mut skip = false;
    for (place, c) in rest.char_indices().skip(1) {
        if skip {
            skip = false;
        } else if c == '\\' && escapes {
            skip = true;
        } else if c == quote {
            return place + 1;
        }
    }
    rest.len()
}

/// How long a `$tag$ … $tag$` text is, if it is one.
fn dollar_quoted(rest: &str) -> Option<usize> {
    let end = 1 + rest[1..].find('$')?;
    let tag = &rest[..=end];
    let name = &tag[1..end];
    if name.starts_with(|c: char| c.is_ascii_digit())
        || !name.chars().all(|c| c.is_alphanumeric() || c == '_')
    {
        return None;
    }
    Some(rest[tag.len()..].find(tag).map_or(rest.len(), |at| at + 2 * tag.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_numbered_wherever_they_stand() {
        let cases = [
            ("SELECT :id", "SELECT $1", vec![":id"]),
            ("VALUES (:payload, :id,:key)", "VALUES ($1, $2,$3)", vec![":payload", ":id", ":key"]),
            ("SELECT :id::uuid, :id", "SELECT $1::uuid, $2", vec![":id", ":id"]),
            ("SELECT ':id', \":key\", :id", "SELECT ':id', \":key\", $1", vec![":id"]),
            ("SELECT 'it''s :id' -- :id\n, :id", "SELECT 'it''s :id' -- :id\n, $1", vec![":id"]),
            ("SELECT E'\\':id' /* :id */", "SELECT E'\\':id' /* :id */", vec![]),
            ("SELECT $$:id$$, $a$ :id $a$, :id", "SELECT $$:id$$, $a$ :id $a$, $1", vec![":id"]),
            ("SELECT a[1:2], :seq", "SELECT a[1:2], $1", vec![":seq"]),
        ];
        for (sql, expected, names) in cases {
            assert_eq!(number(sql), Ok((expected.to_owned(), names)), "{sql}");
        }
    }

    #[test]
    fn what_is_no_parameter_of_ours_is_refused() {
        for (sql, expected) in
            [("SELECT :colour", ":colour"), ("SELECT $1", "numbered"), ("SELECT :idx", ":idx")]
        {
            let error = number(sql).expect_err(sql);
            assert!(error.contains(expected) && error.contains(":payload"), "{error}");
        }
    }
}
