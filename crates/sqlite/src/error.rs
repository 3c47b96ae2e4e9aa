//! What can go wrong with a file, by what its user can do about it.

use std::path::PathBuf;

use rusqlite::ErrorCode;

/// Why a database could not be used. Cloneable, because everyone who shared a commit shares its failure.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// The folder of the file cannot be made or entered.
    #[error("cannot use the folder {}: {reason}", path.display())]
    Folder {
        /// Which.
        path: PathBuf,
        /// What the system says.
        reason: String,
    },
    /// The file cannot be opened, or is not a database.
    #[error("cannot open the database {}: {reason}", path.display())]
    Open {
        /// Which.
        path: PathBuf,
        /// What SQLite says.
        reason: String,
    },
    /// Another process held the lock for too long.
    #[error("the database is locked by another process that does not let go")]
    Busy,
    /// There is no room on the disk, or the disk fails.
    #[error("the disk refuses to store more: {0}")]
    Disk(String),
    /// The schema is newer than this program.
    #[error(
        "the database has schema version {found} and this program knows up to {known}: use a newer program"
    )]
    Newer {
        /// The file's.
        found: u32,
        /// Ours.
        known: u32,
    },
    /// A statement failed.
    #[error("SQLite: {0}")]
    Statement(String),
    /// A job panicked; what it did was undone.
    #[error("the work in the transaction panicked: {0}")]
    Panicked(String),
    /// The file was closed while the job waited.
    #[error("the database is closed")]
    Closed,
}

impl From<rusqlite::Error> for Error {
    fn from(error: rusqlite::Error) -> Self {
        match error.sqlite_error_code() {
            Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => Self::Busy,
            Some(ErrorCode::DiskFull | ErrorCode::SystemIoFailure | ErrorCode::ReadOnly) => {
                Self::Disk(error.to_string())
            }
            _ => Self::Statement(error.to_string()),
        }
    }
}
