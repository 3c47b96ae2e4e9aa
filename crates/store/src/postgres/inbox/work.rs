//! Work that runs in the transaction of the mark: a statement from the configuration.
//!
//! Its parameters are named (`:id`, `:payload` …). PostgreSQL numbers them and infers the type of each from where it
//! stands, so a handler writes into a `uuid`, a `jsonb` or a `bytea` column without a cast; values are sent as text, ids and
//! bytes as they are where they are wanted so.

use std::borrow::Cow;
use std::collections::HashMap;
use std::error::Error as StdError;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::BytesMut;
use futures::future::{BoxFuture, FutureExt};
use futures::stream::{self, StreamExt, TryStreamExt};
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{Format, IsNull, ToSql, Type, to_sql_checked};

use super::super::PostgresStore;
use super::super::connection::{Transaction, repeat};
use super::super::error::Trouble;
use super::each::Each;
use super::number::number;
use crate::column::headers_json;
use crate::statement::check_shape;
use crate::{Arrival, Error, Work};

/// The bytes of payloads that are handed over at once, about.
const PORTION_BYTES: usize = 1024 * 1024;

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
    parameters: Vec<Parameter>,
    /// The same for many messages, where that can be.
    each: Option<Each>,
}

/// Which value a parameter has, and its type.
pub(super) type Parameter = (&'static str, Type);

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
    /// Perhaps no message can be worked on.
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
            // What the statement itself leads to, with some values or with any.
            "0A" | "26" | "3F" | "42" => {
                Self::Unusable(format!("the handler's SQL cannot be used: {}", Error::from(trouble)))
            }
            // It took too long, or somebody stopped it: for this message or for any.
            "57" if code == SqlState::QUERY_CANCELED.code() => {
                Self::Unusable(format!("the handler's SQL was stopped: {}", Error::from(trouble)))
            }
            // What the server, the connection or the transaction leads to.
            "00" | "08" | "0B" | "24" | "25" | "28" | "2D" | "34" | "3B" | "3D" | "40" | "53" | "55"
            | "57" | "58" | "72" | "F0" | "HV" | "XX" => Self::Store(trouble),
            // What the values lead to: a constraint, a bad number, a value that is too deep or too long, an exception that
            // somebody raises, with a code of its own too.
            _ => Self::Message(Error::from(trouble).to_string()),
        }
    }
}

impl PostgresStore {
    /// Whether `sql` is one statement that leaves the transaction alone and only uses the known parameters.
    pub(super) async fn check_sql(&self, sql: &str) -> Result<(), Error> {
        self.looked_at(sql).await.map(drop)
    }

