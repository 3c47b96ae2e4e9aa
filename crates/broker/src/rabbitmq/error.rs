//! What RabbitMQ's refusals mean to us: whether to try again, or to have something changed first.

use lapin::ErrorKind;
use lapin::protocol::{AMQPErrorKind, AMQPHardError, AMQPSoftError};

use crate::{Outcome, ReceiveError};

/// Why something was not done. Nothing of it was stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// The server is down, away or busy.
    Away(String),
    /// The server is there and says no, and will until somebody changes something.
    Refused(String),
}

impl Fault {
    pub(super) fn text(&self) -> &str {
        match self {
            Self::Away(text) | Self::Refused(text) => text,
        }
    }

    /// What it means for a message that was not sent because of it.
    pub(super) fn outcome(&self) -> Outcome {
        match self {
            Self::Away(error) => Outcome::Unreachable { error: error.clone() },
            Self::Refused(error) => Outcome::Misconfigured { error: error.clone() },
        }
    }
}

impl From<Fault> for ReceiveError {
    fn from(fault: Fault) -> Self {
        match fault {
            Fault::Away(text) => Self::Unreachable(text),
            Fault::Refused(text) => Self::Misconfigured(text),
        }
    }
}

impl From<lapin::Error> for Fault {
    fn from(error: lapin::Error) -> Self {
        let refused = match error.kind() {
            ErrorKind::ProtocolError(refusal) => is_refusal(refusal.kind(), refusal.get_message().as_str()),
            ErrorKind::InvalidProtocolVersion(_) | ErrorKind::AuthProviderError(_) => true,
            ErrorKind::ChannelsLimitReached
            | ErrorKind::InvalidChannel(_)
            | ErrorKind::InvalidChannelState(..)
            | ErrorKind::InvalidConnectionState(_)
            | ErrorKind::IOError(_)
            | ErrorKind::RuntimeShutdownError(_)
            | ErrorKind::ParsingError(_)
            | ErrorKind::SerialisationError(_)
            | ErrorKind::FutureCompleted
            | ErrorKind::NoDefaultRuntime
            | ErrorKind::MissingHeartbeatError => false,
            // Whatever a later version of the client adds: to try again does no harm.
            _ => false,
        };
        let text = match error.kind() {
            ErrorKind::ProtocolError(refusal) => refusal.get_message().to_string(),
            _ => error.to_string(),
        };
        if refused { Self::Refused(text) } else { Self::Away(text) }
    }
}

fn is_refusal(kind: &AMQPErrorKind, text: &str) -> bool {
    match kind {
        // A queue whose node is on its way up is missed in the same words as one that was never made.
        AMQPErrorKind::Soft(AMQPSoftError::NOTFOUND) => {
            !["is down", "inaccessible", "crashed", "timeout"].iter().any(|word| text.contains(word))
        }
        AMQPErrorKind::Soft(
            AMQPSoftError::CONTENTTOOLARGE
            | AMQPSoftError::NOROUTE
            | AMQPSoftError::NOCONSUMERS
            | AMQPSoftError::ACCESSREFUSED
            | AMQPSoftError::RESOURCELOCKED
            | AMQPSoftError::PRECONDITIONFAILED,
        ) => true,
        AMQPErrorKind::Hard(
            AMQPHardError::CONNECTIONFORCED
            | AMQPHardError::RESOURCEERROR
            | AMQPHardError::INTERNALERROR
            | AMQPHardError::CHANNELERROR
            | AMQPHardError::FRAMEERROR
            | AMQPHardError::UNEXPECTEDFRAME,
        ) => false,
        AMQPErrorKind::Hard(
            AMQPHardError::INVALIDPATH
            | AMQPHardError::SYNTAXERROR
            | AMQPHardError::COMMANDINVALID
            | AMQPHardError::NOTALLOWED
            | AMQPHardError::NOTIMPLEMENTED,
        ) => true,
    }
}

/// The server's own limit of a message, from its complaint about one that was larger.
pub(super) fn size_limit(error: &lapin::Error) -> Option<usize> {
    let ErrorKind::ProtocolError(refusal) = error.kind() else { return None };
    let (_, limit) = refusal.get_message().as_str().split_once("larger than configured max size ")?;
    let digits = limit.find(|c: char| !c.is_ascii_digit()).unwrap_or(limit.len());
    limit[..digits].parse().ok()
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Arc;

    use lapin::protocol::AMQPError;

    use super::*;

    fn said(kind: impl Into<AMQPErrorKind>, text: &str) -> lapin::Error {
        ErrorKind::ProtocolError(AMQPError::new(kind.into(), text.into())).into()
    }

    #[test]
    fn what_is_away_may_come_back_and_what_is_refused_waits_for_somebody() {
        let away: [lapin::Error; 6] = [
            ErrorKind::IOError(Arc::new(io::Error::other("reset"))).into(),
            ErrorKind::MissingHeartbeatError.into(),
            ErrorKind::ChannelsLimitReached.into(),
            said(AMQPHardError::CONNECTIONFORCED, "CONNECTION_FORCED - broker forced connection closure"),
            said(AMQPHardError::INTERNALERROR, "INTERNAL_ERROR - vhost '/' is down"),
            said(AMQPSoftError::NOTFOUND, "NOT_FOUND - home node of queue 'q' is down or inaccessible"),
        ];
        for error in away {
            assert!(matches!(Fault::from(error.clone()), Fault::Away(_)), "{error}");
        }
        let refused = [
            said(AMQPSoftError::ACCESSREFUSED, "ACCESS_REFUSED - login was refused"),
            said(AMQPSoftError::NOTFOUND, "NOT_FOUND - no exchange 'x' in vhost '/'"),
            said(AMQPSoftError::PRECONDITIONFAILED, "PRECONDITION_FAILED - inequivalent arg 'durable'"),
            said(AMQPHardError::NOTALLOWED, "NOT_ALLOWED - vhost shop not found"),
            ErrorKind::AuthProviderError("no".to_owned()).into(),
        ];
        for error in refused {
            assert!(matches!(Fault::from(error.clone()), Fault::Refused(_)), "{error}");
        }
    }

    #[test]
    fn nobodys_message_is_to_blame_for_a_server_that_is_away() {
        let outcome = |fault: Fault| fault.outcome();
        assert!(matches!(outcome(Fault::Away("x".to_owned())), Outcome::Unreachable { .. }));
        assert!(matches!(outcome(Fault::Refused("x".to_owned())), Outcome::Misconfigured { .. }));
    }

    #[test]
    fn the_limit_is_read_from_the_complaint() {
        let text = "PRECONDITION_FAILED - message size 5000 is larger than configured max size 1024";
        assert_eq!(size_limit(&said(AMQPSoftError::PRECONDITIONFAILED, text)), Some(1024));
        assert_eq!(size_limit(&said(AMQPSoftError::PRECONDITIONFAILED, "something else")), None);
        assert_eq!(size_limit(&ErrorKind::MissingHeartbeatError.into()), None);
    }
}
