//! What can go wrong with Pub/Sub, and what each failure means to the relay and to a consumer.

use std::error::Error as _;

use google_cloud_gax::error::rpc::Code;
use google_cloud_pubsub::Error;
use google_cloud_pubsub::error::{AckError, PublishError};

use crate::{Outcome, ReceiveError};

/// What a call to the service came to, named by what is to be done about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// The service is down or busy, or cannot be found.
    Away,
    /// No answer came: perhaps it was done.
    Silent,
    /// There is nothing of that name.
    Missing,
    /// There is something of that name already.
    There,
    /// What was sent is not acceptable.
    Invalid,
    /// We may not, or it cannot be done as things are set up.
    Refused,
}

/// The one place that reads what the client says.
pub(super) fn failure(error: &Error) -> Failure {
    // Behind what was given up is the reason for which it was tried again.
    if let Some(reason) = error.source().and_then(|source| source.downcast_ref::<Error>()) {
        return failure(reason);
    }
    if let Some(status) = error.status() {
        return by_code(&status.code);
    }
    match error.http_status_code() {
        Some(code @ 400..500) if code != 408 && code != 429 => return Failure::Refused,
        Some(_) => return Failure::Away,
        None => {}
    }
    if error.is_connect() || error.is_transient_and_before_rpc() {
        return Failure::Away;
    }
    if error.is_authentication() || error.is_binding() || error.is_serialization() {
        return Failure::Refused;
    }
    // What is left happened on the way, or was given up after a while: nobody knows how far it came.
    Failure::Silent
}

fn by_code(code: &Code) -> Failure {
    match code {
        Code::Unavailable | Code::ResourceExhausted | Code::Aborted | Code::Internal => Failure::Away,
        Code::Cancelled | Code::DeadlineExceeded | Code::Unknown | Code::DataLoss | Code::Ok => {
            Failure::Silent
        }
        Code::NotFound => Failure::Missing,
        Code::AlreadyExists => Failure::There,
        Code::InvalidArgument | Code::OutOfRange => Failure::Invalid,
        Code::PermissionDenied | Code::Unauthenticated | Code::FailedPrecondition | Code::Unimplemented => {
            Failure::Refused
        }
        // The enumeration may grow.
        _ => Failure::Silent,
    }
}

/// What a failed request means to a message of it, which goes to `topic`.
pub(super) fn outcome(error: &Error, topic: &str) -> Outcome {
    let said = explain(error);
    match failure(error) {
        Failure::Away => Outcome::Unreachable { error: format!("Pub/Sub cannot be reached: {said}") },
        Failure::Silent | Failure::There => {
            Outcome::Unconfirmed { error: format!("no word from Pub/Sub: {said}") }
        }
        Failure::Missing => {
            let error = format!("there is no topic {topic}: make it, or let `create=true` make it ({said})");
            Outcome::Misconfigured { error }
        }
        Failure::Invalid => Outcome::Rejected { error: format!("Pub/Sub does not take it: {said}") },
        Failure::Refused => {
            Outcome::Misconfigured { error: format!("Pub/Sub refuses messages for {topic}: {said}") }
        }
    }
}

/// What became of a message that the client was given.
pub(super) fn published(error: &PublishError, topic: &str) -> Outcome {
    match error {
        PublishError::Rpc(error) => outcome(error, topic),
        PublishError::OrderingKeyPaused => Outcome::Held,
        // The client was shut down around it, or has learned to say something else.
        error => Outcome::Unconfirmed { error: error.to_string() },
    }
}

/// What a failed call means to a consumer that asked about `about`.
pub(super) fn receive(error: &Error, about: &str) -> ReceiveError {
    let said = format!("{about}: {}", explain(error));
    match failure(error) {
        Failure::Away | Failure::Silent => ReceiveError::Unreachable(said),
        Failure::Missing | Failure::There | Failure::Invalid | Failure::Refused => {
            ReceiveError::Misconfigured(said)
        }
    }
}

