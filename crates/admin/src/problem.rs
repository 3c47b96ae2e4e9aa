//! Why a request was not done, in words that say what to do about it.
//!
//! The kind decides the HTTP status and the exit code; the code is for programs; the detail is for people.

use std::fmt;
use std::time::Duration;

use message::Invalid;

/// What the caller can do about a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ProblemKind {
    /// Change the request.
    BadRequest,
    /// The caller may not do this from where it is.
    Forbidden,
    /// There is no such thing.
    NotFound,
    /// The thing exists but cannot be asked this way.
    NotAllowed,
    /// The request is right, but not in the state things are in.
    Conflict,
    /// Send less.
    TooLarge,
    /// Send it in another format.
    Unsupported,
    /// Send fewer or smaller headers.
    HeadersTooLarge,
    /// Try again later.
    Unavailable,
    /// Somebody has to look at the service.
    Internal,
}

/// A request that was not done. Nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// What the caller can do.
    pub kind: ProblemKind,
    /// A stable word for programs: "unknown-topic".
    pub code: &'static str,
    /// What is wrong, the same for every case of this code.
    pub title: &'static str,
    /// What is wrong here, and what to do.
    pub detail: String,
    /// The least wait before the next try, when waiting helps.
    pub retry_after: Option<Duration>,
}

impl Problem {
    /// A problem of `kind`.
    pub fn new(
        kind: ProblemKind,
        code: &'static str,
        title: &'static str,
        detail: impl Into<String>,
    ) -> Self {
        Self { kind, code, title, detail: detail.into(), retry_after: None }
    }

    /// The request itself is wrong.
    pub fn bad_request(code: &'static str, title: &'static str, detail: impl Into<String>) -> Self {
        Self::new(ProblemKind::BadRequest, code, title, detail)
    }

    /// There is no such thing.
    pub fn not_found(code: &'static str, title: &'static str, detail: impl Into<String>) -> Self {
        Self::new(ProblemKind::NotFound, code, title, detail)
    }

    /// Not in this state.
    pub fn conflict(code: &'static str, title: &'static str, detail: impl Into<String>) -> Self {
        Self::new(ProblemKind::Conflict, code, title, detail)
    }

    pub(crate) fn no_message(id: impl fmt::Display) -> Self {
        Self::not_found(
            "unknown-message",
            "There is no such message",
            format!(
                "No message has the id {id}: check it, or the record was deleted, discarded or has passed its retention."
            ),
        )
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.detail)
    }
}

impl std::error::Error for Problem {}

impl From<store::Error> for Problem {
    fn from(error: store::Error) -> Self {
        match error {
            store::Error::Unavailable { retry_after, .. } => Self {
                retry_after: Some(retry_after.max(Duration::from_secs(1))),
                ..Self::new(
                    ProblemKind::Unavailable,
                    "store-unavailable",
                    "The store cannot be used now",
                    format!("{error}. Try again; nothing was changed unless an earlier try says so."),
                )
            },
            store::Error::Refused(detail) => Self::conflict("refused", "That cannot be done now", detail),
            store::Error::Broken(_) => Self::new(
                ProblemKind::Internal,
                "store-broken",
                "The store needs attention",
                format!("{error}. The operator of this service has to look at it."),
            ),
        }
    }
}

impl From<Invalid> for Problem {
    fn from(invalid: Invalid) -> Self {
        let (kind, code, title) = match &invalid {
            Invalid::Topic(_) => (ProblemKind::BadRequest, "bad-topic", "That cannot be a topic"),
            Invalid::Group(_) => (ProblemKind::BadRequest, "bad-group", "That cannot be a consumer group"),
            Invalid::PayloadTooLarge { .. } => {
                (ProblemKind::TooLarge, "payload-too-large", "The payload is too large")
            }
            Invalid::HeadersTooLarge { .. } => {
                (ProblemKind::TooLarge, "message-headers-too-large", "The message headers are too large")
            }
            Invalid::HeaderName(_) | Invalid::HeaderValue(_) => {
                (ProblemKind::BadRequest, "bad-header", "That cannot be a message header")
            }
            Invalid::Time(_) | Invalid::NeverSent => {
                (ProblemKind::BadRequest, "bad-schedule", "That cannot be a schedule")
            }
            Invalid::TooLong { .. } => (ProblemKind::BadRequest, "too-long", "A field is too long"),
            Invalid::ControlCharacter { .. } => {
                (ProblemKind::BadRequest, "control-character", "A field has a control character")
            }
        };
        let text = invalid.to_string();
        let mut letters = text.chars();
        // `the payload has …` begins a sentence here; a quoted name keeps its case.
        let detail = letters.next().map(|first| first.to_uppercase().chain(letters).chain(['.']).collect());
        Self::new(kind, code, title, detail.unwrap_or(text))
    }
}
