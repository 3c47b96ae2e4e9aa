//! What an error of librdkafka means for whoever called: one place decides.

use rdkafka::error::KafkaError;
use rdkafka::types::RDKafkaErrorCode as Code;

use crate::{Outcome, ReceiveError};

/// The error without settings in it: one of them may be a password.
pub(super) fn text(error: &KafkaError) -> String {
    match error {
        KafkaError::ClientConfig(_, description, name, _) => format!("{description} ({name})"),
        other => other.to_string(),
    }
}

/// The code of an error, where it has one.
pub(super) fn code(error: &KafkaError) -> Code {
    match error {
        KafkaError::AdminOp(code) => *code,
        other => other.rdkafka_error_code().unwrap_or(Code::Fail),
    }
}

/// What one failed message of a publish is told. `error` says it for people.
pub(super) fn outcome(code: Code, error: String) -> Outcome {
    match code {
        // A setting of the topic, or of our rights on it.
        Code::UnknownTopic
        | Code::UnknownTopicOrPartition
        | Code::UnknownTopicId
        | Code::UnknownPartition
        | Code::InvalidTopic
        | Code::TopicAuthorizationFailed
        | Code::InvalidRequiredAcks
        | Code::InvalidConfig
        | Code::InvalidPartitions
        | Code::InvalidReplicationFactor
        | Code::PolicyViolation
        | Code::UnsupportedCompressionType
        | Code::UnsupportedForMessageFormat
        | Code::UnsupportedVersion
        | Code::UnsupportedFeature => Outcome::Misconfigured { error },
        // Kafka refuses batches: it may have been for another message of the batch.
        Code::MessageSizeTooLarge
        | Code::MessageBatchTooLarge
        | Code::InvalidMessageSize
        | Code::InvalidMessage
        | Code::InvalidRecord
        | Code::InvalidTimestamp
        | Code::ThrottlingQuotaExceeded => Outcome::Deferred { error, after: None },
        // It never left, or nobody was there to take it. A wrong password is the fault of no message either.
        Code::PurgeQueue
        | Code::QueueFull
        | Code::AllBrokersDown
        | Code::Resolve
        | Code::SSL
        | Code::Authentication
        | Code::SaslAuthenticationFailed
        | Code::UnsupportedSASLMechanism
        | Code::IllegalSASLState
        | Code::ClusterAuthorizationFailed
        | Code::BrokerNotAvailable
        | Code::LeaderNotAvailable
        | Code::NotLeaderForPartition
        | Code::NotController
        | Code::NotEnoughReplicas
        | Code::ISRInsufficient
        | Code::KafkaStorageError => Outcome::Unreachable { error },
        // Whatever else there is or will be: perhaps it is stored.
        _ => Outcome::Unconfirmed { error },
    }
}

/// Whether a message that failed so is certainly not stored.
pub(super) fn certain(code: Code) -> bool {
    !matches!(outcome(code, String::new()), Outcome::Unconfirmed { .. })
}

/// Whether nothing can be sent to the topic, whatever it is.
pub(super) fn of_the_topic(code: Code) -> bool {
    !of_the_producer(code) && matches!(outcome(code, String::new()), Outcome::Misconfigured { .. })
}

/// Whether any message of a call failed by itself: others may not have been tried for it.
pub(super) fn blamed(reports: &[Result<(), Code>]) -> bool {
    reports.iter().any(|report| report.is_err_and(|code| !of_the_producer(code)))
}

/// What failed because the producer did, and says nothing of the message itself.
pub(super) fn of_the_producer(code: Code) -> bool {
    matches!(
        code,
        Code::PurgeQueue
            | Code::UnknownPartition
            | Code::PurgeInflight
            | Code::Fatal
            | Code::GaplessGuarantee
            | Code::Inconsistent
            | Code::OutOfOrderSequenceNumber
            | Code::DuplicateSequenceNumber
            | Code::UnknownProducerId
            | Code::InvalidProducerEpoch
            | Code::InvalidProducerIdMapping
            | Code::ProducerFenced
            | Code::Fenced
    )
}

/// Why a subscription cannot go on.
pub(super) fn receive(code: Code, error: String) -> ReceiveError {
    match code {
        Code::UnknownTopic
        | Code::UnknownTopicOrPartition
        | Code::UnknownTopicId
        | Code::InvalidTopic
        | Code::TopicAuthorizationFailed
        | Code::GroupAuthorizationFailed
        | Code::TransactionalIdAuthorizationFailed
        | Code::InvalidTransactionTimeout
        | Code::InvalidGroupId
        | Code::InvalidSessionTimeout
        | Code::InconsistentGroupProtocol
        | Code::GroupMaxSizeReached
        | Code::InvalidPartitions
        | Code::InvalidReplicationFactor
        | Code::InvalidConfig
        | Code::PolicyViolation
        | Code::UnsupportedVersion
        | Code::UnsupportedFeature => ReceiveError::Misconfigured(error),
        _ => ReceiveError::Unreachable(error),
    }
}

