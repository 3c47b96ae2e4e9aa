//! The keys of a call of which another worker has a message: nothing behind it is done.

use std::collections::HashSet;

use crate::{Arrival, InboxRules, Receipt};

/// Keys of a call, each with a message before that is [`Receipt::Busy`].
#[derive(Clone, Debug)]
pub(crate) struct Stuck<'a> {
    ordered: bool,
    keys: HashSet<(&'a str, &'a str)>,
}

impl<'a> Stuck<'a> {
    pub(crate) fn new(rules: &InboxRules) -> Self {
        Self { ordered: rules.ordered, keys: HashSet::new() }
    }

    /// Takes note of what became of an arrival.
    pub(crate) fn note(&mut self, arrival: &'a Arrival, receipt: &Receipt) {
        if *receipt == Receipt::Busy && self.ordered {
            self.keys.extend(key(arrival));
        }
    }

    /// Whether one before it is in another's hands.
    pub(crate) fn holds(&self, arrival: &Arrival) -> bool {
        !self.is_empty() && key(arrival).is_some_and(|key| self.keys.contains(&key))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }
}

/// The topic and key of an arrival that has one.
pub(crate) fn key(arrival: &Arrival) -> Option<(&str, &str)> {
    Some((arrival.message.topic.as_str(), arrival.message.key.as_deref()?))
}
