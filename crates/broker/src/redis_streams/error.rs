//! What can go wrong between us and Redis, and what each failure means to the relay and to a consumer.

use redis::{ErrorKind, RedisError};

use crate::{Outcome, ReceiveError};

/// Why Redis did not do what it was asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Error {
    /// There was no way to ask: nothing was done.
    Away(String),
    /// It was asked, and no answer came: it may have been done.
    Unanswered(String),
    /// It answered with an error, which begins with this word: nothing was done.
    Said { code: String, text: String },
    /// It must not be trusted with messages as it is set up.
    Unsafe(String),
}

impl Error {
    /// A failure of the driver while connecting.
    pub(super) fn connecting(error: &RedisError) -> Self {
        Self::said(error).unwrap_or_else(|| Self::Away(error.to_string()))
    }

    /// A failure of the driver after something was sent.
    pub(super) fn asking(error: &RedisError) -> Self {
        Self::said(error).unwrap_or_else(|| Self::Unanswered(error.to_string()))
    }

    /// What Redis itself said, if it was Redis who spoke.
    fn said(error: &RedisError) -> Option<Self> {
        let code = match error.kind() {
            ErrorKind::AuthenticationFailed => "WRONGPASS".to_owned(),
            // In a pipeline, the first that failed tells why.
            ErrorKind::Server(_) | ErrorKind::Extension => error.code().unwrap_or("ERR").to_owned(),
            _ => return None,
        };
        Some(Self::Said { text: error.to_string(), code })
    }

    /// An error that a script caught, as Redis worded it: `WRONGTYPE Operation against a key …`.
    pub(super) fn caught(text: &str) -> Self {
        let code = text.split(' ').next().unwrap_or_default().to_owned();
        Self::Said { code, text: text.to_owned() }
    }

    /// Redis was restarted, failed over, or was told to forget its scripts.
    pub(super) fn is_forgotten_script(&self) -> bool {
        matches!(self, Self::Said { code, .. } if code == "NOSCRIPT")
    }

    /// Whether the next call should connect anew. A primary that became a replica goes on refusing on its connections.
    pub(super) fn spoils_the_connection(&self) -> bool {
        match self {
            Self::Away(_) | Self::Unanswered(_) | Self::Unsafe(_) => true,
            Self::Said { code, .. } => matches!(code.as_str(), "READONLY" | "LOADING" | "MASTERDOWN"),
        }
    }

    /// The text, with where it happened.
    fn at(&self, place: &str) -> String {
        match self {
            Self::Away(text) => format!("Redis at {place} cannot be reached: {text}"),
            Self::Unanswered(text) => format!("Redis at {place} did not answer: {text}"),
            Self::Said { text, .. } => format!("Redis at {place}: {text}"),
            Self::Unsafe(text) => format!("Redis at {place} may lose messages: {text}"),
        }
    }
}

/// What somebody has to do about an error, or that it passes by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Remedy {
    /// Redis is busy, starting, being replaced, or full.
    Wait,
    /// Somebody has to change this.
    Change(&'static str),
}

fn remedy(code: &str) -> Remedy {
    match code {
        "BUSY" | "TRYAGAIN" | "NOSCRIPT" | "UNBLOCKED" => Remedy::Wait,
        "LOADING" | "MASTERDOWN" | "CLUSTERDOWN" | "READONLY" | "NOREPLICAS" => Remedy::Wait,
        // Full, or its disk is: everybody's messages wait, and nobody's is to blame.
        "OOM" | "MISCONF" => Remedy::Wait,
        // The streams are gone, as after FLUSHALL: whoever joins the group again makes them.
        "NOGROUP" => Remedy::Wait,
        "MOVED" | "ASK" | "CROSSSLOT" => {
            Remedy::Change("name the node of the cluster that holds the slot of the prefix")
        }
        "NOAUTH" | "WRONGPASS" | "NOPERM" => Remedy::Change("mend the user's password or its rights"),
        "WRONGTYPE" => Remedy::Change("a key of ours holds something else: choose another prefix"),
        _ => Remedy::Change("see what Redis says"),
    }
}

/// What a failed call means to every message in it.
///
/// Whatever a message can be guilty of was found before, so none is to blame here.
pub(super) fn outcome(error: &Error, place: &str) -> Outcome {
    let text = error.at(place);
    match error {
        Error::Away(_) => Outcome::Unreachable { error: text },
        Error::Unanswered(_) => Outcome::Unconfirmed { error: text },
        Error::Unsafe(_) => Outcome::Misconfigured { error: text },
        Error::Said { code, .. } => match remedy(code) {
            Remedy::Wait => Outcome::Unreachable { error: text },
            Remedy::Change(what) => Outcome::Misconfigured { error: format!("{text}: {what}") },
        },
    }
}

/// What a failed call means to a consumer.
pub(super) fn receive(error: &Error, place: &str) -> ReceiveError {
    let text = error.at(place);
    match error {
        Error::Away(_) | Error::Unanswered(_) => ReceiveError::Unreachable(text),
        Error::Unsafe(_) => ReceiveError::Misconfigured(text),
        Error::Said { code, .. } => match remedy(code) {
            Remedy::Wait => ReceiveError::Unreachable(text),
            Remedy::Change(what) => ReceiveError::Misconfigured(format!("{text}: {what}")),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(code: &str) -> Error {
        Error::caught(&format!("{code} in its own words"))
    }

    #[test]
    fn no_message_is_blamed_for_what_passes_by_itself() {
        let passing = [
            "BUSY",
            "TRYAGAIN",
            "NOSCRIPT",
            "UNBLOCKED",
            "LOADING",
            "MASTERDOWN",
            "CLUSTERDOWN",
            "READONLY",
            "NOREPLICAS",
            "OOM",
            "MISCONF",
            "NOGROUP",
        ];
        for code in passing {
            assert!(matches!(outcome(&said(code), "here"), Outcome::Unreachable { .. }), "{code}");
            assert!(matches!(receive(&said(code), "here"), ReceiveError::Unreachable(_)), "{code}");
        }
        for code in ["MOVED", "ASK", "CROSSSLOT", "NOAUTH", "WRONGPASS", "NOPERM", "WRONGTYPE", "ERR"] {
            assert!(matches!(outcome(&said(code), "here"), Outcome::Misconfigured { .. }), "{code}");
            assert!(matches!(receive(&said(code), "here"), ReceiveError::Misconfigured(_)), "{code}");
        }
    }

    #[test]
    fn what_was_sent_and_not_answered_may_be_stored_and_what_was_not_sent_is_not() {
        let broken = RedisError::from(std::io::Error::from(std::io::ErrorKind::ConnectionReset));
        assert!(matches!(outcome(&Error::connecting(&broken), "here"), Outcome::Unreachable { .. }));
        assert!(matches!(outcome(&Error::asking(&broken), "here"), Outcome::Unconfirmed { .. }));
        let password = RedisError::from((ErrorKind::AuthenticationFailed, "Password authentication failed"));
        assert!(matches!(outcome(&Error::connecting(&password), "here"), Outcome::Misconfigured { .. }));
        let careless = Error::Unsafe("appendonly no".to_owned());
        assert!(matches!(outcome(&careless, "here"), Outcome::Misconfigured { .. }));
        assert!(matches!(receive(&careless, "here"), ReceiveError::Misconfigured(_)));
    }

    #[test]
    fn a_connection_to_one_that_is_no_primary_any_more_is_left() {
        assert!(said("READONLY").spoils_the_connection());
        assert!(!said("OOM").spoils_the_connection());
        assert!(Error::Unanswered(String::new()).spoils_the_connection());
    }
}
