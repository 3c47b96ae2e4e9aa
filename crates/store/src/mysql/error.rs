//! What the errors of MySQL and MariaDB mean for a caller of the store, and for the store itself.

use std::time::Duration;

use mysql_async::{DriverError, Error as Driver, IoError, ServerError};

use crate::Error;

/// Why a transaction of ours did not end well.
#[derive(Debug)]
pub(super) enum Trouble {
    /// It was rolled back and nobody is to blame: the same transaction may be run again at once.
    Again(Error),
    /// It needs its group for itself, and was rolled back for that.
    Crowded,
    /// What the caller must hear. This is also an unknown end of a COMMIT: who runs that again may do it twice.
    Final(Error),
}

impl From<Error> for Trouble {
    fn from(error: Error) -> Self {
        Self::Final(error)
    }
}

impl From<message::Refused> for Trouble {
    fn from(refused: message::Refused) -> Self {
        Self::Final(refused.into())
    }
}

impl From<Driver> for Trouble {
    fn from(error: Driver) -> Self {
        let again = passes(&error);
        let error = Error::from(error);
        if again { Self::Again(error) } else { Self::Final(error) }
    }
}

impl From<Trouble> for Error {
    fn from(trouble: Trouble) -> Self {
        match trouble {
            Trouble::Again(error) | Trouble::Final(error) => error,
            Trouble::Crowded => Self::Broken("a transaction asked twice for its group".to_owned()),
        }
    }
}

/// A deadlock, a lock that was not freed in time, a connection that broke.
fn passes(error: &Driver) -> bool {
    match error {
        Driver::Server(error) => matches!(kind(error), Kind::Locked | Kind::Gone),
        Driver::Io(IoError::Io(_)) | Driver::Driver(DriverError::ConnectionClosed) => true,
        _ => false,
    }
}

/// What a server's error asks for.
#[derive(Debug, PartialEq, Eq)]
enum Kind {
    /// Somebody else was in the way: try again.
    Locked,
    /// The connection is lost or the server is going: try again on another.
    Gone,
    /// The server takes nobody, or no writes, for now.
    Closed,
    /// The disk is full.
    Full,
    /// Somebody has to look.
    Wrong,
}

fn kind(error: &ServerError) -> Kind {
    match error.code {
        // Lock wait timeout, deadlock, NOWAIT in vain, and what a cluster's certification calls a deadlock.
        1205 | 1213 | 1020 | 3572 | 1689 => Kind::Locked,
        // Shutdown, killed, aborted, network trouble, idle for too long.
        1053 | 1077 | 1152 | 1158..=1161 | 1184 | 1317 | 1927 | 2006 | 2013 | 4031 => Kind::Gone,
        // Too many connections; read-only for a failover; offline; not yet ready.
        1040 | 1203 | 1226 | 1290 | 1792 | 1836 | 3032 | 3100 | 1047 => Kind::Closed,
        1021 | 1114 => Kind::Full,
        _ => Kind::Wrong,
    }
}

impl From<Driver> for Error {
    /// Nothing of a connection's URL is in these texts: the driver does not know it where they are made.
    fn from(error: Driver) -> Self {
        let unavailable = |wait: u64| Self::Unavailable {
            reason: error.to_string(),
            retry_after: Duration::from_millis(wait),
        };
        match &error {
            Driver::Server(server) => match kind(server) {
                Kind::Locked => unavailable(50),
                Kind::Gone => unavailable(200),
                Kind::Closed | Kind::Full => unavailable(1_000),
                Kind::Wrong => Self::Broken(remedy(server)),
            },
            Driver::Io(IoError::Io(_)) | Driver::Driver(DriverError::ConnectionClosed) => unavailable(200),
            Driver::Driver(DriverError::PoolDisconnected) => unavailable(1_000),
            _ => Self::Broken(error.to_string()),
        }
    }
}

/// What the server said and, for what people meet first, what to do.
fn remedy(error: &ServerError) -> String {
    let told = format!("{} (error {})", error.message, error.code);
    match error.code {
        1049 => format!("{told}: make it with CREATE DATABASE … CHARACTER SET utf8mb4, or name another"),
        1044 | 1045 | 1698 => format!("{told}: check the user and password in the URL, and its grants"),
        1142 => format!(
            "{told}: grant it SELECT, INSERT, UPDATE, DELETE, and to migrate also CREATE, ALTER, DROP, INDEX and CREATE VIEW"
        ),
        1146 => format!("{told}: run `postrider migrate`"),
        _ => told,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(code: u16) -> Driver {
        Driver::Server(ServerError { code, message: "said the server".to_owned(), state: "HY000".to_owned() })
    }

    fn broken() -> Driver {
        Driver::Io(IoError::Io(std::io::Error::from(std::io::ErrorKind::ConnectionReset)))
    }

    #[test]
    fn every_error_is_one_to_retry_to_wait_for_or_to_look_at() {
        // The error, whether the store runs its transaction again, and whether the caller may.
        let cases = [
            (server(1213), true, true),
            (server(1205), true, true),
            (server(2013), true, true),
            (server(1317), true, true),
            (broken(), true, true),
            (Driver::Driver(DriverError::ConnectionClosed), true, true),
            (server(1040), false, true),
            (server(1290), false, true),
            (server(1836), false, true),
            (server(1114), false, true),
            (server(1064), false, false),
            (server(1146), false, false),
            (server(1045), false, false),
        ];
        for (error, again, transient) in cases {
            let told = error.to_string();
            let trouble = Trouble::from(error);
            assert_eq!(matches!(trouble, Trouble::Again(_)), again, "{told}");
            assert_eq!(Error::from(trouble).is_transient(), transient, "{told}");
        }
    }

    #[test]
    fn what_people_meet_first_comes_with_a_remedy() {
        let error = Error::from(server(1146)).to_string();
        assert!(error.contains("said the server") && error.contains("postrider migrate"), "{error}");
    }
}
