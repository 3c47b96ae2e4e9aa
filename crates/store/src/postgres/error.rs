//! What PostgreSQL's errors mean for a caller of the store.

use std::time::Duration;

use deadpool_postgres::PoolError;
use tokio_postgres::error::SqlState;

use crate::Error;

/// What went wrong inside the store: known well enough to tell what may be tried again.
#[derive(Debug)]
pub(super) enum Trouble {
    /// The database said so, or its connection broke, before anything was committed.
    Database(tokio_postgres::Error),
    /// The connection broke while committing: nobody knows whether it happened.
    Unknown(tokio_postgres::Error),
    /// No connection could be had.
    Pool(String),
    /// Something that a call took for new has a mark: its next transaction looks before it marks.
    Marked,
    /// It is what the caller hears.
    Store(Error),
}

impl Trouble {
    /// What a failed `COMMIT` means: the server refused it, or nobody knows.
    pub(super) fn at_commit(error: tokio_postgres::Error) -> Self {
        if error.code().is_some() { Self::Database(error) } else { Self::Unknown(error) }
    }

    /// Whether the same transaction may be tried again at once: the server has undone it, or never saw its end.
    pub(super) fn may_repeat(&self) -> bool {
        match self {
            Self::Database(error) => match error.code() {
                Some(code) => {
                    *code == SqlState::T_R_DEADLOCK_DETECTED || *code == SqlState::T_R_SERIALIZATION_FAILURE
                }
                None => error.is_closed(),
            },
            Self::Unknown(_) | Self::Pool(_) | Self::Marked | Self::Store(_) => false,
        }
    }

    /// The database's code, when it was the database that refused.
    pub(super) fn code(&self) -> Option<&SqlState> {
        match self {
            Self::Database(error) => error.code(),
            _ => None,
        }
    }
}

impl From<tokio_postgres::Error> for Trouble {
    fn from(error: tokio_postgres::Error) -> Self {
        Self::Database(error)
    }
}

impl From<PoolError> for Trouble {
    fn from(error: PoolError) -> Self {
        match error {
            PoolError::Backend(error) => Self::Database(error),
            PoolError::Timeout(_) => Self::Pool("all connections of the pool are in use".to_owned()),
            other => Self::Pool(other.to_string()),
        }
    }
}

impl From<Error> for Trouble {
    fn from(error: Error) -> Self {
        Self::Store(error)
    }
}

impl From<message::Refused> for Trouble {
    fn from(refused: message::Refused) -> Self {
        Self::Store(refused.into())
    }
}

impl From<Trouble> for Error {
    fn from(trouble: Trouble) -> Self {
        match trouble {
            Trouble::Database(error) | Trouble::Unknown(error) => meaning(error.code(), text(&error)),
            Trouble::Pool(reason) => Self::Unavailable { reason, retry_after: Duration::from_millis(100) },
            Trouble::Marked => {
                let reason = "some of the messages are marked".to_owned();
                Self::Unavailable { reason, retry_after: Duration::ZERO }
            }
            Trouble::Store(error) => error,
        }
    }
}

/// The first thing that went wrong in statements that were sent together: those after it were only not tried.
pub(super) fn cause<const N: usize>(results: [Result<(), Trouble>; N]) -> Result<(), Trouble> {
    let mut troubles = results.into_iter().filter_map(Result::err);
    let Some(mut cause) = troubles.next() else { return Ok(()) };
    for trouble in troubles {
        if cause.code() == Some(&SqlState::IN_FAILED_SQL_TRANSACTION) {
            cause = trouble;
        }
    }
    Err(cause)
}

/// What the driver says, with the server's own words, which its `Display` leaves out.
pub(super) fn text(error: &tokio_postgres::Error) -> String {
    if let Some(error) = error.as_db_error() {
        let detail = error.detail().map(|detail| format!(" ({detail})")).unwrap_or_default();
        return format!("{}{detail}", error.message());
    }
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}

/// What the caller does next, by the database's code. Without one the connection failed.
fn meaning(code: Option<&SqlState>, reason: String) -> Error {
    let wait = |millis| Duration::from_millis(millis);
    let unavailable = |retry_after| Error::Unavailable { reason: reason.clone(), retry_after };
    let Some(code) = code else { return unavailable(wait(200)) };
    match &code.code()[..2] {
        // Connection, and the transaction had to be undone.
        "08" => unavailable(wait(200)),
        "40" => unavailable(wait(10)),
        // A lock was not free in time; too many connections; the disk or memory is full.
        "55" if *code == SqlState::LOCK_NOT_AVAILABLE => unavailable(wait(50)),
        "53" => unavailable(wait(1_000)),
        // Somebody shuts the server down, or it starts.
        "57" => unavailable(wait(500)),
        // A time limit of ours ended a transaction that was left open.
        "25" if *code == SqlState::IDLE_IN_TRANSACTION_SESSION_TIMEOUT => unavailable(wait(100)),
        // A failover has made this server a replica: the new primary is found by the next connection.
        "25" if *code == SqlState::READ_ONLY_SQL_TRANSACTION => unavailable(wait(1_000)),
        "58" | "XX" => Error::Broken(reason),
        "42" | "3D" | "3F" | "28" => Error::Broken(format!("{reason} [{}]", code.code())),
        // What was given cannot be stored.
        "22" | "23" => Error::Refused(format!("PostgreSQL refuses it: {reason}")),
        _ => Error::Broken(format!("{reason} [{}]", code.code())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_says_what_to_do_next() {
        let cases = [
            (None, "later"),
            (Some("08006"), "later"),
            (Some("40001"), "later"),
            (Some("40P01"), "later"),
            (Some("55P03"), "later"),
            (Some("53300"), "later"),
            (Some("53100"), "later"),
            (Some("57P01"), "later"),
            (Some("57P03"), "later"),
            (Some("57014"), "later"),
            (Some("25006"), "later"),
            (Some("25P03"), "later"),
            (Some("22021"), "never"),
            (Some("23514"), "never"),
            (Some("42P01"), "look"),
            (Some("42501"), "look"),
            (Some("28P01"), "look"),
            (Some("3D000"), "look"),
            (Some("XX001"), "look"),
            (Some("25P02"), "look"),
            (Some("0A000"), "look"),
        ];
        for (code, expected) in cases {
            let state = code.map(SqlState::from_code);
            let found = match meaning(state.as_ref(), "why".to_owned()) {
                Error::Unavailable { .. } => "later",
                Error::Refused(_) => "never",
                Error::Broken(_) => "look",
            };
            assert_eq!(found, expected, "{code:?}");
        }
    }
}
