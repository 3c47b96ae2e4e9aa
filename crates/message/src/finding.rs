//! What somebody who looks at a store or a broker finds, for `postrider doctor`.

use serde::Serialize;

/// One thing that was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// How bad it is.
    pub health: Health,
    /// What was looked at: "topic orders".
    pub about: String,
    /// What was found.
    pub text: String,
    /// What to do about it, where something is to be done.
    pub fix: Option<String>,
}

/// How bad a finding is, the best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Health {
    /// As it should be.
    Good,
    /// It works, and may surprise.
    Doubtful,
    /// A promise cannot be kept like this.
    Broken,
}

impl Finding {
    /// As it should be.
    pub fn good(about: impl Into<String>, text: impl Into<String>) -> Self {
        Self { health: Health::Good, about: about.into(), text: text.into(), fix: None }
    }

    /// It works, and may surprise.
    pub fn doubtful(about: impl Into<String>, text: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { health: Health::Doubtful, about: about.into(), text: text.into(), fix: Some(fix.into()) }
    }

    /// A promise cannot be kept like this.
    pub fn broken(about: impl Into<String>, text: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { health: Health::Broken, about: about.into(), text: text.into(), fix: Some(fix.into()) }
    }
}
