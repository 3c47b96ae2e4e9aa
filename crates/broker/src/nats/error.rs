//! What each failure of the client or of the server means to the relay and to a consumer.

use std::error::Error as _;

use async_nats::jetstream;
use async_nats::jetstream::ErrorCode;
use async_nats::jetstream::context::{
    CreateStreamError, CreateStreamErrorKind, GetStreamError, GetStreamErrorKind, PublishError,
    PublishErrorKind,
};
use async_nats::jetstream::stream::{ConsumerError, ConsumerErrorKind};

use crate::{Outcome, ReceiveError};

/// Why nothing can be done at the server now.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Trouble {
    /// It may pass by itself.
    #[error("NATS: {0}")]
    Away(String),
    /// Somebody has to change something.
    #[error("NATS: {0}")]
    Refused(String),
}

impl Trouble {
    pub(super) fn outcome(&self) -> Outcome {
        let error = self.to_string();
        match self {
            Self::Away(_) => Outcome::Unreachable { error },
            Self::Refused(_) => Outcome::Misconfigured { error },
        }
    }

    pub(super) fn receive(&self) -> ReceiveError {
        match self {
            Self::Away(_) => ReceiveError::Unreachable(self.to_string()),
            Self::Refused(_) => ReceiveError::Misconfigured(self.to_string()),
        }
    }
}

/// What the server's own answer says of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Meaning {
    /// It is this message.
    Impossible,
    /// It is the configuration.
    Wrong,
    /// It is the moment: no room, no leader, no quorum.
    Busy,
    /// A code that this program does not know.
    Unknown,
}

fn meaning(code: ErrorCode) -> Meaning {
    match code {
        ErrorCode::STREAM_MESSAGE_EXCEEDS_MAXIMUM | ErrorCode::STREAM_HEADER_EXCEEDS_MAXIMUM => {
            Meaning::Impossible
        }
        ErrorCode::STREAM_SEALED
        | ErrorCode::STREAM_NOT_FOUND
        | ErrorCode::STREAM_NOT_MATCH
        | ErrorCode::STREAM_SUBJECT_OVERLAP
        | ErrorCode::STREAM_NAME_EXIST
        | ErrorCode::STREAM_INVALID_CONFIG
        | ErrorCode::STREAM_REPLICAS_NOT_SUPPORTED
        | ErrorCode::STREAM_MAX_BYTES_REQUIRED
        | ErrorCode::STREAM_MAX_STREAM_BYTES_EXCEEDED
        | ErrorCode::MAXIMUM_STREAMS_LIMIT
        | ErrorCode::MAXIMUM_CONSUMERS_LIMIT
        | ErrorCode::CONSUMER_NAME_EXIST
        | ErrorCode::CONSUMER_CREATE
        | ErrorCode::CONSUMER_FILTER_NOT_SUBSET
        | ErrorCode::CONSUMER_MAX_PENDING_ACK_EXCESS
        | ErrorCode::CONSUMER_WQ_CONSUMER_NOT_UNIQUE
        | ErrorCode::CONSUMER_WQ_CONSUMER_NOT_DELIVER_ALL
        | ErrorCode::JETSTREAM_NOT_ENABLED
        | ErrorCode::JETSTREAM_NOT_ENABLED_FOR_ACCOUNT
        | ErrorCode::NO_ACCOUNT
        | ErrorCode::NO_LIMITS => Meaning::Wrong,
        // A stream that refuses what is new when it is full says STREAM_STORE_FAILED.
        ErrorCode::STREAM_STORE_FAILED
        | ErrorCode::INSUFFICIENT_RESOURCES
        | ErrorCode::MEMORY_RESOURCES_EXCEEDED
        | ErrorCode::STORAGE_RESOURCES_EXCEEDED
        | ErrorCode::ACCOUNT_RESOURCES_EXCEEDED
        | ErrorCode::CLUSTER_NOT_AVAILABLE
        | ErrorCode::CLUSTER_NOT_ACTIVE
        | ErrorCode::CLUSTER_NOT_ASSIGNED
        | ErrorCode::CLUSTER_NOT_LEADER
        | ErrorCode::CLUSTER_NO_PEERS
        | ErrorCode::CLUSTER_INCOMPLETE
        | ErrorCode::RAFT_GENERAL
        | ErrorCode::STREAM_OFFLINE
        | ErrorCode::CONSUMER_OFFLINE
        | ErrorCode::STREAM_TOO_MANY_REQUESTS => Meaning::Busy,
        _ => Meaning::Unknown,
    }
}