    async fn looked_at(&self, sql: &str) -> Result<Statement, Error> {
        let refused = |why: String| Error::Refused(format!("the handler's SQL cannot be used: {why}"));
        check_shape(sql).map_err(refused)?;
        let (numbered, names) = number(sql, |place| format!("${place}")).map_err(refused)?;
        let (types, answers) = repeat(|| async {
            let tx = self.connections.transaction().await?;
            tx.begin_reading().await?;
            let shape = tx.shape(&numbered).await;
            let missing = shape.as_ref().err().and_then(Trouble::code) == Some(&SqlState::UNDEFINED_TABLE);
            tx.end(shape).await.map_err(|trouble| match trouble {
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
        let parameters: Vec<Parameter> = names.into_iter().zip(types).collect();
        let each = Each::new(sql, &parameters, answers).map_err(refused)?;
        Ok(Statement { sql: numbered, parameters, each })
    }

    /// The statement as PostgreSQL knows it, or why it cannot be used for any message.
    pub(super) async fn statement(&self, sql: &str) -> Result<Result<Arc<Statement>, String>, Error> {
        let known = || self.statements.0.lock().expect("nobody panics while a statement is copied");
        if let Some(known) = known().get(sql).cloned() {
            return Ok(Ok(known));
        }
        match self.looked_at(sql).await {
            Ok(statement) => {
                let statement = Arc::new(statement);
                known().insert(sql.to_owned(), Arc::clone(&statement));
                Ok(Ok(statement))
            }
            Err(Error::Refused(why)) => Ok(Err(why)),
            // A table that is not there yet: no message is to blame, and the rest of the store works.
            Err(Error::Unavailable { reason, retry_after }) if retry_after == Duration::from_secs(1) => {
                Ok(Err(format!("the handler's SQL cannot be used: {reason}")))
            }
            Err(other) => Err(other),
        }
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
    /// Does the work of one message.
    pub(super) async fn run(&self, tx: &Transaction, group: &str, arrival: &Arrival) -> Result<(), Fault> {
        match self {
            Self::Nothing => Ok(()),
            Self::Statement(Ok(statement)) => Ok(statement.run(tx, group, arrival).await?),
            Self::Statement(Err(why)) => Err(Fault::Unusable(why.clone())),
        }
    }
}

impl Statement {
    async fn run(&self, tx: &Transaction, group: &str, arrival: &Arrival) -> Result<(), Trouble> {
        let values: Vec<Value<'_>> =
            self.parameters.iter().map(|(name, type_)| value(name, type_, group, arrival)).collect();
        let parameters: Vec<(&(dyn ToSql + Sync), Type)> = values
            .iter()
            .zip(&self.parameters)
            .map(|(value, (_, type_))| (value as &(dyn ToSql + Sync), type_.clone()))
            .collect();
        // Whatever it answers: asking for the types of an answer would hide why the statement failed.
        tx.execute(&self.sql, &parameters).await?;
        Ok(())
    }

    /// The statement for many messages at once, if it may be run so.
    pub(super) fn together(&self) -> Option<&Each> {
        self.each.as_ref().filter(|each| each.most() > 1)
    }

    /// Does the work of all these, in order. `false` when some of it failed.
    pub(super) async fn run_each(
        &self,
        tx: &Transaction,
        each: &Each,
        group: &str,
        arrivals: &[&Arrival],
    ) -> Result<bool, Trouble> {
        let most = each.most();
        let portions = portions(arrivals, most).into_iter();
        let portions: Vec<BoxFuture<'_, _>> =
            portions.map(|portion| self.run_portion(tx, each, group, portion).boxed()).collect();
        // Two at a time: one is made while PostgreSQL works on the other.
        let Err(trouble) = stream::iter(portions).buffered(2).try_collect::<()>().await else {
            return Ok(true);
        };
        // All of them together took too long for one statement: each may not.
        if trouble.code() == Some(&SqlState::QUERY_CANCELED) {
            each.shrink(most.min(arrivals.len()));
            return Ok(false);
        }
        match Fault::from(trouble) {
            Fault::Message(_) => Ok(false),
            Fault::Unusable(_) => {
                each.refuse();
                Ok(false)
            }
            Fault::Store(trouble) => Err(trouble),
        }
    }

    async fn run_portion(
        &self,
        tx: &Transaction,
        each: &Each,
        group: &str,
        arrivals: &[&Arrival],
    ) -> Result<(), Trouble> {
        let columns = self.parameters.iter().map(|(name, type_)| {
            let values = arrivals.iter().map(|arrival| value(name, type_, group, arrival));
            values.collect::<Vec<_>>()
        });
        each.run(tx, columns.collect()).await
    }
}

/// Messages in portions that are handed over at once, of `most` each.
fn portions<'a, 'b>(arrivals: &'b [&'a Arrival], most: usize) -> Vec<&'b [&'a Arrival]> {
    let mut portions = Vec::new();
    let (mut begin, mut bytes) = (0, 0);
    for (place, arrival) in arrivals.iter().enumerate() {
        bytes += arrival.message.payload.len();
        if bytes >= PORTION_BYTES || place + 1 - begin == most || place + 1 == arrivals.len() {
            portions.push(&arrivals[begin..=place]);
            (begin, bytes) = (place + 1, 0);
        }
    }
    portions
}

/// A value of a message.
#[derive(Debug)]
enum Value<'a> {
    /// As text, whatever type it becomes.
    Text(Option<Cow<'a, [u8]>>),
    /// As the type has it.
    Binary(Cow<'a, [u8]>),
}

impl ToSql for Value<'_> {
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

fn value<'a>(name: &str, type_: &Type, group: &'a str, arrival: &'a Arrival) -> Value<'a> {
    let message = &arrival.message;
    if name == ":id" && *type_ == Type::UUID {
        return Value::Binary(message.id.0.as_bytes().into());
    }
    let text = |text: &'a str| Some(Cow::from(text.as_bytes()));
    let made = |text: String| Some(Cow::from(text.into_bytes()));
    let number = [Type::INT8, Type::INT4, Type::NUMERIC, Type::FLOAT8].contains(type_);
    let value = match name {
        ":id" => made(message.id.to_string()),
        ":topic" => text(&message.topic),
        ":type" => message.kind.as_deref().and_then(text),
        ":key" => message.key.as_deref().and_then(text),
        ":payload" => Some(Cow::from(&message.payload[..])),
        ":headers" => made(headers_json(message)),
        ":occurred_at" if number => made(message.occurred_at.timestamp_millis().to_string()),
        ":occurred_at" => made(message.occurred_at.to_rfc3339()),
        ":seq" => arrival.seq.and_then(|seq| made(seq.to_string())),
        ":group" => text(group),
        _ => None,
    };
    match value {
        // As text a backslash would start an escape.
        Some(bytes) if *type_ == Type::BYTEA => Value::Binary(bytes),
        value => Value::Text(value),
    }
}
