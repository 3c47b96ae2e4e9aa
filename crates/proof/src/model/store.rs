//! The store's tables and what its transactions do to them, in miniature.
//!
//! Each function is one statement or transaction of the real store: same conditions, same order, same columns
//! (`ready`, `held`, the wait for the next attempt). What becomes of a message is never decided here but by
//! [`message::step`], as in production. The random lease id is left out: it guards against a store that lost
//! its last moments, and without that fault the epoch alone must be enough.

use message::{Event, Next, State, Status, step};

use super::bug::Bug;
use super::hold::Hold;
use super::relay::{Hand, Place, Verdict};
use super::witness::Witness;

/// The number of a message; the first is 1, so that 0 can mean none, as in the real table of holds.
pub(super) type Seq = u8;

/// A message's row. In flight is not a column: it is a fact about batches.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Row {
    /// At rest: never InFlight.
    pub state: State,
    /// Whose order it keeps.
    pub key: u8,
    /// The claim looks at it.
    pub ready: bool,
    /// It waits behind another of its key.
    pub held: bool,
    /// It waits for its next attempt.
    pub waits: bool,
}

/// A lane's row.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Lane {
    /// Rises with every change of hands.
    pub epoch: u8,
    /// The relay that holds it; none once it was released.
    pub owner: Option<u8>,
    /// The lease has run out by the store's clock.
    pub expired: bool,
}

/// The record of an open batch.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Batch {
    /// Unlike any that somebody still remembers.
    pub id: u8,
    /// Its lane.
    pub lane: u8,
    /// Whose topic its messages are of.
    pub channel: u8,
    /// The epoch under which it was taken.
    pub epoch: u8,
    /// The exact messages.
    pub seqs: Vec<Seq>,
}

/// All tables.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Store {
    /// By sequence number, from 1; none where a message was removed.
    pub rows: Vec<Option<Row>>,
    /// By number.
    pub lanes: Vec<Lane>,
    /// Open batches. A lane has one of a topic; here a bug may open a second.
    pub batches: Vec<Batch>,
    /// By key.
    pub holds: Vec<Option<Hold>>,
    /// How many topics there are.
    pub channels: u8,
}

/// What configuration and code say, the same in every state.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rules {
    /// A failed message holds back the later ones of its key.
    pub hold_failed: bool,
    /// A Dead one does too.
    pub hold_dead: bool,
    /// Messages of a batch, at most.
    pub batch: usize,
    /// Followers let go in one step of a drain.
    pub drain: usize,
    /// What is wrong with the code, if anything.
    pub bug: Option<Bug>,
}

impl Rules {
    /// Whether the code has this fault.
    pub(super) fn has(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }
}

impl Store {
    /// The row of a message that is there.
    pub fn row(&self, seq: Seq) -> Option<&Row> {
        self.rows.get(usize::from(seq).checked_sub(1)?)?.as_ref()
    }

    pub(super) fn row_mut(&mut self, seq: Seq) -> Option<&mut Row> {
        self.rows.get_mut(usize::from(seq).checked_sub(1)?)?.as_mut()
    }

    /// All messages that are there, in order.
    pub fn messages(&self) -> impl Iterator<Item = (Seq, &Row)> {
        (1..).zip(&self.rows).filter_map(|(seq, row)| Some((seq, row.as_ref()?)))
    }

    /// Where the lane of a key is.
    pub fn lane_of(&self, key: u8) -> u8 {
        key % u8::try_from(self.lanes.len()).expect("a model has a handful of lanes")
    }

    /// Whose topic a key is of.
    pub fn channel_of(&self, key: u8) -> u8 {
        key % self.channels
    }

    /// Whether this is the lane's current lease.
    pub fn stands(&self, lane: u8, epoch: u8) -> bool {
        let lane = &self.lanes[usize::from(lane)];
        lane.owner.is_some() && lane.epoch == epoch
    }

    /// Whether a batch has it.
    pub fn flies(&self, seq: Seq) -> bool {
        self.batches.iter().any(|batch| batch.seqs.contains(&seq))
    }

    /// The status that people see.
    pub fn status(&self, seq: Seq) -> Option<Status> {
        let row = self.row(seq)?;
        Some(if self.flies(seq) { Status::InFlight } else { row.state.status })
    }

