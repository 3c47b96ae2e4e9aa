//! What the store said to each relay, written down by a witness beside it, and the audit of all trails.
//!
//! The witness stands between relay and store and changes nothing. It notes which lanes the relay was given and how
//! each settlement ended, with the machine's monotonic clock, which all processes share and no wrong clock changes.
//! So the audit can say, for any store, whether a settlement was taken from a relay after its lane had gone to another.

use std::collections::{HashMap, HashSet};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use anyhow::{Context, Result};
use async_trait::async_trait;
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use store::{
    Beat, Beaten, Claim, ClaimOrder, Error, Instance, LaneView, Lanes, Lease, Left, Seq, Settlement, Store,
    Turn, Verdict,
};
use uuid::Uuid;

/// One note. Times are nanoseconds of the monotonic clock.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Note {
    /// A process began.
    Began {
        /// When.
        at: u64,
        /// What it took the time to be, in milliseconds since 1970.
        clock: u64,
    },
    /// The store had given it a lane when it looked at its clock.
    Took {
        /// Which.
        lane: u16,
        /// Under which epoch.
        epoch: i64,
        /// When the answer was there.
        at: u64,
    },
    /// The store answered a settlement.
    Settled {
        /// Of which lane.
        lane: u16,
        /// Under which epoch.
        epoch: i64,
        /// Before it was asked for.
        asked: u64,
        /// The messages that were to be Sent by it.
        sent: Vec<Seq>,
        /// Whether it came too late and nothing was written.
        fenced: bool,
    },
}

fn now() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs()
}

fn clock() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// What all trails together show.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Audit {
    /// Settlements that were taken after their lane had gone to another relay.
    pub stale: u64,
    /// Messages that more than one settlement made Sent.
    pub twice: u64,
    /// Settlements that the store refused because they came too late.
    pub fenced: u64,
    /// For each process: how far its clock was ahead, in milliseconds, and how many of its settlements were taken.
    pub relays: Vec<(i64, u64)>,
}

/// Reads all trails in `folder`.
///
/// # Errors
/// When they cannot be read or are not trails.
pub fn audit(folder: &Path) -> Result<Audit> {
    let mut trails = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "trail") {
            let text = std::fs::read_to_string(&path)?;
            // A process that was killed may have left half a line at the end.
            let whole = text.rfind('\n').map_or("", |end| &text[..end]);
            let notes = whole.lines().map(serde_json::from_str).collect::<Result<Vec<Note>, _>>();
            trails.push(notes.with_context(|| format!("{} is not a trail", path.display()))?);
        }
    }
    Ok(judge(&trails))
}

fn judge(trails: &[Vec<Note>]) -> Audit {
    let mut taken: HashMap<u16, Vec<(i64, u64)>> = HashMap::new();
    for note in trails.iter().flatten() {
        if let Note::Took { lane, epoch, at } = note {
            taken.entry(*lane).or_default().push((*epoch, *at));
        }
    }
    let mut audit = Audit::default();
    let mut sent_before = HashSet::new();
    for trail in trails {
        let (mut ahead, mut settled) = (0, 0);
        for note in trail {
            match note {
                Note::Began { at, clock: its_clock } => {
                    let true_clock = clock().saturating_sub((now() - at) / 1_000_000);
                    ahead = its_clock.cast_signed() - true_clock.cast_signed();
                }
                Note::Took { .. } => {}
                Note::Settled { fenced: true, .. } => audit.fenced += 1,
                Note::Settled { lane, epoch, asked, sent, fenced: false } => {
                    settled += 1;
                    let gone = |(newer, at): &(i64, u64)| newer > epoch && at < asked;
                    let stale = taken.get(lane).is_some_and(|taken| taken.iter().any(gone));
                    audit.stale += u64::from(stale);
                    audit.twice += sent.iter().filter(|seq| !sent_before.insert(**seq)).count() as u64;
                }
            }
        }
        audit.relays.push((ahead, settled));
    }
    audit
}

/// Stands between a relay and its store.
pub(crate) struct Witness {
    store: Arc<dyn Store>,
    trail: Mutex<File>,
    known: Mutex<HashSet<Lease>>,
}