/// What the server refused to do for us.
fn refused(error: &jetstream::Error) -> Trouble {
    match meaning(error.error_code()) {
        Meaning::Wrong | Meaning::Impossible => Trouble::Refused(error.to_string()),
        Meaning::Busy | Meaning::Unknown => Trouble::Away(error.to_string()),
    }
}

/// What became of a message whose confirmation is an error. `None`: nobody listens to its subject, and why must be found out.
pub(super) fn unpublished(error: &PublishError) -> Option<Outcome> {
    let text = format!("NATS: {error}");
    Some(match error.kind() {
        PublishErrorKind::StreamNotFound => return None,
        PublishErrorKind::MaxPayloadExceeded => Outcome::Rejected { error: text },
        // Sent, and no word of it.
        PublishErrorKind::TimedOut | PublishErrorKind::BrokenPipe => Outcome::Unconfirmed { error: text },
        PublishErrorKind::MaxAckPending => Outcome::Unreachable { error: text },
        // We ask for neither; somebody changed the message on its way.
        PublishErrorKind::WrongLastMessageId | PublishErrorKind::WrongLastSequence => {
            Outcome::Deferred { error: text, after: None }
        }
        PublishErrorKind::Other => {
            let answer = error.source().and_then(|source| source.downcast_ref::<jetstream::Error>());
            match answer.map(|answer| meaning(answer.error_code())) {
                Some(Meaning::Impossible) => Outcome::Rejected { error: text },
                Some(Meaning::Wrong) => Outcome::Misconfigured { error: text },
                Some(Meaning::Busy) => Outcome::Unreachable { error: text },
                Some(Meaning::Unknown) => Outcome::Deferred { error: text, after: None },
                // An answer that cannot be read may be a confirmation.
                None => Outcome::Unconfirmed { error: text },
            }
        }
    })
}

/// Why a stream could not be looked at. `None`: there is none of that name.
pub(super) fn unseen(error: &GetStreamError) -> Option<Trouble> {
    match error.kind() {
        GetStreamErrorKind::JetStream(answer) if answer.error_code() == ErrorCode::STREAM_NOT_FOUND => None,
        GetStreamErrorKind::JetStream(answer) => Some(refused(&answer)),
        GetStreamErrorKind::Request => Some(Trouble::Away(error.to_string())),
        GetStreamErrorKind::EmptyName | GetStreamErrorKind::InvalidStreamName => {
            Some(Trouble::Refused(error.to_string()))
        }
    }
}

/// Why a stream could not be made.
pub(super) fn uncreated(error: &CreateStreamError) -> Trouble {
    match error.kind() {
        CreateStreamErrorKind::JetStream(answer) => refused(&answer),
        CreateStreamErrorKind::TimedOut
        | CreateStreamErrorKind::Response
        | CreateStreamErrorKind::ResponseParse
        | CreateStreamErrorKind::NotFound
        | CreateStreamErrorKind::JetStreamUnavailable => Trouble::Away(error.to_string()),
        CreateStreamErrorKind::EmptyStreamName
        | CreateStreamErrorKind::InvalidStreamName
        | CreateStreamErrorKind::DomainAndExternalSet => Trouble::Refused(error.to_string()),
    }
}

