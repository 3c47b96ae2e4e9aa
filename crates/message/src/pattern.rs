//! Topic patterns: names in which `*` stands for any run of characters.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A pattern such as `order-*`, or `*` for every topic.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TopicPattern(String);

impl TopicPattern {
    /// The pattern written as `pattern`.
    pub fn new(pattern: impl Into<String>) -> Self {
        Self(pattern.into())
    }

    /// As it was written.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether `topic` fits.
    pub fn matches(&self, topic: &str) -> bool {
        let mut parts = self.0.split('*');
        let first = parts.next().unwrap_or_default();
        let Some(mut rest) = topic.strip_prefix(first) else { return false };
        let Some(last) = parts.next_back() else { return rest.is_empty() };
        for part in parts {
            let Some(at) = rest.find(part) else { return false };
            rest = &rest[at + part.len()..];
        }
        rest.ends_with(last)
    }

    /// Characters that are not `*`: of two patterns that fit, the one with more says more.
    pub fn specificity(&self) -> usize {
        self.0.bytes().filter(|byte| *byte != b'*').count()
    }
}

impl fmt::Display for TopicPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_stands_for_any_run_of_characters() {
        let cases = [
            ("*", "orders", true),
            ("*", "", true),
            ("orders", "orders", true),
            ("orders", "orders2", false),
            ("order-*", "order-events", true),
            ("order-*", "order", false),
            ("*-events", "order-events", true),
            ("a*b*c", "a1b2c", true),
            ("a*b*c", "abc", true),
            ("a*b*c", "acb", false),
            ("ab*ba", "aba", false),
            ("**", "x", true),
        ];
        for (pattern, topic, expected) in cases {
            assert_eq!(TopicPattern::new(pattern).matches(topic), expected, "{pattern} on {topic}");
        }
    }
}
