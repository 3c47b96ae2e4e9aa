//! Low-water marks: below which number a lane has nothing to send, so that a claim need not look there.
//!
//! A row that is sent leaves a dead entry in the index of sendable rows until vacuum may remove it, which it may not
//! while anybody holds an older snapshot. A claim that started at the front would step over all of them, each turn.
//!
//! # Why a mark never hides a message
//! A mark `m` of a topic and lane says: no sendable row of them with a number up to `m` exists or will appear. A row could
//! still appear there in three ways.
//!
//! 1. *A writer drew a low number and commits late.* The default of `seq` gives the transaction its id before it draws
//!    the number. We read the last number drawn, `m`, and after that a transaction of ours is given the id `X`. Whoever
//!    drew a number up to `m` had its id before we read `m`, so its id is below `X`. Once a snapshot's `xmin` is at
//!    least `X`, all of them have ended, and every later snapshot sees all rows up to `m` that will ever be: `m` is *safe*.
//!    A mark is the lower of what is safe and what a scan under such a snapshot has found empty.
//! 2. *An old row becomes sendable again*: it failed and is due, or those before it were sent. The lane's owner does
//!    that in its own turn, under the lane's lock, and lowers the mark. A person who requeues raises the lane's `amended`
//!    under the same lock, which each turn compares before it uses its marks. A lane that changes hands starts anew.
//! 3. *Somebody writes by hand*: an explicit number, or `ready` set by an UPDATE. A sweep over all numbers, now and then
//!    and without a lock, finds these.
//!
//! Marks live in the memory of the handle whose relay owns the lane, and die with it. The owner of a lane uses one handle
//! (or clones of it) for all its turns.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::Lease;

/// How often all numbers are looked at.
const SWEEP: Duration = Duration::from_secs(15);

/// A number that is not yet safe is pursued, at the cost of a transaction id, when so many were drawn since the last:
/// an idle relay has no reason to.
const PURSUE: i64 = 1_000;

/// What a statement of a turn tells of numbers and transactions.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sight {
    /// All transactions below have ended, as every later snapshot sees them.
    pub(super) xmin: i64,
    /// The id of the turn's own transaction, if it has one.
    pub(super) xid: Option<i64>,
    /// The last number drawn.
    pub(super) drawn: i64,
}

/// What was known at some moment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Horizon {
    safe: i64,
    drawn: Option<i64>,
}

/// The marks of all lanes that this handle's relays own.
#[derive(Debug, Default)]
pub(super) struct Marks(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    /// Topics that were ever met.
    topics: BTreeSet<String>,
    lanes: HashMap<u16, LaneMarks>,
    /// Of each lane: batches up to here are settled.
    settled: HashMap<u16, i64>,
    /// Numbers up to here are seen by every snapshot from now on.
    safe: i64,
    /// The last number drawn when somebody last looked.
    drawn: Option<i64>,
    /// A number, and the transaction id that must be behind us before it is safe.
    pursued: Option<(i64, i64)>,
    swept: Option<Instant>,
}

#[derive(Debug)]
struct LaneMarks {
    lease: Lease,
    amended: i64,
    topics: HashMap<String, i64>,
}