/// Whether librdkafka goes on by itself after this, so that a subscription need not end.
pub(super) fn passes(code: Code) -> bool {
    matches!(
        code,
        Code::BrokerTransportFailure
            | Code::AllBrokersDown
            | Code::Resolve
            | Code::OperationTimedOut
            | Code::MessageTimedOut
            | Code::RequestTimedOut
            | Code::NetworkException
            | Code::WaitingForCoordinator
            | Code::CoordinatorNotAvailable
            | Code::CoordinatorLoadInProgress
            | Code::NotCoordinator
            | Code::LeaderNotAvailable
            | Code::NotLeaderForPartition
            | Code::BrokerNotAvailable
            | Code::AutoOffsetReset
            | Code::RebalanceInProgress
            | Code::NoError
    )
}

/// What becomes of an attempt to commit.
#[derive(Debug)]
pub(super) enum Commit {
    /// It is in Kafka.
    Done,
    /// The group is busy with itself: once more, soon.
    Again,
    /// The group goes on without this member.
    Lost,
    /// Somebody has to do something.
    Failed(ReceiveError),
}

/// Reads the answer to a commit.
pub(super) fn commit(answer: Result<(), KafkaError>) -> Commit {
    let Err(error) = answer else { return Commit::Done };
    match code(&error) {
        // There was nothing that Kafka did not know.
        Code::NoError | Code::NoOffset => Commit::Done,
        // Of an old generation while the group agrees on the next one: what is still held then can be committed. A member
        // that the group has removed is unknown to it.
        Code::RebalanceInProgress
        | Code::IllegalGeneration
        | Code::CoordinatorLoadInProgress
        | Code::CoordinatorNotAvailable
        | Code::NotCoordinator
        | Code::WaitingForCoordinator
        | Code::UnstableOffsetCommit => Commit::Again,
        Code::UnknownMemberId
        | Code::AssignmentLost
        | Code::FencedInstanceId
        | Code::FencedMemberEpoch
        | Code::StaleMemberEpoch
        | Code::Fenced => Commit::Lost,
        other => Commit::Failed(receive(other, text(&error))),
    }
}

#[cfg(test)]
mod tests {
    use rdkafka::types::RDKafkaConfRes;

    use super::*;

    #[test]
    fn every_error_tells_the_relay_what_to_do_next() {
        let said = || "why".to_owned();
        let misconfigured = Outcome::Misconfigured { error: said() };
        let deferred = Outcome::Deferred { error: said(), after: None };
        let unreachable = Outcome::Unreachable { error: said() };
        let unconfirmed = Outcome::Unconfirmed { error: said() };
        let cases = [
            (Code::UnknownTopicOrPartition, misconfigured.clone()),
            (Code::UnknownTopic, misconfigured.clone()),
            (Code::TopicAuthorizationFailed, misconfigured),
            (Code::MessageSizeTooLarge, deferred.clone()),
            (Code::InvalidRecord, deferred),
            (Code::PurgeQueue, unreachable.clone()),
            (Code::AllBrokersDown, unreachable.clone()),
            (Code::Authentication, unreachable.clone()),
            (Code::NotEnoughReplicas, unreachable),
            (Code::NotEnoughReplicasAfterAppend, unconfirmed.clone()),
            (Code::MessageTimedOut, unconfirmed.clone()),
            (Code::PurgeInflight, unconfirmed.clone()),
            (Code::BrokerTransportFailure, unconfirmed.clone()),
            (Code::Fatal, unconfirmed.clone()),
            (Code::OutOfOrderSequenceNumber, unconfirmed),
        ];
        for (code, expected) in cases {
            assert_eq!(outcome(code, said()), expected, "{code:?}");
            assert_eq!(certain(code), !matches!(expected, Outcome::Unconfirmed { .. }), "{code:?}");
        }
    }

    #[test]
    fn a_late_commit_is_no_error_and_a_busy_group_is_asked_again() {
        let answer = |code| commit(Err(KafkaError::ConsumerCommit(code)));
        assert!(matches!(commit(Ok(())), Commit::Done));
        assert!(matches!(answer(Code::NoOffset), Commit::Done));
        assert!(matches!(answer(Code::RebalanceInProgress), Commit::Again));
        assert!(matches!(answer(Code::UnknownMemberId), Commit::Lost));
        assert!(matches!(answer(Code::IllegalGeneration), Commit::Again));
        let failed = answer(Code::GroupAuthorizationFailed);
        assert!(matches!(failed, Commit::Failed(ReceiveError::Misconfigured(_))), "{failed:?}");
        let failed = answer(Code::BrokerTransportFailure);
        assert!(matches!(failed, Commit::Failed(ReceiveError::Unreachable(_))), "{failed:?}");
    }

    #[test]
    fn a_setting_that_librdkafka_refuses_is_named_without_its_value() {
        let (name, value) = ("sasl.password".to_owned(), "hush".to_owned());
        let refused = RDKafkaConfRes::RD_KAFKA_CONF_INVALID;
        let said = text(&KafkaError::ClientConfig(refused, "invalid".to_owned(), name, value));
        assert!(said.contains("sasl.password") && !said.contains("hush"), "{said}");
    }
}
