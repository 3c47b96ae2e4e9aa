//! Why a command did not do what it was asked, and the exit code that says so to scripts.

use std::process::ExitCode;

use admin::{Problem, ProblemKind};

use crate::config::Rejected;

/// What an exit code means. The help lists the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Exit {
    Unexpected = 1,
    Usage = 2,
    NotFound = 3,
    Refused = 4,
    Unavailable = 5,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// A command that was not done.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) exit: Exit,
    /// A stable word for programs.
    pub(super) code: &'static str,
    /// What is wrong and what to do.
    pub(super) text: String,
    closed_pipe: bool,
}

impl Failure {
    pub(super) fn new(exit: Exit, text: impl Into<String>) -> Self {
        let code = match exit {
            Exit::Unexpected => "unexpected",
            Exit::Usage => "usage",
            Exit::NotFound => "not-found",
            Exit::Refused => "refused",
            Exit::Unavailable => "unavailable",
        };
        Self { exit, code, text: text.into(), closed_pipe: false }
    }

    pub(super) fn usage(text: impl Into<String>) -> Self {
        Self::new(Exit::Usage, text)
    }

    /// The command was done, and what it found is not as it should be.
    pub(super) fn differs(text: impl Into<String>) -> Self {
        Self { code: "differs", ..Self::new(Exit::Unexpected, text) }
    }

    /// Whoever read our output has seen enough: `postrider list | head`.
    pub(super) fn is_closed_pipe(&self) -> bool {
        self.closed_pipe
    }

    /// Standard output could not be written.
    pub(super) fn writing(error: &std::io::Error) -> Self {
        let closed_pipe = error.kind() == std::io::ErrorKind::BrokenPipe;
        Self { closed_pipe, ..Self::new(Exit::Unexpected, format!("cannot write the answer: {error}")) }
    }
}

impl From<Problem> for Failure {
    fn from(problem: Problem) -> Self {
        let exit = match problem.kind {
            ProblemKind::NotFound => Exit::NotFound,
            ProblemKind::Conflict | ProblemKind::Forbidden | ProblemKind::NotAllowed => Exit::Refused,
            ProblemKind::BadRequest
            | ProblemKind::TooLarge
            | ProblemKind::Unsupported
            | ProblemKind::HeadersTooLarge => Exit::Usage,
            ProblemKind::Unavailable | ProblemKind::Internal => Exit::Unavailable,
        };
        Self { code: problem.code, ..Self::new(exit, problem.detail) }
    }
}

impl From<Rejected> for Failure {
    fn from(rejected: Rejected) -> Self {
        Self { code: "bad-settings", ..Self::usage(rejected.to_string()) }
    }
}

impl From<store::Error> for Failure {
    fn from(error: store::Error) -> Self {
        match error {
            store::Error::Refused(text) => Self::new(Exit::Refused, text),
            store::Error::Unavailable { .. } | store::Error::Broken(_) => {
                Self { code: "store-unavailable", ..Self::new(Exit::Unavailable, error.to_string()) }
            }
        }
    }
}
