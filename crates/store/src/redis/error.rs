//! What Redis's errors mean for a caller of the store.

use std::time::Duration;

use ::redis::{ErrorKind, RedisError};

use crate::Error;

impl From<RedisError> for Error {
    fn from(error: RedisError) -> Self {
        let reason = error.to_string();
        let kind = error.kind();
        // In a pipeline, the first that failed tells why.
        let said = error.into_server_errors();
        match said.as_ref().and_then(|errors| errors.first()) {
            Some((_, said)) => of_server(said.code(), reason),
            None => of_client(kind, reason),
        }
    }
}

/// What the server said, by the first word of it.
fn of_server(code: &str, reason: String) -> Error {
    let soon = |reason| Error::Unavailable { reason, retry_after: Duration::from_millis(100) };
    let later = |reason| Error::Unavailable { reason, retry_after: Duration::from_secs(1) };
    match code {
        // Another script runs for long, or the data moves: a moment.
        "BUSY" | "TRYAGAIN" | "NOSCRIPT" => soon(reason),
        // It starts, it is being replaced, or it waits for replicas or its disk: somebody is at it.
        "LOADING" | "MASTERDOWN" | "CLUSTERDOWN" | "READONLY" | "NOREPLICAS" | "UNBLOCKED" => later(reason),
        "MISCONF" => later(format!("{reason}; Redis refuses writes because it cannot write to its disk")),
        "OOM" => later(format!("Redis is full (maxmemory): raise it, or shorten the retention ({reason})")),
        "MOVED" | "ASK" | "CROSSSLOT" => Error::Broken(format!(
            "this node of a Redis cluster does not hold the slot of the store: name the node that does ({reason})"
        )),
        "NOAUTH" | "WRONGPASS" | "NOPERM" => Error::Broken(format!(
            "Redis does not let this user in: mend its password or its rights ({reason})"
        )),
        "WRONGTYPE" => Error::Broken(format!(
            "a key of the store holds something else: is the prefix shared? ({reason})"
        )),
        _ => Error::Broken(reason),
    }
}

/// What went wrong on the way.
fn of_client(kind: ErrorKind, reason: String) -> Error {
    match kind {
        ErrorKind::Io | ErrorKind::Parse | ErrorKind::ClusterConnectionNotFound => {
            let reason = format!("Redis cannot be reached: {reason}");
            Error::Unavailable { reason, retry_after: Duration::from_millis(500) }
        }
        ErrorKind::AuthenticationFailed => {
            Error::Broken("Redis does not let this user in: mend its name or password".to_owned())
        }
        _ => Error::Broken(reason),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_passes_by_itself_is_transient() {
        let cases = [
            ("BUSY", true),
            ("TRYAGAIN", true),
            ("NOSCRIPT", true),
            ("LOADING", true),
            ("MASTERDOWN", true),
            ("CLUSTERDOWN", true),
            ("READONLY", true),
            ("NOREPLICAS", true),
            ("UNBLOCKED", true),
            ("MISCONF", true),
            ("OOM", true),
            ("MOVED", false),
            ("ASK", false),
            ("CROSSSLOT", false),
            ("NOAUTH", false),
            ("WRONGPASS", false),
            ("NOPERM", false),
            ("WRONGTYPE", false),
            ("ERR", false),
        ];
        for (code, transient) in cases {
            assert_eq!(of_server(code, String::new()).is_transient(), transient, "{code}");
        }
    }

    #[test]
    fn a_connection_that_broke_is_transient_and_a_wrong_password_is_not() {
        let broken = RedisError::from(std::io::Error::from(std::io::ErrorKind::ConnectionReset));
        assert!(Error::from(broken).is_transient());
        let password = RedisError::from((ErrorKind::AuthenticationFailed, "Password authentication failed"));
        assert!(!Error::from(password).is_transient());
    }
}
