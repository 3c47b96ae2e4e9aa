//! Store errors, by what the caller does next.

use std::time::Duration;

use message::Refused;

/// Why a store did not do what it was asked. Nothing was changed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// Try again: the store is busy, restarting or out of reach.
    #[error("the store cannot be used now: {reason}")]
    Unavailable {
        /// What it said.
        reason: String,
        /// The least wait before the next try.
        retry_after: Duration,
    },
    /// Give up this request: what it asks cannot be done.
    #[error("{0}")]
    Refused(String),
    /// Somebody has to look: the schema is missing or foreign, the disk is full, the data is damaged.
    #[error("the store needs attention: {0}")]
    Broken(String),
}

impl Error {
    /// Whether the same call may succeed later without anybody's help.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Unavailable { .. })
    }
}

impl From<Refused> for Error {
    fn from(refused: Refused) -> Self {
        Self::Refused(refused.to_string())
    }
}
