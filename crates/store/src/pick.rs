//! Filling batches: which of the sendable messages, met in order, go out together.
//!
//! Every store finds candidates in its own way; what may go into a batch is decided here, once.

use std::collections::BTreeMap;

use crate::{ClaimOrder, Claimed, column};

/// What becomes of a candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pick {
    /// It is in its lane's batch.
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

/// Fills one batch for each lane.
#[derive(Debug)]
pub(crate) struct Picker {
    most: usize,
    batches: BTreeMap<u16, Vec<Claimed>>,
    /// Lanes whose batch takes no more: somebody in it travels alone, or would have to.
    closed: Vec<u16>,
    bytes: usize,
    skipped: bool,
}

impl Picker {
    pub(crate) fn new(order: &ClaimOrder) -> Self {
        Self { most: order.bytes, batches: BTreeMap::new(), closed: Vec::new(), bytes: 0, skipped: false }
    }

    /// Whether the lane takes no more. Asked before a candidate is read, it saves the reading.
    pub(crate) fn is_closed(&mut self, lane: u16) -> bool {
        let closed = self.closed.contains(&lane);
        self.skipped |= closed;
        closed
    }

    /// Offers the next candidate, in the order of `seq`. `held`: an earlier one of its key must be sent first.
    pub(crate) fn offer(&mut self, lane: u16, claimed: Claimed, held: bool) -> Pick {
        if self.is_closed(lane) {
            return Pick::Passed;
        }
        if claimed.message.headers.contains_key(column::UNREADABLE) {
            return Pick::Unreadable;
        }
        if held {
            self.skipped = true;
            return Pick::Held;
        }
        let batch = self.batches.entry(lane).or_default();
        if claimed.state.travels_alone() {
            self.closed.push(lane);
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

    /// The messages by lane, none of them empty.
    pub(crate) fn batches(self) -> impl Iterator<Item = (u16, Vec<Claimed>)> {
        self.batches.into_iter().filter(|(_, messages)| !messages.is_empty())
    }
}
