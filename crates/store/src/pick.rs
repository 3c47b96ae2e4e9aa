//! Filling batches: which of the sendable messages, met in order, go out together.
//!
//! Every store finds candidates in its own way; what may go into a batch is decided here, once.

use std::collections::{BTreeMap, BTreeSet};

use crate::{ClaimOrder, Claimed, column};

/// What becomes of a candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pick {
    /// It is in the batch of its lane and channel.
    Taken,
    /// Its key is held: park it, so that it costs nothing while it waits.
    Held,
    /// No broker could be given it: give it up as soon as it is met, so that it stops nobody.
    Unreadable,
    /// Not this time.
    Passed,
    /// Nothing more fits: stop offering.
    Full,
}

/// Whether a lane waits for an open batch with messages of these topics: nobody may overtake what is in it.
pub(crate) fn waits_for<'a>(order: &ClaimOrder, topics: impl IntoIterator<Item = &'a String>) -> bool {
    topics.into_iter().any(|topic| (order.rule)(topic).take > 0)
}

/// The topics of a batch, for its record.
pub(crate) fn topics(messages: &[Claimed]) -> Vec<&str> {
    let topics: BTreeSet<&str> = messages.iter().map(|claimed| claimed.message.topic.as_str()).collect();
    topics.into_iter().collect()
}

/// A batch that is being filled: its lane and its channel.
type Place = (u16, usize);

/// Fills one batch for each lane and channel.
#[derive(Debug)]
pub(crate) struct Picker {
    most: usize,
    batches: BTreeMap<Place, Vec<Claimed>>,
    /// Batches that take no more: somebody in it travels alone, or would have to.
    closed: Vec<Place>,
    bytes: usize,
    skipped: bool,
}

impl Picker {
    pub(crate) fn new(order: &ClaimOrder) -> Self {
        Self { most: order.bytes, batches: BTreeMap::new(), closed: Vec::new(), bytes: 0, skipped: false }
    }

    /// Whether the batch takes no more. Asked before a candidate is read, it saves the reading.
    pub(crate) fn is_closed(&mut self, place: Place) -> bool {
        let closed = self.closed.contains(&place);
        self.skipped |= closed;
        closed
    }

    /// Offers the next candidate, in the order of `seq`. `held`: an earlier one of its key must be sent first.
    pub(crate) fn offer(&mut self, place: Place, claimed: Claimed, held: bool) -> Pick {
        if self.is_closed(place) {
            return Pick::Passed;
        }
        if claimed.message.headers.contains_key(column::UNREADABLE) {
            return Pick::Unreadable;
        }
        if held {
            self.skipped = true;
            return Pick::Held;
        }
        let batch = self.batches.entry(place).or_default();
        if claimed.state.travels_alone() {
            self.closed.push(place);
            if !batch.is_empty() {
                self.skipped = true;
                return Pick::Passed;
            }
        }
        let size = claimed.message.size();
        if self.bytes > 0 && self.bytes + size > self.most {
            self.skipped = true;
            return Pick::Full;
        }
        self.bytes += size;
        batch.push(claimed);
        Pick::Taken
    }

    /// Whether candidates were left behind, so that another turn may find more.
    pub(crate) fn left_some(&self) -> bool {
        self.skipped
    }

    /// The messages by lane and channel, none of them empty.
    pub(crate) fn batches(self) -> impl Iterator<Item = (Place, Vec<Claimed>)> {
        self.batches.into_iter().filter(|(_, messages)| !messages.is_empty())
    }
}
