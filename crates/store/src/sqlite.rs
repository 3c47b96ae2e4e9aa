//! SQLite as store: the embedded default, in a file of Postrider's own or in the application's.
//!
//! Every write of this process goes through one thread that shares commits ([`sqlite::File`]); relays in other
//! processes use the same file under the same rules. All of them run on one machine, so SQLite's clock is
//! one clock for all.

mod amend;
mod append;
mod claim;
mod error;
mod examine;
mod hold;
mod inbox;
mod inspect;
mod lanes;
mod migrate;
mod retain;
mod row;
mod settle;
#[cfg(feature = "sqlx")]
pub mod sqlx;
mod tally;
mod versions;
mod wake;

use std::path::Path;
use std::sync::atomic::AtomicI64;
use std::sync::{Arc, Mutex, OnceLock};

use rusqlite::Connection;

pub use append::append;
pub use inbox::{SqlHandler, check_sql};
pub use migrate::{MIGRATIONS, migrate, pending, schema};
pub use versions::{newer, swap};

use crate::Error;

/// A store in a SQLite file. Cheap to clone; clones share the writer.
#[derive(Clone, Debug)]
pub struct SqliteStore {
    file: Arc<sqlite::File>,
    bell: Arc<tokio::sync::Notify>,
    /// The heartbeat's own connection: it must not wait behind the writer's queue.
    heart: Arc<Mutex<Connection>>,
    /// Shows other processes that this one lives. Made by the first beat: those who only look hold no lanes.
    presence: Arc<OnceLock<Option<sqlite::Presence>>>,
    /// How far retention has looked.
    cleaned: Arc<AtomicI64>,
}

impl SqliteStore {
    /// Opens the store at `path`, creating the file and bringing its schema up to date.
    ///
    /// # Errors
    /// When the file cannot be used, is not a database, or is from a newer program.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Error> {
        let file = sqlite::File::open(path.as_ref(), |connection| migrate(connection).map(drop))?;
        let heart = file.connect()?;
        Ok(Self {
            file: Arc::new(file),
            bell: Arc::default(),
            heart: Arc::new(Mutex::new(heart)),
            presence: Arc::default(),
            cleaned: Arc::default(),
        })
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        self.file.path()
    }
}
