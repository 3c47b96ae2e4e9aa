//! What a failed request to SQS means: to a message, to a consumer, to whoever looks.

use std::error::Error;

use aws_sdk_sqs::error::{DisplayErrorContext, ProvideErrorMetadata, SdkError};
use aws_sdk_sqs::types::BatchResultErrorEntry;
use hyper_util::client::legacy::Error as Transport;

use crate::{Outcome, ReceiveError};

/// Why a request came to nothing, by what can be done about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Trouble {
    /// Not done: SQS is away or wants less.
    Away(String),
    /// Perhaps done: the answer did not come, or says so.
    Unknown(String),
    /// Not done: there is no such queue.
    Missing(String),
    /// Not done, and not before somebody changes a setting or a right.
    Setting(String),
    /// Not done: SQS will not have what is in the request.
    Refused(String),
}

/// What a failed request means.
pub(super) fn trouble<E>(error: &SdkError<E>) -> Trouble
where
    E: ProvideErrorMetadata + Error + 'static,
{
    let text = || format!("{}", DisplayErrorContext(error));
    match error {
        SdkError::ServiceError(answer) => {
            let status = answer.raw().status().as_u16();
            let (code, said) = (answer.err().code().unwrap_or_default(), answer.err().message());
            let said = said.unwrap_or("it does not say why");
            by_code(code, status, format!("{said} ({status} {code})"))
        }
        SdkError::DispatchFailure(_) if never_sent(error) => Trouble::Away(text()),
        SdkError::DispatchFailure(_) | SdkError::ResponseError(_) | SdkError::TimeoutError(_) => {
            Trouble::Unknown(text())
        }
        // Nothing was sent: most often there are no credentials yet, and they may come.
        SdkError::ConstructionFailure(_) => Trouble::Away(text()),
        _ => Trouble::Unknown(text()),
    }
}

/// Whether there was no connection that a request could have been sent on.
fn never_sent(error: &(dyn Error + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        if error.downcast_ref::<Transport>().is_some_and(Transport::is_connect) {
            return true;
        }
        next = error.source();
    }
    false
}

/// The codes of all operations are one list: where two have a code in common, it means the same.
fn by_code(code: &str, status: u16, text: String) -> Trouble {
    match code.strip_prefix("AWS.SimpleQueueService.").unwrap_or(code) {
        "QueueDoesNotExist" | "NonExistentQueue" => Trouble::Missing(text),
        "QueueDeletedRecently"
        | "RequestThrottled"
        | "Throttling"
        | "ThrottlingException"
        | "OverLimit"
        | "RequestLimitExceeded"
        | "TooManyRequestsException"
        | "KmsThrottled"
        | "KMS.ThrottlingException"
        | "ServiceUnavailable"
        | "ServiceUnavailableException"
        | "ExpiredToken"
        | "ExpiredTokenException"
        | "RequestExpired" => Trouble::Away(text),
        "InternalError" | "InternalFailure" | "InternalServerError" => Trouble::Unknown(text),
        "ReceiptHandleIsInvalid"
        | "MessageNotInflight"
        | "InvalidMessageContents"
        | "MessageTooLong"
        | "BatchRequestTooLong"
        | "InvalidParameterValue"
        | "InvalidAttributeValue"
        | "MissingParameter"
        | "InvalidBatchEntryId"
        | "BatchEntryIdsNotDistinct"
        | "TooManyEntriesInBatchRequest" => Trouble::Refused(text),
        // Access, keys and names; and whatever a server says that is no SQS at all: it must not make a message Dead.
        _ => match status {
            429 | 503 => Trouble::Away(text),
            500.. => Trouble::Unknown(text),
            _ => Trouble::Setting(text),
        },
    }
}

/// What SQS says of one entry that failed in a request that did not.
pub(super) fn entry(failed: &BatchResultErrorEntry) -> Trouble {
    let text = format!("{} ({})", failed.message().unwrap_or("it does not say why"), failed.code());
    match (by_code(failed.code(), 400, text), failed.sender_fault()) {
        // It is known to have failed, whatever went wrong inside.
        (Trouble::Unknown(text), _) | (Trouble::Setting(text), false) => Trouble::Away(text),
        (trouble, _) => trouble,
    }
}