    /// A beat's share of one lane: take it if it is free, and resolve what its last owner left.
    pub(super) fn take(&mut self, rules: &Rules, lane: u8, relay: u8, witness: &mut Witness) -> Option<u8> {
        let row = &mut self.lanes[usize::from(lane)];
        let free = row.owner.is_none() || row.expired;
        if !free && !rules.has(Bug::TakeIgnoresTheLease) {
            return None;
        }
        witness.taken(free);
        if !rules.has(Bug::TakeKeepsTheEpoch) {
            row.epoch += 1;
        }
        (row.owner, row.expired) = (Some(relay), false);
        let epoch = row.epoch;
        witness.epoch(lane, epoch);
        if !rules.has(Bug::OrphansStayOpen) {
            self.orphan(rules, lane, witness);
        }
        Some(epoch)
    }

    fn orphan(&mut self, rules: &Rules, lane: u8, witness: &mut Witness) {
        let (mut left, others): (Vec<Batch>, Vec<Batch>) =
            self.batches.drain(..).partition(|batch| batch.lane == lane);
        self.batches = others;
        if rules.has(Bug::OrphansOneBatch) && left.len() > 1 {
            self.batches.extend(left.drain(1..));
        }
        for seq in left.into_iter().flat_map(|batch| batch.seqs) {
            let Some(after) = self.move_on(seq, Event::Orphaned, witness) else { continue };
            let dead = after.status == Status::Dead;
            if dead && rules.hold_dead && !rules.has(Bug::OrphanedDeadHoldsNobody) {
                self.place(rules, seq);
            } else if dead {
                self.lift(rules, seq);
            }
            if let Some(row) = self.row_mut(seq) {
                row.ready = !dead;
            }
        }
    }

    /// Nothing of what is open there is in the relay's hands.
    pub(super) fn release(&mut self, rules: &Rules, lane: u8, epoch: u8) {
        if !self.stands(lane, epoch) {
            return;
        }
        if !rules.has(Bug::UnansweredClaimIsACrash) {
            self.batches.retain(|batch| batch.lane != lane);
        }
        let row = &mut self.lanes[usize::from(lane)];
        (row.owner, row.expired) = (None, false);
        if rules.has(Bug::ReleaseResetsTheEpoch) {
            row.epoch = 0;
        }
    }

    /// The claiming half of a turn. `fresh` names the new batch.
    pub(super) fn claim(
        &mut self,
        rules: &Rules,
        (lane, channel): Place,
        epoch: u8,
        fresh: u8,
        witness: &mut Witness,
    ) -> Option<Hand> {
        self.drain_some(rules);
        let owned = self.stands(lane, epoch) || rules.has(Bug::ClaimIgnoresTheLease);
        let busy = self.batches.iter().any(|batch| (batch.lane, batch.channel) == (lane, channel));
        if !owned || busy && !rules.has(Bug::ClaimIgnoresTheOpenBatch) {
            return None;
        }
        let mut hand = Hand::new(fresh, epoch);
        for seq in self.candidates(rules, (lane, channel)) {
            if self.blocked(rules, seq) {
                self.park(seq);
                continue;
            }
            let Some(row) = self.row(seq) else { continue };
            let alone = row.state.travels_alone() && !rules.has(Bug::NobodyTravelsAlone);
            if alone && !hand.items.is_empty() {
                break;
            }
            match step(row.state, Event::Claim) {
                Ok(Next::State(state)) => hand.add(rules, seq, row.key, state),
                _ => witness.refused = true,
            }
            if alone {
                break;
            }
        }
        let seqs: Vec<Seq> = hand.items.iter().map(|item| item.seq).collect();
        if seqs.is_empty() {
            return None;
        }
        self.batches.push(Batch { id: fresh, lane, channel, epoch, seqs });
        self.batches.sort_by_key(|batch| (batch.lane, batch.id));
        Some(hand)
    }

    fn candidates(&self, rules: &Rules, place: Place) -> Vec<Seq> {
        let of = |key| (self.lane_of(key), self.channel_of(key));
        let ready = self.messages().filter(|(_, row)| row.ready && of(row.key) == place);
        ready.map(|(seq, _)| seq).take(rules.batch).collect()
    }

