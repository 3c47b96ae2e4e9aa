//! Connections: a pool for all, one of its own for the heartbeat, and transactions that end well or leave nothing.
//!
//! Every transaction runs as a task of its own, to its end: a caller that is dropped must not leave half a conversation
//! on a connection that the next one gets. Nothing on a connection outlives its transaction, so poolers may share it.

use std::future::Future;
use std::time::Duration;

use mysql_async::{Conn, IsolationLevel, Opts, OptsBuilder, PoolConstraints, PoolOpts, Transaction, TxOpts};
use rand::Rng;

use super::MysqlStore;
use super::error::Trouble;
use crate::Error;

/// A transaction of ours on a connection of the pool. Dropped, it is rolled back before the connection is used again.
pub(super) type Tx<'c> = Transaction<'c>;

/// How often a transaction is run again that a deadlock, say, has rolled back.
const RETRIES: u32 = 5;

/// A server that does not even answer is out of reach.
const PATIENCE: Duration = Duration::from_secs(10);

/// Seconds after which the server ends a connection that says nothing. A machine that vanishes in the middle of a turn
/// holds its lanes' locks for this long, not for the eight hours that are the default.
const SILENCE: u64 = 60;

/// What `url` says, as the driver wants it.
///
/// # Errors
/// Says what is wrong with it, without its password.
pub(super) fn options(url: &str, pool: usize) -> Result<Opts, Error> {
    let url = url.replacen("mariadb://", "mysql://", 1);
    let wrong = |why: String| {
        Error::Refused(format!(
            "the store's URL cannot be used: {why}; use mysql://user:password@host:3306/database"
        ))
    };
    let parsed = Opts::from_url(&url).map_err(|error| wrong(error.to_string()))?;
    if parsed.db_name().is_none_or(str::is_empty) {
        return Err(wrong("it names no database".to_owned()));
    }
    if parsed.ssl_opts().is_some() {
        // With two providers in one program the driver's own choice would panic. One that is set already stays.
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    }
    let constraints = PoolConstraints::new(0, pool.max(2)).unwrap_or_default();
    let pool = PoolOpts::default()
        .with_constraints(constraints)
        // A reset would forget the prepared statements; what it guards against is never done here.
        .with_reset_connection(false)
        .with_inactive_connection_ttl(Duration::from_secs(SILENCE / 2));
    Ok(OptsBuilder::from_opts(parsed)
        .pool_opts(pool)
        .stmt_cache_size(128)
        .prefer_socket(url.contains("prefer_socket=true"))
        .tcp_nodelay(true)
        // Nothing depends on these: they only make an end of what hangs.
        .init(vec![format!("SET SESSION wait_timeout = {SILENCE}, SESSION innodb_lock_wait_timeout = 10")])
        .into())
}

/// A connection of one's own.
pub(super) async fn connect(options: Opts) -> Result<Conn, Trouble> {
    match tokio::time::timeout(PATIENCE, Conn::new(options)).await {
        Ok(connection) => Ok(connection?),
        Err(_) => Err(Trouble::Final(silent())),
    }
}

/// Takes leave. The server may hang up before it has heard all of it, and what was done on the connection stays done.
pub(super) async fn close(connection: Conn) {
    if let Err(error) = connection.disconnect().await {
        tracing::debug!(%error, "a connection was closed before its goodbye");
    }
}

fn silent() -> Error {
    Error::Unavailable {
        reason: format!("no connection to the database within {PATIENCE:?}"),
        retry_after: Duration::from_secs(1),
    }
}

/// READ COMMITTED: a claim must see what others committed while it waited for a lock, and gaps must not be locked.
pub(super) fn committed() -> TxOpts {
    let mut options = TxOpts::default();
    options.with_isolation_level(IsolationLevel::ReadCommitted);
    options
}

/// The end of a transaction. When it fails nobody knows whether it happened, so it is never run again here.
pub(super) async fn commit(transaction: Transaction<'_>) -> Result<(), Trouble> {
    transaction.commit().await.map_err(|error| Trouble::Final(error.into()))
}

/// Makes an attempt, and another when it came to nothing through no fault of its own.
pub(super) async fn persist<T, F>(attempt: impl Fn() -> F) -> Result<T, Error>
where
    F: Future<Output = Result<T, Trouble>>,
{
    let mut tries = 0;
    loop {
        match attempt().await {
            Err(Trouble::Again(error)) if tries < RETRIES => {
                tries += 1;
                tracing::debug!(%error, tries, "what came to nothing is tried again");
                let most = 5_u64 << tries;
                let pause = rand::rng().random_range(1..=most);
                tokio::time::sleep(Duration::from_millis(pause)).await;
            }
            Err(trouble) => return Err(Error::from(trouble)),
            Ok(answer) => return Ok(answer),
        }
    }
}

impl MysqlStore {
    /// A connection of the pool, for a look outside of transactions.
    pub(super) async fn connection(&self) -> Result<Conn, Trouble> {
        match tokio::time::timeout(PATIENCE, self.pool.get_conn()).await {
            Ok(connection) => Ok(connection?),
            Err(_) => Err(Trouble::Final(silent())),
        }
    }

    pub(super) async fn begin(&self) -> Result<Tx<'static>, Trouble> {
        match tokio::time::timeout(PATIENCE, self.pool.start_transaction(committed())).await {
            Ok(transaction) => Ok(transaction?),
            Err(_) => Err(Trouble::Final(silent())),
        }
    }

    /// One view of all tables, and no lock: what a settle moves from one to another is seen once, in one place.
    pub(super) async fn view(&self) -> Result<Tx<'static>, Trouble> {
        let mut options = TxOpts::default();
        options
            .with_isolation_level(IsolationLevel::RepeatableRead)
            .with_consistent_snapshot(true)
            .with_readonly(true);
        match tokio::time::timeout(PATIENCE, self.pool.start_transaction(options)).await {
            Ok(transaction) => Ok(transaction?),
            Err(_) => Err(Trouble::Final(silent())),
        }
    }

    /// Runs `attempt` to its end, again when it was rolled back through no fault of its own, whatever becomes of the
    /// caller.
    pub(super) async fn run<T, F>(&self, attempt: impl Fn(Self) -> F + Send + 'static) -> Result<T, Error>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, Trouble>> + Send + 'static,
    {
        let store = self.clone();
        let task = tokio::spawn(persist(move || attempt(store.clone())));
        task.await.unwrap_or_else(|panic| Err(Error::Broken(format!("a task of the store ended: {panic}"))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_that_cannot_be_used_is_refused_without_its_password() {
        let cases = [
            ("mysql://ann:hush@host:3306", "names no database"),
            ("mariadb://ann:hush@host/", "names no database"),
            ("redis://ann:hush@host/db", "scheme"),
            ("mysql://ann:hush@host/db?nonsense=1", "nonsense"),
        ];
        for (url, expected) in cases {
            let error = options(url, 8).expect_err(expected).to_string();
            assert!(error.contains(expected) && !error.contains("hush"), "{error}");
        }
        let options = options("mariadb://ann:p%40ss@host/db", 8).expect("MariaDB's own scheme");
        assert_eq!((options.pass(), options.db_name()), (Some("p@ss"), Some("db")));
    }
}
