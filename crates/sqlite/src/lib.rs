//! A SQLite file with one writer thread whose callers share commits.
//!
//! A durable commit costs a disk flush whether it carries one row or a thousand. So every write of this
//! process goes through one thread that runs all the jobs that are waiting in one transaction, each in a
//! savepoint of its own, commits once, and only then answers them all. Nobody is told "done" before the
//! flush, and one job's failure undoes that job alone.
//!
//! Other processes may use the same file: the lock is taken with `BEGIN IMMEDIATE`, waited for patiently,
//! and given up for a moment after each commit so that they get their turn.

mod error;
mod migrate;
mod presence;
mod writer;

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rusqlite::{Connection, ErrorCode, OpenFlags};

pub use error::Error;
pub use migrate::{Migration, migrate, pending};
pub use presence::{Neighbours, Presence};
use writer::Writer;

/// How long a lock held by another process is waited for.
const PATIENCE: Duration = Duration::from_secs(10);

/// Readers kept open between uses; more are opened when needed and closed again.
const READERS: usize = 4;

/// One SQLite database, opened for this process.
#[derive(Debug)]
pub struct File {
    path: PathBuf,
    writer: Writer,
    readers: Mutex<Vec<Connection>>,
}

impl File {
    /// Opens the file, creating it and its folder if need be, and lets `setup` bring its schema up to date.
    ///
    /// # Errors
    /// When the folder cannot be made, the file cannot be opened or is not a database, or `setup` fails.
    pub fn open(
        path: impl Into<PathBuf>,
        setup: impl FnOnce(&mut Connection) -> Result<(), Error>,
    ) -> Result<Self, Error> {
        let path = path.into();
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            std::fs::create_dir_all(folder)
                .map_err(|source| Error::Folder { path: folder.to_owned(), reason: source.to_string() })?;
        }
        let mut connection = connect(&path)?;
        setup(&mut connection)?;
        Ok(Self { path, writer: Writer::start(connection)?, readers: Mutex::default() })
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Runs `job` in a transaction that it may share with other callers and answers once it is on disk.
    ///
    /// An error from `job` undoes what `job` did and nothing else.
    ///
    /// # Errors
    /// What `job` returned, or why the transaction could not be committed.
    ///
    /// # Cancel safety
    /// A job that was accepted runs even if the caller stops waiting.
    pub async fn write<T, E, F>(&self, job: F) -> Result<T, E>
    where
        F: FnOnce(&Connection) -> Result<T, E> + Send + 'static,
        T: Send + 'static,
        E: From<Error> + Send + 'static,
    {
        self.writer.submit(job).await
    }

    /// Runs `job` on a read-only connection, beside writers and other readers.
    ///
    /// # Errors
    /// What `job` returned, or why no connection could be had.
    ///
    /// # Cancel safety
    /// Safe: nothing is written.
    pub async fn read<T, E, F>(&self, job: F) -> Result<T, E>
    where
        F: FnOnce(&Connection) -> Result<T, E> + Send + 'static,
        T: Send + 'static,
        E: From<Error> + Send + 'static,
    {
        let reader = self.readers.lock().expect("no reader panics while it holds the list").pop();
        let path = self.path.clone();
        let (result, reader) = tokio::task::spawn_blocking(move || {
            let reader = match reader.map_or_else(|| reader_of(&path), Ok) {
                Ok(reader) => reader,
                Err(error) => return (Err(E::from(error)), None),
            };
            (job(&reader), Some(reader))
        })
        .await
        .map_err(|panic| E::from(Error::Panicked(panic.to_string())))?;
        let mut readers = self.readers.lock().expect("no reader panics while it holds the list");
        if let Some(reader) = reader.filter(|_| readers.len() < READERS) {
            readers.push(reader);
        }
        result
    }

    /// A connection of the caller's own, for work that must not wait behind the writer's queue.
    ///
    /// # Errors
    /// When the file cannot be opened.
    pub fn connect(&self) -> Result<Connection, Error> {
        connect(&self.path)
    }
}

/// Opens a connection as every connection of ours is opened: WAL, every commit flushed, patient.
fn connect(path: &Path) -> Result<Connection, Error> {
    let open = || -> rusqlite::Result<Connection> {
        let connection = Connection::open(path)?;
        connection.busy_handler(Some(wait_for_lock))?;
        // WAL before anything else: changing the journal needs a moment without other users.
        write_ahead(&connection)?;
        connection.pragma_update(None, "synchronous", "full")?;
        connection.pragma_update(None, "foreign_keys", true)?;
        connection.pragma_update(None, "temp_store", "memory")?;
        connection.pragma_update(None, "cache_size", -8_000)?;
        connection.pragma_update(None, "wal_autocheckpoint", 4_000)?;
        connection.pragma_update(None, "journal_size_limit", 64 << 20)?;
        connection.set_prepared_statement_cache_capacity(128);
        Ok(connection)
    };
    open().map_err(|source| Error::Open { path: path.to_owned(), reason: source.to_string() })
}

/// Switches a new file to WAL. Two processes that do so at once hold a read lock each and want it
/// exclusively: SQLite refuses both at once, without asking the busy handler, so we let go and try again.
fn write_ahead(connection: &Connection) -> rusqlite::Result<()> {
    let started = Instant::now();
    loop {
        let switched = connection.pragma_update_and_check(None, "journal_mode", "wal", |_| Ok(()));
        match switched {
            Err(error)
                if error.sqlite_error_code() == Some(ErrorCode::DatabaseBusy)
                    && started.elapsed() < PATIENCE =>
            {
                std::thread::sleep(Duration::from_millis(1));
            }
            done => return done,
        }
    }
}

fn reader_of(path: &Path) -> Result<Connection, Error> {
    let open = || -> rusqlite::Result<Connection> {
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let connection = Connection::open_with_flags(path, flags)?;
        connection.busy_handler(Some(wait_for_lock))?;
        connection.pragma_update(None, "query_only", true)?;
        connection.pragma_update(None, "cache_size", -2_000)?;
        Ok(connection)
    };
    open().map_err(|source| Error::Open { path: path.to_owned(), reason: source.to_string() })
}

/// Tries again every millisecond. SQLite's own waiting backs off to 100 ms, and a process that only asks
/// every 100 ms hardly ever meets the short gap between two commits of a busy one.
fn wait_for_lock(tries: i32) -> bool {
    thread_local! {
        static SINCE: Cell<Instant> = Cell::new(Instant::now());
    }
    if tries == 0 {
        SINCE.set(Instant::now());
    }
    std::thread::sleep(Duration::from_millis(1));
    SINCE.get().elapsed() < PATIENCE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_may_open_a_new_file_at_once() {
        for _ in 0..40 {
            let folder = tempfile::tempdir().expect("a folder");
            let path = folder.path().join("new.db");
            let gate = std::sync::Barrier::new(8);
            std::thread::scope(|scope| {
                let open = || {
                    gate.wait();
                    connect(&path).map(drop)
                };
                let opened: Vec<_> = (0..8).map(|_| scope.spawn(open)).collect();
                for opening in opened {
                    opening.join().expect("no panic").expect("it waits for its turn");
                }
            });
        }
    }
}