/// What an acknowledgement that was to be confirmed came to. One that is late is no error: the message comes again.
pub(super) fn acknowledged(error: &AckError) -> Result<(), ReceiveError> {
    match error {
        AckError::LeaseExpired | AckError::ShutdownBeforeAck | AckError::Shutdown(_) => Ok(()),
        AckError::Rpc { source, .. } => match failure(source) {
            // The lease is over, so the service knows the handle no more.
            Failure::Missing | Failure::There | Failure::Invalid => Ok(()),
            Failure::Away | Failure::Silent => Err(ReceiveError::Unreachable(explain(source))),
            Failure::Refused => Err(ReceiveError::Misconfigured(explain(source))),
        },
        // The client has learned to say something else.
        error => Err(ReceiveError::Unreachable(error.to_string())),
    }
}

/// In the words of the service where it said something, and of the client and what lies beneath it where not.
pub(super) fn explain(error: &Error) -> String {
    if let Some(status) = error.status() {
        return format!("{} ({})", status.message, status.code.name());
    }
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(deeper) = cause {
        let more = deeper.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = deeper.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use google_cloud_gax::error::rpc::Status;

    use super::*;

    fn service(code: Code) -> Error {
        Error::service(Status::default().set_code(code).set_message("why"))
    }

    #[test]
    fn every_word_of_the_service_has_a_meaning() {
        let table = [
            (Code::Unavailable, Failure::Away),
            (Code::ResourceExhausted, Failure::Away),
            (Code::Aborted, Failure::Away),
            (Code::Internal, Failure::Away),
            (Code::Cancelled, Failure::Silent),
            (Code::DeadlineExceeded, Failure::Silent),
            (Code::Unknown, Failure::Silent),
            (Code::DataLoss, Failure::Silent),
            (Code::NotFound, Failure::Missing),
            (Code::AlreadyExists, Failure::There),
            (Code::InvalidArgument, Failure::Invalid),
            (Code::OutOfRange, Failure::Invalid),
            (Code::PermissionDenied, Failure::Refused),
            (Code::Unauthenticated, Failure::Refused),
            (Code::FailedPrecondition, Failure::Refused),
            (Code::Unimplemented, Failure::Refused),
        ];
        for (code, expected) in table {
            assert_eq!(failure(&service(code)), expected, "{code:?}");
        }
    }

    #[test]
    fn what_happens_on_the_way_blames_no_message() {
        let away = |error: &Error| matches!(outcome(error, "orders"), Outcome::Unreachable { .. });
        let silent = |error: &Error| matches!(outcome(error, "orders"), Outcome::Unconfirmed { .. });
        assert!(away(&Error::connect("refused")));
        assert!(away(&Error::http(503, Default::default(), Default::default())));
        assert!(silent(&Error::io("reset")));
        assert!(silent(&Error::timeout("too long")));
        assert!(silent(&Error::exhausted("gave up")));
        assert!(away(&Error::exhausted(Error::connect("refused"))));
        assert!(silent(&Error::transport(Default::default(), "closed")));
    }

    #[test]
    fn an_outcome_names_what_is_wrong() {
        let Outcome::Misconfigured { error } = outcome(&service(Code::NotFound), "orders") else {
            panic!("the topic is missing")
        };
        assert!(error.contains("orders") && error.contains("why"), "{error}");
        assert!(matches!(outcome(&service(Code::InvalidArgument), "orders"), Outcome::Rejected { .. }));
        assert!(matches!(outcome(&service(Code::PermissionDenied), "orders"), Outcome::Misconfigured { .. }));
        assert_eq!(published(&PublishError::OrderingKeyPaused, "orders"), Outcome::Held);
        assert!(matches!(published(&PublishError::Shutdown, "orders"), Outcome::Unconfirmed { .. }));
        let rpc = PublishError::Rpc(Arc::new(service(Code::Unavailable)));
        assert!(matches!(published(&rpc, "orders"), Outcome::Unreachable { .. }));
    }

    #[test]
    fn a_consumer_waits_for_what_passes_and_stops_for_what_does_not() {
        assert!(matches!(receive(&service(Code::Unavailable), "orders"), ReceiveError::Unreachable(_)));
        assert!(matches!(receive(&service(Code::NotFound), "orders"), ReceiveError::Misconfigured(_)));
        assert!(acknowledged(&AckError::LeaseExpired).is_ok(), "it is no error to be late");
    }
}
