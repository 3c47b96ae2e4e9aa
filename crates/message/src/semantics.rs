//! What a route promises about delivery, and about order.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The six promises a route or a group can make, from none to the strongest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Semantics {
    /// Fire and forget: sent once, nothing confirmed.
    None,
    /// One confirmed try; a failure is counted and the message is gone.
    BestEffort,
    /// Recorded as sent before it is sent: never a second try.
    AtMostOnce,
    /// Retried until the broker has confirmed it; it may arrive twice.
    AtLeastOnce,
    /// At least once, and the inbox recognises what it has already done.
    #[default]
    EffectivelyOnce,
    /// Once in the log itself, by transactions of the broker.
    ExactlyOnce,
}

impl Semantics {
    /// All six, weakest first.
    pub const ALL: [Self; 6] = [
        Self::None,
        Self::BestEffort,
        Self::AtMostOnce,
        Self::AtLeastOnce,
        Self::EffectivelyOnce,
        Self::ExactlyOnce,
    ];

    /// Whether a message is sent again until it is confirmed; otherwise it is sent once at most.
    pub fn sends_again(self) -> bool {
        self >= Self::AtLeastOnce
    }

    /// Whether a message may go to the broker without ever being in a store.
    pub fn bypasses_store(self) -> bool {
        self <= Self::BestEffort
    }

    /// Whether a group that promises this marks what it has done. Below, nothing is remembered; above, the broker's
    /// transaction is all.
    pub fn leaves_marks(self) -> bool {
        (Self::AtMostOnce..=Self::EffectivelyOnce).contains(&self)
    }

    /// The word used in configuration, API and pages.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::BestEffort => "best-effort",
            Self::AtMostOnce => "at-most-once",
            Self::AtLeastOnce => "at-least-once",
            Self::EffectivelyOnce => "effectively-once",
            Self::ExactlyOnce => "exactly-once",
        }
    }
}

impl fmt::Display for Semantics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Semantics {
    type Err = UnknownSemantics;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|semantics| semantics.as_str() == text)
            .ok_or_else(|| UnknownSemantics(text.to_owned()))
    }
}

/// Not one of the six.
#[derive(Debug, thiserror::Error)]
#[error(
    "`{0}` is not a delivery semantics: use none, best-effort, at-most-once, at-least-once, effectively-once or exactly-once"
)]
pub struct UnknownSemantics(pub String);

/// What is kept in order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Order {
    /// Messages of one topic and key; those without a key have no order.
    #[default]
    Key,
    /// Nothing.
    None,
}

/// What becomes of the later messages of a key whose earlier one is Dead.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnDead {
    /// They wait until a person requeues or discards it.
    #[default]
    Hold,
    /// They pass.
    Skip,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_semantics_is_read_back_from_its_word() {
        for semantics in Semantics::ALL {
            assert_eq!(semantics.as_str().parse::<Semantics>().expect("its own word"), semantics);
            assert_eq!(serde_json::to_value(semantics).expect("a word"), semantics.as_str());
        }
        assert!("twice".parse::<Semantics>().is_err());
    }
}
