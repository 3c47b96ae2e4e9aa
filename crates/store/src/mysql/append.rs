//! Writing messages: in a transaction of ours, or in one of the application's.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use async_trait::async_trait;
use message::{Invalid, Message, MessageId, check_topic};
use mysql_async::prelude::Queryable;
use mysql_async::{Error as Driver, Row, Value};

use super::MysqlStore;
use super::error::Trouble;
use super::row::{Read, at};
use super::session::{Tx, commit};
use crate::column::{groups_json, headers_json};
use crate::{Append, Appended, Error, NewMessage, Once, Turned};

/// What becomes of each message of a call.
type Results = Vec<Option<Result<Appended, Turned>>>;

/// Bytes and messages that go into one statement, at most: far below what any server takes.
const STATEMENT_BYTES: usize = 2 << 20;
const STATEMENT_ROWS: usize = 1_000;

/// What the driver calls a duplicate in a unique index.
const DUPLICATE: u16 = 1062;

#[async_trait]
impl Append for MysqlStore {
    async fn append(&self, messages: Vec<NewMessage>) -> Result<Vec<Result<Appended, Turned>>, Error> {
        let messages = Arc::new(messages);
        let results = self
            .run(move |store| {
                let messages = Arc::clone(&messages);
                async move { store.append_all(&messages).await }
            })
            .await?;
        self.ring();
        Ok(results)
    }
}

/// Writes `message` in the transaction that is open on `connection`, for applications that use `mysql_async`.
///
/// # Errors
/// What the driver says; a message whose id is taken violates `outbox_id`.
///
/// # Cancel safety
/// A call that is dropped may have written the message into the transaction: roll it back.
pub async fn append(connection: &mut impl Queryable, message: &Message) -> Result<(), Driver> {
    connection.exec_drop(include_str!("append.sql"), values(message, None)).await
}

/// Like [`append`], naming the groups that must acknowledge. `once` is not looked at: the caller's own
/// transaction decides whether it writes.
///
/// # Errors
/// As [`append`].
///
/// # Cancel safety
/// As [`append`].
pub async fn append_for(connection: &mut impl Queryable, new: &NewMessage) -> Result<(), Driver> {
    let row = values(&new.message, new.ack_groups.as_deref());
    connection.exec_drop(include_str!("append.sql"), row).await
}

/// The values of one row, in the order of `append.sql`.
fn values(message: &Message, groups: Option<&[String]>) -> Vec<Value> {
    vec![
        message.id.to_string().into(),
        message.topic.as_str().into(),
        message.kind.as_deref().into(),
        message.key.as_deref().into(),
        Value::Bytes(message.payload.to_vec()),
        message.content_type.as_str().into(),
        headers_json(message).into(),
        at(message.occurred_at.timestamp_millis()),
        groups.map(groups_json).into(),
    ]
}

/// Whether the columns can hold it.
fn check(new: &NewMessage) -> Result<(), Invalid> {
    let message = &new.message;
    check_topic(&message.topic)?;
    let fits = |field, text: Option<&str>, limit| match text.map_or(0, str::len) {
        size if size > limit => Err(Invalid::TooLong { field, size, limit }),
        _ => Ok(()),
    };
    fits("key", message.key.as_deref(), 1_024)?;
    fits("type", message.kind.as_deref(), 255)?;
    fits("contentType", Some(&message.content_type), 255)?;
    fits("idempotency key", new.once.as_ref().map(|once| once.key.as_str()), 1_024)
}

fn is_duplicate(error: &Driver) -> bool {
    matches!(error, Driver::Server(error) if error.code == DUPLICATE)
}

/// `start` with a row of placeholders for each of `rows`.
fn rows(start: &str, row: &str, rows: usize) -> String {
    let mut sql = String::with_capacity(start.len() + rows * (row.len() + 2));
    sql.push_str(start);
    for number in 0..rows {
        sql.push_str(if number == 0 { row } else { ", " });
        if number > 0 {
            sql.push_str(row);
        }
    }
    sql
}

