//! Closures that work in transactions of the application's own sqlx pool, together with the marks.
//!
//! The pool and the inbox must be of the same database. What the closure wrote and the mark that says so are then
//! one transaction: a crash leaves both or neither, and the work of a message is done once.
//!
//! Messages share a transaction while that goes well, because a commit is dearer than most work. A closure that fails takes
//! what the others did back with it; each of them then has a transaction of its own. [`Transactional::alone`] gives each
//! one from the start.

#[cfg(feature = "mysql")]
mod mysql;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "sqlite")]
mod sqlite;

use std::sync::Arc;
use std::time::Instant;

use async_trait::async_trait;
use futures::future::BoxFuture;
use message::{Message, MessageId};
use sqlx::error::DatabaseError;
use sqlx::{Database, Pool, Transaction};
use store::{Arrival, Handled};
use tokio::sync::Mutex;
use tracing::debug;

use crate::handler::retry;
use crate::{Handle, Handler, Together, Transact};

/// What went wrong in a closure. It is rolled back and tried again, unless it is [`Permanent`].
pub type Failure = Box<dyn std::error::Error + Send + Sync>;

/// What a closure returns.
pub type Outcome<'a> = BoxFuture<'a, Result<(), Failure>>;

/// Times that a transaction is begun for a message whose rows others have locked.
const TRIES: usize = 3;

/// A failure that no later try can mend: the message is Dead at once.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Permanent(pub String);

/// Whose doing an error of a database is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blame {
    /// The database's: no message could be worked on now.
    Database,
    /// That of other transactions: the same one again may succeed at once.
    Others,
    /// The message's, or the closure's.
    Message,
}

/// A database in whose transactions marks can be made: SQLite, PostgreSQL, MySQL and MariaDB.
///
/// # Contract
/// 1. [`once`](Self::once) and [`once_all`](Self::once_all) make marks that exist if and when the transaction commits. Of two
///    transactions with the same message one waits for the other.
/// 2. [`once_all`](Self::once_all) answers `true` if it made all of them.
#[async_trait]
pub trait Marks: Database {
    /// Whether one transaction at a time can write.
    const ONE_WRITER: bool;

    /// Begins a transaction that will write.
    async fn begin(pool: &Pool<Self>) -> Result<Transaction<'static, Self>, sqlx::Error>;

    /// Marks one message. `false`: it was done before.
    async fn once(
        connection: &mut Self::Connection,
        group: &str,
        arrival: &Arrival,
    ) -> Result<bool, sqlx::Error>;

    /// Marks all of these. `false`: roll back, and mark one by one.
    async fn once_all(
        connection: &mut Self::Connection,
        group: &str,
        arrivals: &[&Arrival],
    ) -> Result<bool, sqlx::Error>;

    /// Acknowledges a message to its producer, whose outbox is in the same database.
    async fn acknowledge(
        connection: &mut Self::Connection,
        group: &str,
        id: MessageId,
    ) -> Result<(), sqlx::Error>;

    /// Whose doing what the database said is.
    fn blame(error: &dyn DatabaseError) -> Blame;
}

/// Runs a closure in a transaction with the mark.
///
/// The closure may be run again for the same message after its transaction was rolled back: because another message failed
/// with which it shared one, because others had locked its rows (also where a group handles at most once), after a crash. What
/// it does elsewhere than in its connection then happens again.
///
/// ```no_run
/// # fn example(pool: sqlx::SqlitePool) {
/// use inbox::sqlx::Transactional;
///
/// let handler = Transactional::new(pool, |connection, message| {
///     Box::pin(async move {
///         sqlx::query("INSERT INTO charges (order_id) VALUES (?)")
///             .bind(message.key.as_deref())
///             .execute(connection)
///             .await?;
///         Ok(())
///     })
/// })
/// .handler();
/// # let _ = handler; }
/// ```
pub struct Transactional<DB: Database, F> {
    pool: Pool<DB>,
    work: F,
    acknowledge: bool,
    alone: bool,
    /// Where there is one writer: waiting here is fair, waiting for its lock is not.
    turn: Mutex<()>,
}

