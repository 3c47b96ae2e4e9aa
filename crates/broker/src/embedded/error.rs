//! What can go wrong with the embedded broker, and what each failure means to the relay and to a consumer.

use sqlite::Error as File;

use crate::{Outcome, ReceiveError};

/// Why a broker could not be opened or asked.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// A setting makes no sense.
    #[error(transparent)]
    Setting(#[from] crate::BadUrl),
    /// The file that shows other processes that this one lives cannot be made.
    #[error("{0}")]
    Presence(String),
    /// The thread that renews leases cannot be started.
    #[error("cannot start the thread that renews leases: {0}")]
    Thread(String),
    /// There is no such group.
    #[error("the embedded broker knows no consumer group `{0}`")]
    NoSuchGroup(String),
    /// The group has members at work.
    #[error("the consumer group `{0}` has members at work: stop them first")]
    GroupInUse(String),
    /// The file itself.
    #[error(transparent)]
    File(#[from] File),
}

/// What a failed transaction means to every message that was in it.
///
/// Whatever a message can be guilty of was found before the transaction, so none is to blame here: a full disk
/// must not make anybody Dead.
pub(super) fn outcome(error: &File) -> Outcome {
    let error_text = format!("the embedded broker: {error}");
    match error {
        // The job may have been running when its answer was lost.
        File::Closed => Outcome::Unconfirmed { error: error_text },
        File::Newer { .. } => Outcome::Misconfigured { error: error_text },
        File::Busy
        | File::Disk(_)
        | File::Statement(_)
        | File::Panicked(_)
        | File::Folder { .. }
        | File::Open { .. } => Outcome::Unreachable { error: error_text },
    }
}

/// What a failed read or write means to a consumer.
pub(super) fn receive(error: &File) -> ReceiveError {
    match error {
        File::Newer { .. } => ReceiveError::Misconfigured(error.to_string()),
        File::Busy
        | File::Disk(_)
        | File::Statement(_)
        | File::Panicked(_)
        | File::Closed
        | File::Folder { .. }
        | File::Open { .. } => ReceiveError::Unreachable(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_message_is_blamed_for_a_failure_of_the_file() {
        let unreachable = [
            File::Busy,
            File::Disk("full".to_owned()),
            File::Statement("malformed".to_owned()),
            File::Panicked("oh".to_owned()),
        ];
        for error in unreachable {
            assert!(matches!(outcome(&error), Outcome::Unreachable { .. }), "{error}");
            assert!(matches!(receive(&error), ReceiveError::Unreachable(_)), "{error}");
        }
        assert!(matches!(outcome(&File::Closed), Outcome::Unconfirmed { .. }));
        let newer = File::Newer { found: 2, known: 1 };
        assert!(matches!(outcome(&newer), Outcome::Misconfigured { .. }));
        assert!(matches!(receive(&newer), ReceiveError::Misconfigured(_)));
    }
}
