//! Keys whose later messages wait for an earlier one: the store's `holds` table, statement by statement.

use message::Status;

use super::bug::Bug;
use super::store::{Rules, Seq, Store};

/// A key's row in the table of holds.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Hold {
    /// The message that the others wait for; 0 while it is drained.
    pub seq: Seq,
    /// Followers up to here may pass.
    pub released_to: Seq,
    /// The message is out of the way, its followers are being let go.
    pub draining: bool,
}

impl Store {
    /// Whether the message `seq` of this key must wait.
    pub(super) fn blocks(&self, rules: &Rules, key: u8, seq: Seq) -> bool {
        self.holds[usize::from(key)].as_ref().is_some_and(|hold| {
            let passes = rules.has(Bug::DrainLetsNewerPass) && hold.draining;
            hold.seq < seq && hold.released_to < seq && !passes
        })
    }

    /// Makes the later messages of the key wait for `seq`, which is in trouble.
    pub(super) fn place(&mut self, rules: &Rules, seq: Seq) {
        let Some(key) = self.row(seq).map(|row| row.key) else { return };
        let holder = self.holds[usize::from(key)].as_ref().filter(|hold| !hold.draining).map(|hold| hold.seq);
        let waits = holder.filter(|holder| *holder != seq).map(|holder| match rules.bug {
            Some(Bug::LatestTroubleHolds) => holder.min(seq),
            _ => holder.max(seq),
        });
        if let Some(row) = waits.and_then(|waits| self.row_mut(waits)) {
            row.held = true;
        }
        if waits != Some(seq) {
            self.hold(key, seq);
        }
    }

    fn hold(&mut self, key: u8, seq: Seq) {
        self.holds[usize::from(key)] = Some(Hold { seq, released_to: 0, draining: false });
    }

    /// The message `seq` waits behind nobody any more.
    pub(super) fn stand(&mut self, seq: Seq) {
        if let Some(row) = self.row_mut(seq) {
            row.held = false;
        }
    }

    /// A follower that a claim met.
    pub(super) fn park(&mut self, seq: Seq) {
        if let Some(row) = self.row_mut(seq) {
            (row.ready, row.held) = (false, true);
        }
    }

    /// The message `seq` no longer holds its key, if it did: its followers may go.
    pub(super) fn lift(&mut self, rules: &Rules, seq: Seq) {
        for key in 0..self.holds.len() {
            if let Some(hold) = self.holds[key].as_mut().filter(|hold| hold.seq == seq && !hold.draining) {
                (hold.seq, hold.draining) = (0, true);
                self.drain(rules, key);
            }
        }
    }

    /// Lets go some more followers of every key that is being drained.
    pub(super) fn drain_some(&mut self, rules: &Rules) {
        for key in 0..self.holds.len() {
            if self.holds[key].as_ref().is_some_and(|hold| hold.draining) {
                self.drain(rules, key);
            }
        }
    }

    fn drain(&mut self, rules: &Rules, key: usize) {
        let mut followers: Vec<Seq> = self
            .messages()
            .filter(|(_, row)| row.held && usize::from(row.key) == key)
            .map(|(seq, _)| seq)
            .collect();
        if rules.has(Bug::DrainNewestFirst) {
            followers.reverse();
        }
        followers.truncate(rules.drain);
        for seq in &followers {
            let Some(row) = self.row_mut(*seq) else { continue };
            let trouble = row.state.status == Status::Dead || (!row.ready && row.waits);
            row.held = false;
            if trouble && !rules.has(Bug::DrainIgnoresTrouble) {
                let key = row.key;
                self.hold(key, *seq);
                return;
            }
            row.ready = true;
        }
        let left = followers.len() == rules.drain && !rules.has(Bug::HoldRemovedEarly);
        match self.holds[key].as_mut().filter(|_| left) {
            Some(hold) => hold.released_to = followers.last().copied().unwrap_or_default(),
            None => self.holds[key] = None,
        }
    }
}
