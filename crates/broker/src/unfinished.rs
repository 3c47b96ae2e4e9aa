//! What a member of a group has received and not finished, by position: for brokers where every message is acknowledged by
//! itself, while [`Subscription`](crate::Subscription) speaks of a position and all before or after it.

use std::collections::{BTreeMap, HashMap};

use crate::Position;

/// Handles of deliveries, by partition and offset.
#[derive(Debug)]
pub(crate) struct Unfinished<H> {
    partitions: HashMap<u64, BTreeMap<i64, H>>,
}

impl<H> Default for Unfinished<H> {
    fn default() -> Self {
        Self { partitions: HashMap::new() }
    }
}

impl<H> Unfinished<H> {
    pub(crate) fn insert(&mut self, position: Position, handle: H) {
        self.partitions.entry(position.partition).or_default().insert(position.offset, handle);
    }

    /// Takes out what an acknowledgement of `position` finishes: it and all before it.
    pub(crate) fn up_to(&mut self, position: Position) -> Vec<H> {
        let Some(held) = self.partitions.get_mut(&position.partition) else { return Vec::new() };
        let later = match position.offset.checked_add(1) {
            Some(next) => held.split_off(&next),
            None => BTreeMap::new(),
        };
        let finished = std::mem::replace(held, later);
        if self.partitions[&position.partition].is_empty() {
            self.partitions.remove(&position.partition);
        }
        finished.into_values().collect()
    }

    /// Takes out what giving back `position` returns: it and all after it, in order.
    pub(crate) fn from(&mut self, position: Position) -> Vec<H> {
        let Some(held) = self.partitions.get_mut(&position.partition) else { return Vec::new() };
        let returned = held.split_off(&position.offset);
        if held.is_empty() {
            self.partitions.remove(&position.partition);
        }
        returned.into_values().collect()
    }

    /// Everything, for whoever keeps it alive.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &H> {
        self.partitions.values().flat_map(BTreeMap::values)
    }

    /// Forgets a partition that somebody else has now.
    pub(crate) fn forget(&mut self, partition: u64) {
        self.partitions.remove(&partition);
    }

    pub(crate) fn clear(&mut self) {
        self.partitions.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_position_speaks_for_all_before_it_or_after_it_in_its_partition() {
        let at = |partition, offset| Position { partition, offset };
        let mut held = Unfinished::default();
        for offset in 1..=5 {
            held.insert(at(0, offset), offset);
            held.insert(at(1, offset), offset * 10);
        }
        assert_eq!(held.up_to(at(0, 2)), [1, 2]);
        assert_eq!(held.up_to(at(0, 2)), [0; 0]);
        assert_eq!(held.from(at(0, 4)), [4, 5]);
        assert_eq!(held.from(at(1, 5)), [50]);
        assert_eq!(held.iter().count(), 1 + 4);
        held.forget(1);
        assert_eq!(held.up_to(at(0, i64::MAX)), [3]);
        assert_eq!(held.iter().count(), 0);
    }
}