impl<DB, F> Transactional<DB, F>
where
    DB: Marks,
    F: for<'a> Fn(&'a mut DB::Connection, &'a Message) -> Outcome<'a> + Send + Sync + 'static,
{
    /// Runs `work` for each message in a transaction of `pool`.
    pub fn new(pool: Pool<DB>, work: F) -> Self {
        Self { pool, work, acknowledge: false, alone: false, turn: Mutex::default() }
    }

    /// Acknowledges in the same transaction too: the database is the producer's.
    #[must_use]
    pub fn acknowledging(mut self) -> Self {
        self.acknowledge = true;
        self
    }

    /// Gives each message a transaction of its own: where closures lock what other parts of the application wait for, or lock
    /// much, in no order.
    #[must_use]
    pub fn alone(mut self) -> Self {
        self.alone = true;
        self
    }

    /// The handler for a [`Group`](crate::Group).
    pub fn handler(self) -> Handler {
        if self.alone { Handler::Custom(Arc::new(Alone(self))) } else { Handler::Transact(Arc::new(self)) }
    }

    /// Does the work of all of these and marks them. `false`: nothing was done. `open` says since when the transaction is.
    async fn transact(
        &self,
        group: &str,
        arrivals: &[&Arrival],
        open: &mut Option<Instant>,
    ) -> Result<bool, Failure> {
        let _turn = if DB::ONE_WRITER { Some(self.turn.lock().await) } else { None };
        let mut transaction = DB::begin(&self.pool).await?;
        *open = Some(Instant::now());
        let new = match arrivals {
            [one] => DB::once(&mut transaction, group, one).await?,
            all => DB::once_all(&mut transaction, group, all).await?,
        };
        if !new {
            transaction.rollback().await?;
            return Ok(false);
        }
        for arrival in arrivals {
            (self.work)(&mut transaction, &arrival.message).await?;
            if self.acknowledge {
                DB::acknowledge(&mut transaction, group, arrival.message.id).await?;
            }
        }
        transaction.commit().await?;
        Ok(true)
    }
}

impl<DB, F> From<Transactional<DB, F>> for Handler
where
    DB: Marks,
    F: for<'a> Fn(&'a mut DB::Connection, &'a Message) -> Outcome<'a> + Send + Sync + 'static,
{
    fn from(transactional: Transactional<DB, F>) -> Self {
        transactional.handler()
    }
}

#[async_trait]
impl<DB, F> Transact for Transactional<DB, F>
where
    DB: Marks,
    F: for<'a> Fn(&'a mut DB::Connection, &'a Message) -> Outcome<'a> + Send + Sync + 'static,
{
    async fn all(&self, group: &str, arrivals: &[&Arrival]) -> Together {
        let mut open = None;
        let done = self.transact(group, arrivals, &mut open).await.unwrap_or_else(|failure| {
            debug!(group, %failure, messages = arrivals.len(), "not together; one by one");
            false
        });
        Together { done, open: open.map(|since| since.elapsed()).unwrap_or_default() }
    }

    async fn one(&self, group: &str, arrival: &Arrival) -> Handled {
        let mut tries = 1..=TRIES;
        loop {
            tries.next();
            // Not new: it was done before.
            let Err(failure) = self.transact(group, &[arrival], &mut None).await else {
                return Handled::Done;
            };
            let error = failure.to_string();
            if failure.is::<Permanent>() {
                return Handled::Dead { error };
            }
            match failure.downcast_ref::<sqlx::Error>().map_or(Blame::Message, blame::<DB>) {
                Blame::Database => return Handled::Unavailable { error },
                Blame::Others if !tries.is_empty() => {}
                Blame::Others | Blame::Message => return retry(error),
            }
        }
    }
}

/// Each message in a transaction of its own.
struct Alone<DB: Database, F>(Transactional<DB, F>);

#[async_trait]
impl<DB, F> Handle for Alone<DB, F>
where
    DB: Marks,
    F: for<'a> Fn(&'a mut DB::Connection, &'a Message) -> Outcome<'a> + Send + Sync + 'static,
{
    async fn handle(&self, group: &str, arrival: &Arrival) -> Handled {
        self.0.one(group, arrival).await
    }
}

/// Whose doing an error is.
fn blame<DB: Marks>(error: &sqlx::Error) -> Blame {
    match error {
        sqlx::Error::Io(_)
        | sqlx::Error::Tls(_)
        | sqlx::Error::PoolTimedOut
        | sqlx::Error::PoolClosed
        | sqlx::Error::WorkerCrashed => Blame::Database,
        sqlx::Error::Database(error) => DB::blame(error.as_ref()),
        _ => Blame::Message,
    }
}
