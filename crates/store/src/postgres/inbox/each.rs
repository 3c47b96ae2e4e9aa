//! One statement for many messages: PostgreSQL itself goes from one to the next.
//!
//! A statement that is sent for each message costs more in sending, binding and answering than in its work. So the values of
//! many are sent as arrays, one for each parameter, to a cursor, and a block of PL/pgSQL takes them from there: a block cannot
//! have parameters of its own. Nothing is made that outlives the transaction, so any role may do it, behind a pooler too.
//!
//! The names that the block gives to values are such that no column has them.

use std::sync::atomic::{AtomicUsize, Ordering};

use tokio_postgres::types::{Kind, ToSql, Type};

use super::super::connection::Transaction;
use super::super::error::Trouble;
use super::number::number;
use super::work::Parameter;

/// Messages that are handed over at once, at most.
const MOST: usize = 1_000;

/// A statement in a loop.
#[derive(Debug)]
pub(super) struct Each {
    /// Holds the arrays.
    cursor: String,
    arrays: Vec<Type>,
    /// Runs the statement with each of their values.
    block: String,
    /// Messages in a block at most: fewer after a block that took too long, none where PostgreSQL does not take it in one.
    most: AtomicUsize,
}

impl Each {
    /// `sql` with these parameters; `answers` says whether it has rows for an answer. Nothing where it must be run for one
    /// message at a time: there is no parameter, or a value of one would be another in a block. A domain's length cuts what is
    /// cast and refuses what is sent, and a composite value is taken apart by the loop.
    pub(super) fn new(sql: &str, parameters: &[Parameter], answers: bool) -> Result<Option<Self>, String> {
        let (statement, _) = number(sql, |place| format!("postrider_value_{place}"))?;
        let differs = |(_, type_): &Parameter| matches!(type_.kind(), Kind::Domain(_) | Kind::Composite(_));
        if parameters.is_empty() || parameters.iter().any(differs) {
            return Ok(None);
        }
        let arrays: Vec<Type> = parameters.iter().map(array).collect();
        let list = |item: &dyn Fn(usize, String, String) -> String| {
            let items = parameters.iter().zip(&arrays).enumerate();
            let items = items.map(|(place, ((_, one), all))| item(place + 1, name(one), name(all)));
            items.collect::<Vec<_>>()
        };
        let cursor = list(&|place, _, all| format!("${place}::{all}")).join(", ");
        let declared = list(&|place, one, all| {
            format!("postrider_values_{place} {all}; postrider_value_{place} {one};")
        });
        let declared = declared.join("\n");
        let fetched = list(&|place, _, _| format!("postrider_values_{place}")).join(", ");
        let values = list(&|place, _, _| format!("postrider_value_{place}")).join(", ");
        let unnested = list(&|place, one, _| format!("unnest(postrider_values_{place})::{one}")).join(", ");
        // A newline: the statement may end in a comment.
        let work = match answers {
            true => format!("FOR postrider_answer IN {statement}\nLOOP END LOOP;"),
            false => format!("{statement}\n;"),
        };
        let body = format!(
            "#variable_conflict use_column
             DECLARE postrider_messages refcursor := 'postrider_messages'; postrider_answer record;
             {declared}
             BEGIN
             FETCH postrider_messages INTO {fetched};
             CLOSE postrider_messages;
             FOR {values} IN SELECT {unnested} LOOP
             {work}
             END LOOP;
             END"
        );
        let tag = (0..).map(|number| format!("$postrider{number}$")).find(|tag| !body.contains(tag.as_str()));
        let tag = tag.unwrap_or_default();
        Ok(Some(Self {
            cursor: format!("DECLARE postrider_messages CURSOR FOR SELECT {cursor}"),
            arrays,
            block: format!("DO {tag}\n{body}\n{tag}"),
            most: AtomicUsize::new(MOST),
        }))
    }

    /// For how many messages it may be run at once.
    pub(super) fn most(&self) -> usize {
        self.most.load(Ordering::Relaxed)
    }

    /// From now on it is run for one message at a time.
    pub(super) fn refuse(&self) {
        self.most.store(0, Ordering::Relaxed);
    }

    /// So many took too long together.
    pub(super) fn shrink(&self, were: usize) {
        self.most.fetch_min(were / 2, Ordering::Relaxed);
    }

    /// Runs it with the values of each parameter.
    pub(super) async fn run<V: ToSql + Sync>(
        &self,
        tx: &Transaction,
        columns: Vec<Vec<V>>,
    ) -> Result<(), Trouble> {
        let parameters = columns.iter().zip(&self.arrays);
        let parameters: Vec<(&(dyn ToSql + Sync), Type)> =
            parameters.map(|(values, type_)| (values as &(dyn ToSql + Sync), type_.clone())).collect();
        // Both are on their way before the first answer.
        let (opened, done) =
            tokio::join!(biased; tx.execute(&self.cursor, &parameters), tx.batch(&self.block));
        opened?;
        done
    }
}

/// How the values of a parameter are sent: as text, unless [`value`](super::work) has them as they are.
fn array((name, type_): &Parameter) -> Type {
    match *type_ {
        Type::UUID if *name == ":id" => Type::UUID_ARRAY,
        Type::BYTEA => Type::BYTEA_ARRAY,
        _ => Type::TEXT_ARRAY,
    }
}

/// A type's name in a statement.
fn name(type_: &Type) -> String {
    let quoted = |name: &str| format!("\"{}\"", name.replace('"', "\"\""));
    format!("{}.{}", quoted(type_.schema()), quoted(type_.name()))
}