impl MysqlStore {
    async fn append_all(&self, messages: &[NewMessage]) -> Result<Vec<Result<Appended, Turned>>, Trouble> {
        let mut results: Results =
            messages.iter().map(|new| check(new).err().map(|invalid| Err(invalid.into()))).collect();
        let mut open: Vec<usize> = (0..messages.len()).filter(|place| results[*place].is_none()).collect();
        if self.append_plainly(messages, &open, &mut results).await? {
            return Ok(results.into_iter().flatten().collect());
        }
        let mut writer = Writer { tx: self.begin().await?, messages, results, unique: self.unique };
        // A name or an id that comes twice in one call is looked at again when the first has its result.
        while !open.is_empty() {
            open = writer.round(&open).await?;
        }
        let Writer { tx, results, .. } = writer;
        commit(tx).await?;
        Ok(results.into_iter().flatten().collect())
    }

    /// Writes what settlements carry. One whose id is taken is there already.
    pub(super) async fn write_beside(
        &self,
        tx: Tx<'static>,
        messages: &[NewMessage],
    ) -> Result<Tx<'static>, Trouble> {
        // The rest was in this store before.
        for new in messages {
            check_topic(&new.message.topic).map_err(|invalid| Error::Refused(invalid.to_string()))?;
        }
        let mut writer = Writer { tx, messages, results: vec![None; messages.len()], unique: self.unique };
        let mut open: Vec<usize> = (0..messages.len()).collect();
        while !open.is_empty() {
            open = writer.round(&open).await?;
        }
        Ok(writer.tx)
    }

    /// The usual call is one statement, and needs no transaction around it. `false` when it is not so simple.
    async fn append_plainly(
        &self,
        messages: &[NewMessage],
        open: &[usize],
        results: &mut Results,
    ) -> Result<bool, Trouble> {
        let plain = self.unique && open.iter().all(|place| messages[*place].once.is_none());
        if open.is_empty() {
            return Ok(true);
        }
        if !plain || chunks(messages, open).len() > 1 {
            return Ok(false);
        }
        let mut connection = self.connection().await?;
        match insert(&mut connection, messages, open).await {
            Ok(()) => {}
            Err(error) if is_duplicate(&error) => return Ok(false),
            Err(error @ Driver::Server(_)) => return Err(error.into()),
            // Nobody knows whether it was written.
            Err(error) => return Err(Trouble::Final(error.into())),
        }
        for place in open {
            results[*place] = Some(Ok(Appended::New(messages[*place].message.id)));
        }
        Ok(true)
    }
}

/// The messages at `places`, cut into what one statement takes.
fn chunks(messages: &[NewMessage], places: &[usize]) -> Vec<Vec<usize>> {
    let mut chunks: Vec<Vec<usize>> = Vec::new();
    let mut bytes = 0;
    for place in places {
        let size = messages[*place].message.size();
        match chunks.last_mut() {
            Some(chunk) if chunk.len() < STATEMENT_ROWS && bytes + size <= STATEMENT_BYTES => {
                bytes += size;
                chunk.push(*place);
            }
            _ => {
                bytes = size;
                chunks.push(vec![*place]);
            }
        }
    }
    chunks
}

async fn insert(
    connection: &mut impl Queryable,
    messages: &[NewMessage],
    places: &[usize],
) -> Result<(), Driver> {
    let (start, row) = include_str!("append.sql").trim_end().split_once("VALUES ").expect("it has values");
    let sql = rows(&format!("{start}VALUES "), row, places.len());
    let values: Vec<Value> = places
        .iter()
        .flat_map(|place| values(&messages[*place].message, messages[*place].ack_groups.as_deref()))
        .collect();
    connection.exec_drop(sql, values).await
}

/// One call, in its transaction.
struct Writer<'a> {
    tx: Tx<'static>,
    messages: &'a [NewMessage],
    results: Results,
    /// The table itself refuses an id that is taken.
    unique: bool,
}

