//! The messages of one partition between the server and the member: what came, in what order it may be handed out.
//!
//! The server numbers its deliveries from one consumer, 1, 2, 3. A number that is missing is a delivery that was lost on
//! its way, or went to a former holder of the partition: the server believes that somebody works on it and will deliver
//! it again later, after newer messages. Handing out the newer ones first would break the order of keys. So nothing is
//! handed out until the server, asked, counts no message as delivered that is not here.

use std::collections::BTreeMap;

/// What a message that came is to its shelf.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arrival {
    /// It waits to be handed out.
    Waits,
    /// It was handed out already and is being worked on.
    IsOut,
    /// It is done; the server does not know yet.
    IsDone,
}

/// What the server says of a consumer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Count {
    /// The number of its last delivery.
    pub(super) deliveries: u64,
    /// Messages that are delivered and not acknowledged.
    pub(super) pending: usize,
    /// All messages up to here are acknowledged.
    pub(super) floor: i64,
}

/// The messages of one partition.
#[derive(Debug)]
pub(super) struct Shelf<M> {
    waiting: BTreeMap<i64, M>,
    /// The highest that was ever handed out.
    high: i64,
    /// All up to here are done.
    done: i64,
    /// The number of the last delivery that came.
    deliveries: u64,
    /// Whether one may be missing.
    gap: bool,
}

impl<M> Shelf<M> {
    /// An empty one, when the server counts like this.
    pub(super) fn new(count: Count) -> Self {
        Self {
            waiting: BTreeMap::new(),
            high: count.floor,
            done: count.floor,
            deliveries: count.deliveries,
            gap: count.pending > 0,
        }
    }

    /// Takes the delivery of this number.
    pub(super) fn arrive(&mut self, delivery: u64, seq: i64, message: M) -> (Arrival, Option<M>) {
        // Lower than it should be: the server was restarted and has forgotten some.
        self.gap |= delivery != self.deliveries + 1;
        self.deliveries = delivery;
        if seq <= self.done {
            (Arrival::IsDone, Some(message))
        } else if seq <= self.high && !self.waiting.contains_key(&seq) {
            (Arrival::IsOut, Some(message))
        } else {
            self.waiting.insert(seq, message);
            (Arrival::Waits, None)
        }
    }

    /// Whether the server must be asked before anything is handed out.
    pub(super) fn has_gap(&self) -> bool {
        self.gap
    }

    /// After an interruption: a delivery may have been lost, and the next has the number that the server says.
    pub(super) fn resume(&mut self, count: Count, out: usize) {
        self.gap = true;
        self.deliveries = count.deliveries;
        self.compare(count, out);
    }

    /// Compares with what the server counts. `out`: how many are out, beyond the server's floor.
    pub(super) fn compare(&mut self, count: Count, out: usize) {
        let here = self.waiting.range(count.floor + 1..).count() + out;
        // What came after the count was taken must not stand for what is missing from it.
        if count.pending <= here && self.deliveries <= count.deliveries {
            self.gap = false;
            self.deliveries = count.deliveries;
        }
    }

    /// The next message, if one may be handed out.
    pub(super) fn hand_out(&mut self) -> Option<(i64, M)> {
        if self.gap {
            return None;
        }
        let (seq, message) = self.waiting.pop_first()?;
        self.high = self.high.max(seq);
        Some((seq, message))
    }

    /// Takes back what was handed out.
    pub(super) fn give_back(&mut self, seq: i64, message: M) {
        self.waiting.insert(seq, message);
    }

    /// All up to here are done.
    pub(super) fn finish(&mut self, seq: i64) {
        self.done = self.done.max(seq);
    }

    pub(super) fn waiting(&self) -> impl Iterator<Item = &M> {
        self.waiting.values()
    }

    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    pub(super) fn into_waiting(self) -> impl Iterator<Item = M> {
        self.waiting.into_values()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fresh() -> Shelf<()> {
        Shelf::new(Count { deliveries: 0, pending: 0, floor: 0 })
    }

    fn handed(shelf: &mut Shelf<()>) -> Vec<i64> {
        std::iter::from_fn(|| shelf.hand_out()).map(|(seq, ())| seq).collect()
    }

    #[test]
    fn messages_are_handed_out_in_the_order_in_which_they_were_stored() {
        let mut shelf = fresh();
        for (delivery, seq) in [(1, 10), (2, 12), (3, 15)] {
            assert_eq!(shelf.arrive(delivery, seq, ()).0, Arrival::Waits);
        }
        assert_eq!(handed(&mut shelf), [10, 12, 15]);
        shelf.give_back(15, ());
        shelf.give_back(12, ());
        assert_eq!(handed(&mut shelf), [12, 15]);
    }

    #[test]
    fn after_a_lost_delivery_nothing_overtakes_it() {
        let mut shelf = fresh();
        shelf.arrive(1, 10, ());
        assert_eq!(handed(&mut shelf), [10]);
        // The second delivery, of message 11, was lost.
        shelf.arrive(3, 12, ());
        assert_eq!(handed(&mut shelf), [0; 0]);
        shelf.compare(Count { deliveries: 3, pending: 3, floor: 0 }, 1);
        assert_eq!(handed(&mut shelf), [0; 0], "the server counts three, and two are here");
        shelf.arrive(4, 11, ());
        shelf.compare(Count { deliveries: 4, pending: 3, floor: 0 }, 1);
        assert_eq!(handed(&mut shelf), [11, 12]);
    }

    #[test]
    fn what_the_holder_before_had_comes_before_what_is_new() {
        let mut shelf = Shelf::new(Count { deliveries: 7, pending: 2, floor: 5 });
        shelf.arrive(8, 9, ());
        assert_eq!(handed(&mut shelf), [0; 0]);
        shelf.arrive(9, 7, ());
        shelf.compare(Count { deliveries: 9, pending: 3, floor: 5 }, 0);
        assert_eq!(handed(&mut shelf), [0; 0], "message 6 is still with the holder before");
        // Its late acknowledgement came, and moved the floor.
        shelf.compare(Count { deliveries: 9, pending: 2, floor: 6 }, 0);
        assert_eq!(handed(&mut shelf), [7, 9]);
    }

    #[test]
    fn what_comes_again_is_not_handed_out_twice() {
        let mut shelf = fresh();
        shelf.arrive(1, 10, ());
        shelf.arrive(2, 11, ());
        assert_eq!(shelf.hand_out(), Some((10, ())));
        assert_eq!(shelf.arrive(3, 10, ()).0, Arrival::IsOut);
        assert_eq!(shelf.arrive(4, 11, ()).0, Arrival::Waits);
        shelf.finish(10);
        assert_eq!(shelf.arrive(5, 10, ()).0, Arrival::IsDone);
        assert_eq!(handed(&mut shelf), [11]);
    }
}