impl Trouble {
    /// What it means to every message of the request.
    pub(super) fn outcome(self, queue: &str) -> Outcome {
        let error = self.about(queue);
        match self {
            Self::Away(_) => Outcome::Unreachable { error },
            Self::Unknown(_) => Outcome::Unconfirmed { error },
            Self::Missing(_) | Self::Setting(_) => Outcome::Misconfigured { error },
            Self::Refused(_) => Outcome::Rejected { error },
        }
    }

    /// What it means to the one message of an entry that failed beside others that did not.
    pub(super) fn outcome_alone(self, queue: &str) -> Outcome {
        match self.outcome(queue) {
            Outcome::Unreachable { error } => Outcome::Deferred { error, after: None },
            outcome => outcome,
        }
    }

    /// What it means to a consumer.
    pub(super) fn receiving(self, queue: &str) -> ReceiveError {
        let text = self.about(queue);
        match self {
            Self::Away(_) | Self::Unknown(_) => ReceiveError::Unreachable(text),
            Self::Missing(_) | Self::Setting(_) | Self::Refused(_) => ReceiveError::Misconfigured(text),
        }
    }

    /// For people.
    pub(super) fn about(&self, queue: &str) -> String {
        let (Self::Away(text)
        | Self::Unknown(text)
        | Self::Missing(text)
        | Self::Setting(text)
        | Self::Refused(text)) = self;
        format!("SQS queue `{queue}`: {text}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Case = (&'static str, u16, fn(String) -> Trouble);

    #[test]
    fn every_code_says_what_can_be_done() {
        let table: [Case; 16] = [
            ("QueueDoesNotExist", 400, Trouble::Missing),
            ("AWS.SimpleQueueService.NonExistentQueue", 400, Trouble::Missing),
            ("AWS.SimpleQueueService.QueueDeletedRecently", 400, Trouble::Away),
            ("RequestThrottled", 403, Trouble::Away),
            ("ServiceUnavailable", 503, Trouble::Away),
            ("ExpiredToken", 403, Trouble::Away),
            ("InternalError", 500, Trouble::Unknown),
            ("AccessDenied", 403, Trouble::Setting),
            ("InvalidClientTokenId", 403, Trouble::Setting),
            ("KmsDisabled", 400, Trouble::Setting),
            ("QueueNameExists", 400, Trouble::Setting),
            ("InvalidMessageContents", 400, Trouble::Refused),
            ("AWS.SimpleQueueService.BatchRequestTooLong", 400, Trouble::Refused),
            ("", 502, Trouble::Unknown),
            ("", 429, Trouble::Away),
            ("", 404, Trouble::Setting),
        ];
        for (code, status, expected) in table {
            assert_eq!(by_code(code, status, String::new()), expected(String::new()), "{code} {status}");
        }
    }

    #[test]
    fn an_entry_that_failed_is_blamed_only_for_what_is_in_it() {
        let failed = |code: &str, sender_fault| {
            let entry = BatchResultErrorEntry::builder().id("0").code(code).sender_fault(sender_fault);
            super::entry(&entry.build().expect("it has all it needs")).outcome_alone("orders")
        };
        assert!(matches!(failed("InternalError", false), Outcome::Deferred { .. }));
        assert!(matches!(failed("ServiceUnavailable", false), Outcome::Deferred { .. }));
        assert!(matches!(failed("SomethingNew", false), Outcome::Deferred { .. }));
        assert!(matches!(failed("InvalidMessageContents", true), Outcome::Rejected { .. }));
        assert!(matches!(failed("AccessDenied", true), Outcome::Misconfigured { .. }));
    }

    #[test]
    fn a_consumer_waits_for_what_may_come_back_by_itself_alone() {
        let text = String::new;
        assert!(matches!(Trouble::Away(text()).receiving("q"), ReceiveError::Unreachable(_)));
        assert!(matches!(Trouble::Unknown(text()).receiving("q"), ReceiveError::Unreachable(_)));
        assert!(matches!(Trouble::Missing(text()).receiving("q"), ReceiveError::Misconfigured(_)));
        assert!(matches!(Trouble::Setting(text()).receiving("q"), ReceiveError::Misconfigured(_)));
    }
}