impl Witness {
    /// Begins the trail of this process in `folder`.
    pub(crate) fn new(store: Arc<dyn Store>, folder: &Path) -> Result<Self> {
        let path = folder.join(format!("{}.trail", Uuid::new_v4()));
        let trail = OpenOptions::new().create_new(true).append(true).open(path)?;
        let witness = Self { store, trail: Mutex::new(trail), known: Mutex::default() };
        witness.note(&[Note::Began { at: now(), clock: clock() }]);
        Ok(witness)
    }

    fn note(&self, notes: &[Note]) {
        let mut lines = String::new();
        for note in notes {
            lines += &serde_json::to_string(note).expect("a note has no odd keys");
            lines.push('\n');
        }
        let mut trail = self.trail.lock().unwrap_or_else(PoisonError::into_inner);
        trail.write_all(lines.as_bytes()).expect("the disk of a proof is not full");
    }
}

#[async_trait]
impl Lanes for Witness {
    async fn beat(&self, beat: &Beat) -> Result<Beaten, Error> {
        let beaten = self.store.beat(beat).await?;
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let new = beaten.held.iter().filter(|lease| known.insert(**lease));
        let took = |lease: &Lease| Note::Took { lane: lease.lane, epoch: lease.epoch, at: now() };
        self.note(&new.map(took).collect::<Vec<_>>());
        Ok(beaten)
    }

    async fn release(&self, leases: &[Lease], left: Left) -> Result<(), Error> {
        self.store.release(leases, left).await
    }

    async fn leave(&self, instance: &Instance) -> Result<(), Error> {
        self.store.leave(instance).await
    }

    async fn lanes(&self) -> Result<Vec<LaneView>, Error> {
        self.store.lanes().await
    }

    async fn set_lanes(&self, count: u16) -> Result<bool, Error> {
        self.store.set_lanes(count).await
    }
}

#[async_trait]
impl Claim for Witness {
    async fn turn(&self, settlements: Vec<Settlement>, order: Option<ClaimOrder>) -> Result<Turn, Error> {
        let asked = now();
        let turn = self.store.turn(settlements.clone(), order).await?;
        let settled = settlements.into_iter().map(|settlement| Note::Settled {
            lane: settlement.lease.lane,
            epoch: settlement.lease.epoch,
            asked,
            fenced: turn.fenced.contains(&settlement.batch),
            sent: (settlement.verdicts.into_iter())
                .filter(|(_, verdict)| matches!(verdict, Verdict::Sent { .. }))
                .map(|(seq, _)| seq)
                .collect(),
        });
        self.note(&settled.collect::<Vec<_>>());
        Ok(turn)
    }

    async fn woken(&self) {
        self.store.woken().await;
    }
}

// The witness has nothing to say about the rest.
testkit::pass_on!(Witness);

#[cfg(test)]
mod tests {
    use super::*;

    fn took(epoch: i64, at: u64) -> Note {
        Note::Took { lane: 3, epoch, at }
    }

    fn settled(epoch: i64, asked: u64, sent: &[Seq], fenced: bool) -> Note {
        Note::Settled { lane: 3, epoch, asked, sent: sent.to_vec(), fenced }
    }

    #[test]
    fn a_refused_settlement_of_a_lane_that_is_gone_breaks_nothing() {
        let audit = judge(&[
            vec![took(1, 10), settled(1, 20, &[5], false), settled(1, 50, &[6], true)],
            vec![took(2, 40), settled(2, 60, &[6], false)],
        ]);
        assert_eq!((audit.stale, audit.twice, audit.fenced), (0, 0, 1));
    }

    #[test]
    fn a_settlement_that_was_asked_for_before_the_lane_was_known_to_be_gone_may_have_come_in_time() {
        let audit = judge(&[
            vec![took(1, 10), settled(1, 39, &[6], false)],
            vec![took(2, 40), settled(2, 60, &[], false)],
        ]);
        assert_eq!((audit.stale, audit.twice), (0, 0));
    }

    #[test]
    fn a_settlement_that_is_taken_after_its_lane_is_gone_is_stale() {
        let audit = judge(&[vec![took(1, 10), settled(1, 50, &[6], false)], vec![took(2, 40)]]);
        assert_eq!((audit.stale, audit.twice), (1, 0));
    }

    #[test]
    fn a_message_that_two_settlements_sent_is_seen_whenever_they_came() {
        let audit = judge(&[
            vec![took(1, 10), settled(1, 39, &[5, 6], false)],
            vec![took(2, 40), settled(2, 60, &[6, 7], false)],
        ]);
        assert_eq!((audit.stale, audit.twice), (0, 1));
    }
}