/// Why a consumer could not be looked at or made. `None`: there is none of that name.
pub(super) fn unserved(error: &ConsumerError) -> Option<Trouble> {
    match error.kind() {
        ConsumerErrorKind::JetStream(answer) if answer.error_code() == ErrorCode::CONSUMER_NOT_FOUND => None,
        // Deleted under our feet; it is looked for, or made, before the consumer is.
        ConsumerErrorKind::JetStream(answer) if answer.error_code() == ErrorCode::STREAM_NOT_FOUND => {
            Some(Trouble::Away(answer.to_string()))
        }
        ConsumerErrorKind::JetStream(answer) => Some(refused(&answer)),
        ConsumerErrorKind::TimedOut | ConsumerErrorKind::Request | ConsumerErrorKind::Other => {
            Some(Trouble::Away(error.to_string()))
        }
        ConsumerErrorKind::InvalidConsumerType | ConsumerErrorKind::InvalidName => {
            Some(Trouble::Refused(error.to_string()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(code: ErrorCode) -> jetstream::Error {
        let answer = serde_json::json!({"code": 400, "err_code": code.0, "description": "so it is"});
        serde_json::from_value(answer).expect("it is what servers say")
    }

    fn refused_with(code: ErrorCode) -> PublishError {
        PublishError::with_source(PublishErrorKind::Other, answer(code))
    }

    #[test]
    fn every_failure_to_publish_says_what_is_to_be_done() {
        type Expected = fn(&Outcome) -> bool;
        let (rejected, misconfigured, unreachable, unconfirmed, deferred): (
            Expected,
            Expected,
            Expected,
            Expected,
            Expected,
        ) = (
            |outcome| matches!(outcome, Outcome::Rejected { .. }),
            |outcome| matches!(outcome, Outcome::Misconfigured { .. }),
            |outcome| matches!(outcome, Outcome::Unreachable { .. }),
            |outcome| matches!(outcome, Outcome::Unconfirmed { .. }),
            |outcome| matches!(outcome, Outcome::Deferred { .. }),
        );
        let cases: [(PublishError, Expected); 12] = [
            (PublishErrorKind::MaxPayloadExceeded.into(), rejected),
            (PublishErrorKind::TimedOut.into(), unconfirmed),
            (PublishErrorKind::BrokenPipe.into(), unconfirmed),
            (PublishErrorKind::MaxAckPending.into(), unreachable),
            (PublishErrorKind::WrongLastSequence.into(), deferred),
            (PublishErrorKind::Other.into(), unconfirmed),
            (refused_with(ErrorCode::STREAM_MESSAGE_EXCEEDS_MAXIMUM), rejected),
            (refused_with(ErrorCode::STREAM_SEALED), misconfigured),
            (refused_with(ErrorCode::STREAM_NOT_MATCH), misconfigured),
            (refused_with(ErrorCode::STREAM_STORE_FAILED), unreachable),
            (refused_with(ErrorCode::CLUSTER_NOT_AVAILABLE), unreachable),
            (refused_with(ErrorCode(19_999)), deferred),
        ];
        for (error, expected) in cases {
            let outcome = unpublished(&error).expect("it says so by itself");
            assert!(expected(&outcome), "{error}: {outcome:?}");
        }
        assert_eq!(unpublished(&PublishErrorKind::StreamNotFound.into()), None);
    }

    #[test]
    fn what_is_missing_is_told_from_what_is_away() {
        let get = |code| GetStreamError::new(GetStreamErrorKind::JetStream(answer(code)));
        assert_eq!(unseen(&get(ErrorCode::STREAM_NOT_FOUND)), None);
        assert!(matches!(unseen(&get(ErrorCode::CLUSTER_NOT_AVAILABLE)), Some(Trouble::Away(_))));
        let away = GetStreamError::new(GetStreamErrorKind::Request);
        assert!(matches!(unseen(&away), Some(Trouble::Away(_))));
        let create = |code| CreateStreamError::new(CreateStreamErrorKind::JetStream(answer(code)));
        assert!(matches!(uncreated(&create(ErrorCode::STREAM_SUBJECT_OVERLAP)), Trouble::Refused(_)));
        assert!(matches!(uncreated(&create(ErrorCode::STORAGE_RESOURCES_EXCEEDED)), Trouble::Away(_)));
        let consumer = |code| ConsumerError::new(ConsumerErrorKind::JetStream(answer(code)));
        assert_eq!(unserved(&consumer(ErrorCode::CONSUMER_NOT_FOUND)), None);
        assert!(matches!(unserved(&consumer(ErrorCode::STREAM_NOT_FOUND)), Some(Trouble::Away(_))));
        assert!(matches!(unserved(&consumer(ErrorCode::MAXIMUM_CONSUMERS_LIMIT)), Some(Trouble::Refused(_))));
    }

    #[test]
    fn trouble_that_passes_blames_nobody() {
        let away = Trouble::Away("gone".to_owned());
        assert!(matches!(away.outcome(), Outcome::Unreachable { .. }));
        assert!(matches!(away.receive(), ReceiveError::Unreachable(_)));
        let refused = Trouble::Refused("no".to_owned());
        assert!(matches!(refused.outcome(), Outcome::Misconfigured { .. }));
        assert!(matches!(refused.receive(), ReceiveError::Misconfigured(_)));
    }
}