impl Writer<'_> {
    /// Writes the first of each name and id. Answers those that must wait for it.
    async fn round(&mut self, open: &[usize]) -> Result<Vec<usize>, Trouble> {
        let (mut ids, mut keys) = (HashSet::new(), HashSet::new());
        let (mut first, mut later) = (Vec::new(), Vec::new());
        for place in open {
            let new = &self.messages[*place];
            let fresh_key = new.once.as_ref().is_none_or(|once| keys.insert(once.key.as_str()));
            let fresh = fresh_key && ids.insert(new.message.id);
            if fresh { &mut first } else { &mut later }.push(*place);
        }
        self.remember(&first).await?;
        first.retain(|place| self.results[*place].is_none());
        for chunk in chunks(self.messages, &first) {
            self.store(chunk).await?;
        }
        Ok(later)
    }

    fn once(&self, place: usize) -> Option<&Once> {
        self.messages[place].once.as_ref()
    }

    /// Takes the names of those at `places`, or says what they were taken for before.
    async fn remember(&mut self, places: &[usize]) -> Result<(), Trouble> {
        let mut named: Vec<usize> =
            places.iter().copied().filter(|place| self.once(*place).is_some()).collect();
        // In one order for all: two calls with the same names wait for each other instead of locking each other out.
        named.sort_by_key(|place| self.once(*place).map(|once| once.key.clone()));
        while !named.is_empty() {
            let sql = rows(
                "INSERT INTO outbox_idempotency_keys (`key`, fingerprint, message_id, created_at) VALUES ",
                "(?, ?, ?, utc_timestamp(3))",
                named.len(),
            );
            let values: Vec<Value> = named
                .iter()
                .filter_map(|place| Some((self.once(*place)?, self.messages[*place].message.id)))
                .flat_map(|(once, id)| -> [Value; 3] {
                    [once.key.as_bytes().into(), once.fingerprint[..].into(), id.to_string().into()]
                })
                .collect();
            match self.tx.exec_drop(sql, values).await {
                Ok(()) => return Ok(()),
                Err(error) if is_duplicate(&error) => {}
                Err(error) => return Err(error.into()),
            }
            let earlier = self.earlier(&named).await?;
            named.retain(|place| {
                let once = self.messages[*place].once.as_ref();
                match once.and_then(|once| Some((once, earlier.get(once.key.as_bytes())?))) {
                    None => true,
                    Some((once, (fingerprint, id))) => {
                        let same = once.fingerprint[..] == fingerprint[..];
                        self.results[*place] =
                            Some(if same { Ok(Appended::Repeated(*id)) } else { Err(Turned::KeyTaken) });
                        false
                    }
                }
            });
        }
        Ok(())
    }

    /// What the names of those at `places` were taken for.
    async fn earlier(&mut self, places: &[usize]) -> Result<HashMap<Vec<u8>, (Vec<u8>, MessageId)>, Trouble> {
        let start = "SELECT `key`, fingerprint, message_id FROM outbox_idempotency_keys WHERE `key` IN (";
        let sql = rows(start, "?", places.len()) + ")";
        let keys: Vec<Value> =
            places.iter().filter_map(|place| Some(self.once(*place)?.key.as_bytes().into())).collect();
        let mut earlier = HashMap::new();
        for mut row in self.tx.exec::<Row, _, _>(sql, keys).await? {
            earlier.insert(row.bytes(0)?, (row.bytes(1)?, row.id(2)?));
        }
        Ok(earlier)
    }

    async fn store(&mut self, mut places: Vec<usize>) -> Result<(), Trouble> {
        if !self.unique {
            self.turn_away(&mut places).await?;
        }
        while !places.is_empty() {
            match insert(&mut self.tx, self.messages, &places).await {
                Ok(()) => {
                    for place in places {
                        self.results[place] = Some(Ok(Appended::New(self.messages[place].message.id)));
                    }
                    return Ok(());
                }
                Err(error) if is_duplicate(&error) => self.turn_away(&mut places).await?,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Takes those out of `places` whose id belongs to another message; their names are free again.
    async fn turn_away(&mut self, places: &mut Vec<usize>) -> Result<(), Trouble> {
        let sql = rows("SELECT id FROM outbox_events WHERE id IN (", "?", places.len()) + ")";
        let ids: Vec<Value> =
            places.iter().map(|place| self.messages[*place].message.id.to_string().into()).collect();
        let mut taken = HashSet::new();
        for mut row in self.tx.exec::<Row, _, _>(sql, ids).await? {
            taken.insert(row.id(0)?);
        }
        let gone: Vec<usize> = places
            .iter()
            .copied()
            .filter(|place| taken.contains(&self.messages[*place].message.id))
            .collect();
        places.retain(|place| !gone.contains(place));
        let names: Vec<Value> =
            gone.iter().filter_map(|place| Some(self.once(*place)?.key.as_bytes().into())).collect();
        if !names.is_empty() {
            let sql = rows("DELETE FROM outbox_idempotency_keys WHERE `key` IN (", "?", names.len()) + ")";
            self.tx.exec_drop(sql, names).await?;
        }
        for place in gone {
            self.results[place] = Some(Err(Turned::IdTaken(self.messages[place].message.id)));
        }
        Ok(())
    }
}