    fn blocked(&self, rules: &Rules, seq: Seq) -> bool {
        let Some(row) = self.row(seq) else { return false };
        rules.hold_failed && !rules.has(Bug::ClaimIgnoresTheHold) && self.blocks(rules, row.key, seq)
    }

    /// The settling half of a turn. Answers the record that was closed; none: another relay owns the lane.
    pub(super) fn settle(
        &mut self,
        rules: &Rules,
        lane: u8,
        hand: &Hand,
        witness: &mut Witness,
    ) -> Option<Batch> {
        let stands = self.stands(lane, hand.epoch);
        let place = self.batches.iter().position(|batch| {
            batch.lane == lane
                && match rules.bug {
                    Some(Bug::SettleIgnoresTheEpoch) => batch.seqs == hand.seqs(),
                    Some(Bug::SettleIgnoresTheBatch) => batch.epoch == hand.epoch && stands,
                    _ => batch.id == hand.batch && batch.epoch == hand.epoch && stands,
                }
        })?;
        let closed = self.batches.remove(place);
        let mut holds = self.holds.iter().any(Option::is_some);
        for item in &hand.items {
            let verdict = item.verdict.unwrap_or(Verdict::Released);
            holds |= self.write(rules, item.seq, verdict, holds, witness);
        }
        Some(closed)
    }

    /// Writes one verdict. Answers whether a hold was placed.
    fn write(
        &mut self,
        rules: &Rules,
        seq: Seq,
        verdict: Verdict,
        holds: bool,
        witness: &mut Witness,
    ) -> bool {
        let event = match verdict {
            Verdict::Released => return false,
            Verdict::Sent => Event::Confirmed,
            Verdict::Failed => Event::Failed { max_attempts: u32::MAX },
            Verdict::Dead => Event::Rejected,
        };
        if self.move_on(seq, event, witness).is_none() {
            return false;
        }
        if let Some(row) = self.row_mut(seq) {
            row.ready = false;
            row.waits = verdict == Verdict::Failed;
            row.held &= verdict == Verdict::Sent;
        }
        let holding = match verdict {
            Verdict::Failed => rules.hold_failed,
            Verdict::Dead => rules.hold_dead,
            Verdict::Sent | Verdict::Released => false,
        };
        if holding {
            self.place(rules, seq);
        } else if holds && verdict != Verdict::Failed {
            self.stand(seq);
            self.lift(rules, seq);
        }
        holding
    }

    /// What the transition function makes of a message in flight.
    fn move_on(&mut self, seq: Seq, event: Event, witness: &mut Witness) -> Option<State> {
        let row = self.row_mut(seq);
        let after = row.and_then(|row| {
            let before = State { status: Status::InFlight, rest: row.state.status, ..row.state };
            let Ok(Next::State(after)) = step(before, event) else { return None };
            row.state = after;
            Some(after)
        });
        witness.refused |= after.is_none();
        after
    }

    /// Makes a message whose wait is over sendable.
    pub(super) fn promote(&mut self, seq: Seq) {
        if let Some(row) = self.row_mut(seq).filter(|row| row.waits && !row.ready) {
            (row.ready, row.waits) = (true, false);
        }
    }

    /// An operator's request. Answers whether it was granted.
    pub(super) fn amend(&mut self, rules: &Rules, seq: Seq, event: Event) -> bool {
        let flies = self.flies(seq) && !rules.has(Bug::AmendIgnoresTheFlight);
        let Some(row) = self.row_mut(seq) else { return false };
        let rest = row.state.status;
        let seen = State { status: if flies { Status::InFlight } else { rest }, ..row.state };
        match step(seen, event) {
            Ok(Next::State(state)) => {
                *row = Row { state, ready: true, held: false, waits: false, ..row.clone() };
                if rules.has(Bug::RequeueDropsTheHold) {
                    let key = usize::from(row.key);
                    self.holds[key] = None;
                }
            }
            Ok(Next::Gone) => {
                if !rules.has(Bug::RemovedStillHolds) {
                    self.lift(rules, seq);
                }
                self.rows[usize::from(seq) - 1] = None;
            }
            Err(_) => return false,
        }
        true
    }
}
