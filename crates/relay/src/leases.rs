//! The lanes that this relay holds, as far as it knows.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use store::{Beaten, Lease};

/// A lane in our hands.
#[derive(Clone, Copy, Debug)]
struct Held {
    lease: Lease,
    /// By our monotonic clock, from before the renewal was asked: certainly not later than the store thinks.
    until: Instant,
    /// To be given up as soon as nothing is in flight on it.
    leaving: bool,
}

#[derive(Debug, Default)]
struct Book {
    held: BTreeMap<u16, Held>,
    instances: usize,
    /// What the heartbeat last complained of, and each train.
    problems: BTreeMap<Complainant, String>,
}

/// Who cannot work: each clears its own complaint, and only that.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Complainant {
    Heart,
    Train(usize),
}

/// Shared by the heartbeat, which fills it, and the trains, which live by it.
#[derive(Debug, Default)]
pub(crate) struct Leases(Mutex<Book>);

impl Leases {
    fn book(&self) -> MutexGuard<'_, Book> {
        self.0.lock().expect("nothing panics while it holds the book")
    }

    /// What to ask the store to renew.
    pub(crate) fn held(&self) -> Vec<Lease> {
        self.book().held.values().map(|held| held.lease).collect()
    }

    /// Takes over the store's answer to a beat that was asked at `asked`. Answers the lanes that were lost.
    pub(crate) fn update(&self, beaten: &Beaten, asked: Instant, lease: Duration) -> Vec<u16> {
        let mut book = self.book();
        let mut held = BTreeMap::new();
        for lease_now in &beaten.held {
            let before = book.held.remove(&lease_now.lane);
            let leaving = before.is_some_and(|before| before.lease == *lease_now && before.leaving);
            held.insert(lease_now.lane, Held { lease: *lease_now, until: asked + lease, leaving });
        }
        let lost = book.held.keys().copied().collect();
        let leaving = held.values().filter(|held| held.leaving).count();
        // The highest lanes go first, so that the same ones are not passed around.
        for held in
            held.values_mut().rev().filter(|held| !held.leaving).take(beaten.surplus.saturating_sub(leaving))
        {
            held.leaving = true;
        }
        book.held = held;
        book.instances = beaten.instances;
        lost
    }

    /// Somebody cannot work.
    pub(crate) fn complain(&self, who: Complainant, problem: String) {
        self.book().problems.insert(who, problem);
    }

    /// Somebody can work again.
    pub(crate) fn well(&self, who: Complainant) {
        self.book().problems.remove(&who);
    }

    /// Nobody knows whether the claim on these lanes happened. A batch of which this relay knows nothing would keep
    /// its lane shut for as long as the lease is renewed, so the lanes are given up, and the batch is closed with that.
    pub(crate) fn doubt(&self, leases: &[Lease]) {
        let mut book = self.book();
        for lease in leases {
            if let Some(held) = book.held.get_mut(&lease.lane).filter(|held| held.lease == *lease) {
                held.leaving = true;
            }
        }
    }

    /// Takes these lanes out of the book at once, whatever is in flight on them.
    pub(crate) fn abandon(&self, mine: impl Fn(u16) -> bool) -> Vec<Lease> {
        let mut book = self.book();
        let gone: Vec<Lease> =
            book.held.values().map(|held| held.lease).filter(|lease| mine(lease.lane)).collect();
        book.held.retain(|lane, _| !mine(*lane));
        gone
    }

    /// The leases of these lanes on which work may start.
    pub(crate) fn usable(&self, mine: impl Fn(u16) -> bool) -> Vec<Lease> {
        let now = Instant::now();
        let book = self.book();
        let usable =
            book.held.values().filter(|held| mine(held.lease.lane) && !held.leaving && held.until > now);
        usable.map(|held| held.lease).collect()
    }

    /// Until when `lease` certainly stands, if it does.
    pub(crate) fn until(&self, lease: &Lease) -> Option<Instant> {
        let now = Instant::now();
        let book = self.book();
        book.held
            .get(&lease.lane)
            .filter(|held| held.lease == *lease && held.until > now)
            .map(|held| held.until)
    }

    /// Takes the lanes among these that are to be given up out of the book: nothing is in flight on them.
    pub(crate) fn leave(&self, mine: impl Fn(u16) -> bool, busy: impl Fn(u16) -> bool) -> Vec<Lease> {
        let mut book = self.book();
        let gone: Vec<Lease> = book
            .held
            .values()
            .filter(|held| held.leaving && mine(held.lease.lane) && !busy(held.lease.lane))
            .map(|held| held.lease)
            .collect();
        for lease in &gone {
            book.held.remove(&lease.lane);
        }
        gone
    }

    pub(crate) fn report(&self) -> (Vec<u16>, usize, Option<String>) {
        let book = self.book();
        (book.held.keys().copied().collect(), book.instances, book.problems.values().next().cloned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use uuid::Uuid;

    fn lease(lane: u16, epoch: i64) -> Lease {
        Lease { lane, epoch, id: Uuid::nil() }
    }

    #[test]
    fn surplus_lanes_are_left_once_nothing_is_in_flight_on_them() {
        let leases = Leases::default();
        let beaten =
            Beaten { held: vec![lease(0, 1), lease(1, 1), lease(2, 1)], surplus: 2, ..Beaten::default() };
        leases.update(&beaten, Instant::now(), Duration::from_secs(9));
        assert_eq!(leases.usable(|_| true), [lease(0, 1)]);
        assert_eq!(leases.leave(|_| true, |lane| lane == 2), [lease(1, 1)]);
        assert_eq!(leases.leave(|_| true, |_| false), [lease(2, 1)]);
        assert_eq!(leases.held(), [lease(0, 1)]);
    }

    #[test]
    fn a_lease_counts_from_before_it_was_asked_for() {
        let leases = Leases::default();
        let asked = Instant::now() - Duration::from_secs(10);
        let beaten = Beaten { held: vec![lease(0, 1)], ..Beaten::default() };
        leases.update(&beaten, asked, Duration::from_secs(9));
        assert_eq!(leases.until(&lease(0, 1)), None);
        assert!(leases.usable(|_| true).is_empty());
    }

    #[test]
    fn a_lane_that_changed_hands_is_reported_lost_and_its_old_lease_does_not_stand() {
        let leases = Leases::default();
        let beaten = |held| Beaten { held, ..Beaten::default() };
        leases.update(&beaten(vec![lease(0, 1), lease(1, 1)]), Instant::now(), Duration::from_secs(9));
        let lost = leases.update(&beaten(vec![lease(0, 3)]), Instant::now(), Duration::from_secs(9));
        assert_eq!(lost, [1]);
        assert_eq!(leases.until(&lease(0, 1)), None);
        assert!(leases.until(&lease(0, 3)).is_some());
    }
}
