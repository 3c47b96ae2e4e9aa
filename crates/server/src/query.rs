//! Reads paths and query strings so that a mistake is named, not ignored.
//!
//! An unknown parameter is refused: `?limt=5` that silently lists everything teaches the wrong lesson.

use std::str::FromStr;

use admin::{PageRequest, Problem, nearest};
use axum::extract::{FromRequestParts, Path, Query};
use axum::http::request::Parts;

use crate::problem::Failure;

/// A name or id from the path.
pub(crate) struct Named(pub(crate) String);

impl<S: Send + Sync> FromRequestParts<S> for Named {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Failure> {
        let Path(name) = Path::from_request_parts(parts, state).await.map_err(|_| {
            Problem::bad_request(
                "bad-path",
                "The path cannot be read",
                "A part of the path is not valid percent-encoded UTF-8: encode it again.",
            )
        })?;
        Ok(Self(name))
    }
}

/// Two names from the path.
pub(crate) struct NamedPair(pub(crate) String, pub(crate) String);

impl<S: Send + Sync> FromRequestParts<S> for NamedPair {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Failure> {
        let Path((one, other)) = Path::from_request_parts(parts, state).await.map_err(|_| {
            Problem::bad_request(
                "bad-path",
                "The path cannot be read",
                "A part of the path is not valid percent-encoded UTF-8: encode it again.",
            )
        })?;
        Ok(Self(one, other))
    }
}

/// The parameters of the query string.
pub(crate) struct Asked(Vec<(String, String)>);

impl<S: Send + Sync> FromRequestParts<S> for Asked {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Failure> {
        let Query(pairs) = Query::from_request_parts(parts, state).await.map_err(|_| {
            Problem::bad_request(
                "bad-query",
                "The query cannot be read",
                "The part of the address after `?` cannot be read: encode it again.",
            )
        })?;
        Ok(Self(pairs))
    }
}

impl Asked {
    /// Refuses what is not among `known`.
    pub(crate) fn only(self, known: &[&str]) -> Result<Self, Problem> {
        for (at, (name, _)) in self.0.iter().enumerate() {
            if !known.contains(&name.as_str()) {
                let shown: String = name.chars().take(64).collect();
                let hint =
                    nearest(name, known).map_or(String::new(), |meant| format!("did you mean `{meant}`? "));
                let all = if known.is_empty() { "there are none here".to_owned() } else { known.join(", ") };
                return Err(Problem::bad_request(
                    "unknown-parameter",
                    "A parameter is not known",
                    format!("There is no parameter `{}`: {hint}Known are: {all}.", shown.escape_debug()),
                ));
            }
            if self.0[..at].iter().any(|(earlier, _)| earlier == name) {
                return Err(Problem::bad_request(
                    "repeated-parameter",
                    "A parameter is given twice",
                    format!("The parameter `{name}` is given twice: leave one of them out."),
                ));
            }
        }
        Ok(self)
    }

    /// A parameter as text; an empty one is the same as none.
    pub(crate) fn text(&self, name: &str) -> Option<String> {
        self.0
            .iter()
            .find(|(found, value)| found == name && !value.is_empty())
            .map(|(_, value)| value.clone())
    }

    /// A parameter read as `T`, which people know as `expected`.
    pub(crate) fn read<T: FromStr>(&self, name: &str, expected: &str) -> Result<Option<T>, Problem> {
        let Some(text) = self.text(name) else { return Ok(None) };
        text.parse().map(Some).map_err(|_| {
            let shown: String = text.chars().take(64).collect();
            Problem::bad_request(
                "bad-parameter",
                "A parameter cannot be read",
                format!("`{name}` must be {expected}; it is `{}`.", shown.escape_debug()),
            )
        })
    }

    /// Which part of a list is asked for.
    pub(crate) fn page(&self) -> Result<PageRequest, Problem> {
        let limit = self.read("limit", "a number from 1 to 1000")?;
        Ok(PageRequest {
            limit: limit.unwrap_or(PageRequest::DEFAULT_LIMIT),
            after: self.text("after"),
            newest_first: false,
        })
    }
}
