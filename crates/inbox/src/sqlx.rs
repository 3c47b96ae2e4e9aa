//! Closures that work in a transaction of the application's own sqlx pool, together with the mark.
//!
//! The pool and the inbox must be of the same SQLite file. What the closure wrote and the mark that says so are then
//! one transaction: a crash leaves both or neither, and the work of a message is done once.

use std::sync::Arc;

use async_trait::async_trait;
use futures::future::BoxFuture;
use message::Message;
use sqlx::{SqliteConnection, SqlitePool};
use store::{Arrival, Handled};
use tokio::sync::Mutex;

use crate::handler::retry;
use crate::{Handle, Handler};

/// What went wrong in a closure. It is rolled back and tried again, unless it is [`Permanent`].
pub type Failure = Box<dyn std::error::Error + Send + Sync>;

/// What a closure returns.
pub type Outcome<'a> = BoxFuture<'a, Result<(), Failure>>;

/// A failure that no later try can mend: the message is Dead at once.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Permanent(pub String);

/// Runs a closure in a transaction with the mark.
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
pub struct Transactional<F> {
    pool: SqlitePool,
    work: F,
    acknowledge: bool,
    /// SQLite has one writer: waiting here is fair, waiting for its lock is not.
    turn: Mutex<()>,
}

impl<F> Transactional<F>
where
    F: for<'a> Fn(&'a mut SqliteConnection, &'a Message) -> Outcome<'a> + Send + Sync + 'static,
{
    /// Runs `work` for each message in a transaction of `pool`.
    pub fn new(pool: SqlitePool, work: F) -> Self {
        Self { pool, work, acknowledge: false, turn: Mutex::default() }
    }

    /// Acknowledges in the same transaction too: the file is the producer's.
    #[must_use]
    pub fn acknowledging(mut self) -> Self {
        self.acknowledge = true;
        self
    }

    /// The handler for a [`Group`](crate::Group).
    pub fn handler(self) -> Handler {
        Handler::Custom(Arc::new(self))
    }

    async fn transact(&self, group: &str, arrival: &Arrival) -> Result<(), Failure> {
        let _turn = self.turn.lock().await;
        // At once for writing: a transaction that reads first and writes later can fail halfway.
        let mut transaction = self.pool.begin_with("BEGIN IMMEDIATE").await?;
        if !store::sqlite::sqlx::once(&mut transaction, group, arrival).await? {
            transaction.rollback().await?;
            return Ok(());
        }
        (self.work)(&mut transaction, &arrival.message).await?;
        if self.acknowledge {
            store::sqlite::sqlx::acknowledge(&mut transaction, group, arrival.message.id).await?;
        }
        transaction.commit().await?;
        Ok(())
    }
}

impl<F> From<Transactional<F>> for Handler
where
    F: for<'a> Fn(&'a mut SqliteConnection, &'a Message) -> Outcome<'a> + Send + Sync + 'static,
{
    fn from(transactional: Transactional<F>) -> Self {
        transactional.handler()
    }
}

#[async_trait]
impl<F> Handle for Transactional<F>
where
    F: for<'a> Fn(&'a mut SqliteConnection, &'a Message) -> Outcome<'a> + Send + Sync + 'static,
{
    async fn handle(&self, group: &str, arrival: &Arrival) -> Handled {
        let Err(failure) = self.transact(group, arrival).await else { return Handled::Done };
        let error = failure.to_string();
        if failure.is::<Permanent>() {
            Handled::Dead { error }
        } else if failure.downcast_ref::<sqlx::Error>().is_some_and(is_down) {
            Handled::Unavailable { error }
        } else {
            retry(error)
        }
    }
}

/// Whether the database, and not the message, is in trouble.
fn is_down(error: &sqlx::Error) -> bool {
    const BUSY: u32 = 5;
    const LOCKED: u32 = 6;
    match error {
        sqlx::Error::Io(_)
        | sqlx::Error::PoolTimedOut
        | sqlx::Error::PoolClosed
        | sqlx::Error::WorkerCrashed => true,
        sqlx::Error::Database(error) => {
            let code = error.code().and_then(|code| code.parse::<u32>().ok()).unwrap_or_default();
            // The low byte of an extended code is the code.
            matches!(code & 0xff, BUSY | LOCKED)
        }
        _ => false,
    }
}