impl Marks {
    fn known(&self) -> MutexGuard<'_, Known> {
        self.0.lock().expect("nobody panics while marks are changed")
    }

    /// Topics that were met so far, sorted.
    pub(super) fn topics(&self) -> Vec<String> {
        self.known().topics.iter().cloned().collect()
    }

    pub(super) fn meet(&self, topics: impl IntoIterator<Item = String>) {
        self.known().topics.extend(topics);
    }

    /// What is known now, to be asked before a statement is sent and given back with what it found: others may learn more
    /// meanwhile, which does not hold for a snapshot or a transaction id that is older.
    pub(super) fn horizon(&self) -> Horizon {
        let known = self.known();
        Horizon { safe: known.safe, drawn: known.drawn }
    }

    /// Notes what a statement saw that was sent after `before` was asked.
    pub(super) fn see(&self, sight: Sight, before: Horizon) {
        let mut known = self.known();
        if let Some((number, xid)) = known.pursued
            && sight.xmin >= xid
        {
            known.safe = known.safe.max(number);
            known.pursued = None;
        }
        // The number was read before the transaction was given its id.
        if let (None, Some(drawn), Some(xid)) = (known.pursued, before.drawn, sight.xid)
            && drawn > known.safe
        {
            known.pursued = Some((drawn, xid));
        }
        known.drawn = known.drawn.max(Some(sight.drawn));
    }

    /// Whether a transaction id should be drawn to pursue a number: much was written and no turn of ours had reason to.
    pub(super) fn lags(&self) -> bool {
        let known = self.known();
        known.pursued.is_none() && known.drawn.is_some_and(|drawn| drawn - known.safe > PURSUE)
    }

    /// A transaction id that was given after `before` was asked.
    pub(super) fn pursue(&self, xid: i64, before: Horizon) {
        let mut known = self.known();
        if let (None, Some(drawn)) = (known.pursued, before.drawn) {
            known.pursued = Some((drawn, xid));
        }
    }

    /// The lane is worked on under `lease`. Marks that were made under another, or before somebody mended, are gone.
    pub(super) fn enter(&self, lease: Lease, amended: i64) {
        let mut known = self.known();
        let lane = known.lanes.entry(lease.lane).or_insert_with(|| LaneMarks {
            lease,
            amended,
            topics: HashMap::new(),
        });
        if lane.lease != lease || lane.amended != amended {
            *lane = LaneMarks { lease, amended, topics: HashMap::new() };
        }
    }

    /// Where a scan of `topic` for these lanes starts.
    pub(super) fn start(&self, topic: &str, lanes: impl Iterator<Item = u16>) -> i64 {
        let known = self.known();
        let of =
            |lane: u16| known.lanes.get(&lane).and_then(|lane| lane.topics.get(topic)).copied().unwrap_or(0);
        lanes.map(of).min().unwrap_or(0)
    }

    /// A scan of `topic` from `start`, sent after `before` was asked, found nothing of the lane up to `end`.
    pub(super) fn found_nothing(&self, topic: &str, lane: u16, start: i64, end: i64, before: Horizon) {
        let mut known = self.known();
        let end = end.min(before.safe);
        let Some(marks) = known.lanes.get_mut(&lane) else { return };
        match marks.topics.get_mut(topic) {
            // Lowered while the scan was on its way: it did not look there.
            Some(mark) if *mark < start => {}
            Some(mark) => *mark = end.max(*mark),
            None if start == 0 => {
                marks.topics.insert(topic.to_owned(), end.max(0));
            }
            None => {}
        }
    }

    /// A row of the lane is sendable again.
    pub(super) fn lower(&self, topic: &str, lane: u16, seq: i64) {
        let mut known = self.known();
        if let Some(mark) = known.lanes.get_mut(&lane).and_then(|marks| marks.topics.get_mut(topic)) {
            *mark = (*mark).min(seq - 1);
        }
    }

    /// The batches of the lane up to `position` are settled.
    pub(super) fn settle(&self, lane: u16, position: i64) {
        let mut known = self.known();
        let settled = known.settled.entry(lane).or_default();
        *settled = (*settled).max(position);
    }

    /// Up to where the batches of the lane are settled.
    pub(super) fn settled(&self, lane: u16) -> i64 {
        self.known().settled.get(&lane).copied().unwrap_or(0)
    }

    /// Whether it is time for a sweep; then the caller does it.
    pub(super) fn sweep(&self) -> bool {
        let mut known = self.known();
        let due = known.swept.is_none_or(|last| last.elapsed() > SWEEP);
        if due {
            known.swept = Some(Instant::now());
        }
        due
    }

    /// The highest mark: what a sweep must look at. None when there is none.
    pub(super) fn highest(&self) -> Option<i64> {
        let known = self.known();
        known.lanes.values().flat_map(|lane| lane.topics.values()).copied().max().filter(|mark| *mark > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use uuid::Uuid;

    fn lease(lane: u16) -> Lease {
        Lease { lane, epoch: 1, id: Uuid::from_u128(7) }
    }

    fn see(marks: &Marks, xmin: i64, xid: Option<i64>, drawn: i64) {
        marks.see(Sight { xmin, xid, drawn }, marks.horizon());
    }

    fn found_nothing(marks: &Marks, start: i64, end: i64) {
        marks.found_nothing("orders", 0, start, end, marks.horizon());
    }

    fn start(marks: &Marks) -> i64 {
        marks.start("orders", [0].into_iter())
    }

    /// Marks under which numbers up to 100 are safe.
    fn safe_to_a_hundred() -> Marks {
        let marks = Marks::default();
        marks.enter(lease(0), 0);
        see(&marks, 10, None, 100);
        see(&marks, 10, Some(12), 105);
        see(&marks, 12, None, 110);
        marks
    }

    #[test]
    fn a_number_is_safe_once_all_who_could_have_drawn_a_lower_one_have_ended() {
        let marks = Marks::default();
        marks.enter(lease(0), 0);
        let mark = || {
            found_nothing(&marks, start(&marks), i64::MAX);
            start(&marks)
        };
        see(&marks, 10, Some(11), 100);
        assert_eq!(mark(), 0, "the number was read after the id was given");
        see(&marks, 10, Some(12), 105);
        assert_eq!(mark(), 0, "somebody with a lower id is still at it");
        see(&marks, 11, Some(13), 110);
        assert_eq!(mark(), 0);
        see(&marks, 12, Some(14), 120);
        assert_eq!(mark(), 100);
    }

    #[test]
    fn what_others_learn_meanwhile_does_not_hold_for_an_older_statement() {
        let marks = Marks::default();
        marks.enter(lease(0), 0);
        let before = marks.horizon();
        see(&marks, 10, None, 100);
        // This transaction had its id before the number was read.
        marks.see(Sight { xmin: 10, xid: Some(11), drawn: 100 }, before);
        see(&marks, 50, None, 100);
        let old = marks.horizon();
        found_nothing(&marks, 0, i64::MAX);
        assert_eq!(start(&marks), 0, "nothing was pursued");
        see(&marks, 50, Some(51), 100);
        see(&marks, 60, None, 100);
        // This scan's snapshot is older than the one that made the number safe.
        marks.found_nothing("orders", 0, 0, i64::MAX, old);
        assert_eq!(start(&marks), 0);
    }

    #[test]
    fn a_mark_stays_below_what_was_found() {
        let marks = safe_to_a_hundred();
        found_nothing(&marks, 0, 40);
        assert_eq!(start(&marks), 40);
        assert_eq!(marks.start("orders", [0, 1].into_iter()), 0, "another lane has none yet");
        assert_eq!(marks.start("refunds", [0].into_iter()), 0);
        found_nothing(&marks, 40, 20);
        assert_eq!(start(&marks), 40, "it never falls by itself");
    }

    #[test]
    fn a_scan_that_was_on_its_way_does_not_undo_a_lowering() {
        let marks = safe_to_a_hundred();
        found_nothing(&marks, 0, 40);
        marks.lower("orders", 0, 7);
        found_nothing(&marks, 40, 90);
        assert_eq!(start(&marks), 6);
        found_nothing(&marks, 6, 90);
        assert_eq!(start(&marks), 90);
    }

    #[test]
    fn marks_end_with_their_lease_and_when_somebody_mends() {
        let marks = safe_to_a_hundred();
        found_nothing(&marks, 0, 40);
        marks.enter(lease(0), 0);
        assert_eq!(start(&marks), 40);
        marks.enter(lease(0), 1);
        assert_eq!(start(&marks), 0);
        found_nothing(&marks, 0, 40);
        marks.enter(Lease { epoch: 2, ..lease(0) }, 1);
        assert_eq!(start(&marks), 0);
    }
}
