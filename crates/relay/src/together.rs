//! Exactly once: the messages of a batch and a note of them, in one transaction of the broker.
//!
//! ```text
//!  lane taken ─► take over the line ─► read its note ─► which of those are not settled?
//!                fences the former      what the last     they are in the log: settled when
//!                owner                  commit was        they are claimed, and not sent
//! ```
//!
//! The note of a lane names every message of it that is in the log and perhaps not settled: those of the transaction it
//! is in, and those that were found and are not settled yet. So whoever takes the lane next, after a crash at any point,
//! knows from the last note what must not be sent again.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::{Arc, Mutex};

use broker::{Line, Outcome, Outgoing, SendTogether, TakenOver};
use store::{Batch, Claimed, Lease, Seq, Verdict};
use tokio::sync::OnceCell;

use crate::Shared;
use crate::publish::outgoing;
use crate::route::Way;

/// A message in a note: its place, which deliberate delivery of it, and a part of its id. A store that lost its last moments
/// gives places out again.
type Entry = (Seq, u32, u32);

/// The lines of all lanes that were used.
#[derive(Default)]
pub(crate) struct Lines {
    store: OnceCell<String>,
    slots: Mutex<HashMap<(usize, u16), Arc<Slot>>>,
}

/// A lane's line of one channel, once it was taken over.
type Slot = tokio::sync::Mutex<Option<Taken>>;

struct Taken {
    lease: Lease,
    sender: Box<dyn SendTogether>,
    /// In the log, and not settled when the line was taken over.
    found: BTreeSet<Entry>,
    /// Of those, what was claimed last: settled by the time that anything else of the lane is claimed.
    claimed: Vec<Entry>,
}

impl Lines {
    fn slot(&self, batch: &Batch) -> Arc<Slot> {
        let mut slots = self.slots.lock().expect("nothing panics while it holds the lines");
        Arc::clone(slots.entry((batch.channel, batch.lease.lane)).or_default())
    }

    /// Lets go of lines whose lane is not ours any more.
    fn let_go(&self, held: &[Lease]) {
        let lanes: HashSet<u16> = held.iter().map(|lease| lease.lane).collect();
        let mut slots = self.slots.lock().expect("nothing panics while it holds the lines");
        slots.retain(|(_, lane), _| lanes.contains(lane));
    }
}

/// Sends a batch in a transaction of its lane, but for what is not sent now. One outcome for each of its messages.
pub(crate) async fn send(shared: &Shared, batch: &Batch, unsendable: &HashMap<Seq, Verdict>) -> Vec<Outcome> {
    let all = |outcome: Outcome| vec![outcome; batch.messages.len()];
    let Some(way) = batch.messages.first().and_then(|claimed| shared.routes.of(&claimed.message.topic))
    else {
        return all(Outcome::Held);
    };
    if shared.leases.until(&batch.lease).is_none() {
        tracing::warn!(
            messages = batch.messages.len(),
            "the lease ended before these were sent: giving them back"
        );
        return all(Outcome::Held);
    }
    let slot = shared.lines.slot(batch);
    let mut slot = slot.lock().await;
    let mut gone: HashSet<Seq> = unsendable.keys().copied().collect();
    if slot.as_ref().is_none_or(|taken| taken.lease != batch.lease || !taken.sender.is_good()) {
        // Its connections go first.
        *slot = None;
        match take_over(shared, way, batch).await {
            Ok((taken, settled)) => {
                *slot = Some(taken);
                gone.extend(settled);
            }
            Err(outcome) => return all(outcome),
        }
    }
    match slot.as_mut() {
        Some(taken) => taken.send(shared, batch, &gone, way).await,
        None => all(Outcome::Held),
    }
}

/// Takes the line of a batch over. Answers those of its messages, too, that somebody has settled meanwhile: if this process
/// slept, its lease may be over and not known to be.
async fn take_over(shared: &Shared, way: &Way, batch: &Batch) -> Result<(Taken, HashSet<Seq>), Outcome> {
    let lease = batch.lease;
    shared.lines.let_go(&shared.leases.held());
    let unreachable = |error: String| Outcome::Unreachable { error };
    let transactions = way.route.publisher.transactions().ok_or_else(|| Outcome::Misconfigured {
        error: format!("the broker `{}` has no transactions", way.route.broker),
    })?;
    let store = shared.lines.store.get_or_try_init(|| shared.store.identity()).await;
    let store = store.map_err(|error| unreachable(format!("the store does not say who it is: {error}")))?;
    let line = Line { store: store.clone(), broker: way.route.broker.clone(), lane: lease.lane };
    let TakenOver { sender, note } = transactions.take_over(&line).await?;
    let noted = note.as_deref().map_or_else(|| Ok(Vec::new()), read_note);
    let noted = noted.map_err(|error| Outcome::Misconfigured { error })?;
    let claimed = batch.messages.iter().map(|claimed| claimed.seq);
    let seqs: Vec<Seq> = noted.iter().map(|(seq, ..)| *seq).chain(claimed.clone()).collect();
    let unsent = shared.store.unsent(&seqs).await;
    let unsent =
        unsent.map_err(|error| unreachable(format!("the store does not say what is sent: {error}")))?;
    let unsent: HashSet<Seq> = unsent.into_iter().collect();
    let found: BTreeSet<Entry> = noted.into_iter().filter(|(seq, ..)| unsent.contains(seq)).collect();
    if !found.is_empty() {
        tracing::info!(
            lane = lease.lane,
            messages = found.len(),
            "found in the broker's log and not settled: they are not sent again"
        );
    }
    let settled = claimed.filter(|seq| !unsent.contains(seq)).collect();
    Ok((Taken { lease, sender, found, claimed: Vec::new() }, settled))
}

fn entry(claimed: &Claimed) -> Entry {
    let id = claimed.message.id.0.as_u128();
    (claimed.seq, claimed.state.delivery, id as u32)
}

impl Taken {
    /// Sends what is not in the log, but for what is `gone`.
    async fn send(
        &mut self,
        shared: &Shared,
        batch: &Batch,
        gone: &HashSet<Seq>,
        way: &Arc<Way>,
    ) -> Vec<Outcome> {
        for settled in self.claimed.drain(..) {
            self.found.remove(&settled);
        }
        let mut outcomes = vec![Outcome::Held; batch.messages.len()];
        let mut fresh: Vec<usize> = Vec::with_capacity(batch.messages.len());
        for (place, claimed) in batch.messages.iter().enumerate() {
            if self.found.contains(&entry(claimed)) {
                self.claimed.push(entry(claimed));
                outcomes[place] = Outcome::Confirmed;
            } else if fresh.len() < way.guarantees.max_batch && !gone.contains(&claimed.seq) {
                fresh.push(place);
            }
        }
        if fresh.is_empty() {
            return outcomes;
        }
        let messages: Vec<Outgoing> = fresh
            .iter()
            .map(|place| &batch.messages[*place])
            .map(|claimed| {
                let own = shared.routes.of(&claimed.message.topic);
                outgoing(claimed, &own.unwrap_or(way).route)
            })
            .collect();
        let note = |places: &[usize]| {
            let sent = places.iter().map(|place| entry(&batch.messages[fresh[*place]]));
            write_note(&self.found.iter().copied().chain(sent).collect())
        };
        let told = self.sender.publish(messages, &note).await;
        for (place, outcome) in fresh.into_iter().zip(told) {
            outcomes[place] = outcome;
        }
        outcomes
    }
}

/// The form of a note.
const FORM: u8 = 1;

/// Places as the differences between them, deliveries, and parts of ids: six bytes for most messages.
fn write_note(entries: &BTreeSet<Entry>) -> Vec<u8> {
    let mut note = vec![FORM];
    let mut before = 0;
    for (seq, delivery, id) in entries {
        write_number(&mut note, seq.abs_diff(before));
        write_number(&mut note, u64::from(*delivery));
        note.extend(id.to_be_bytes());
        before = *seq;
    }
    note
}

fn read_note(note: &[u8]) -> Result<Vec<Entry>, String> {
    let odd =
        || "the note in the broker was written by another version of Postrider: use that one".to_owned();
    let Some((&FORM, mut rest)) = note.split_first() else { return Err(odd()) };
    let (mut entries, mut before) = (Vec::new(), 0);
    while !rest.is_empty() {
        let step = read_number(&mut rest).and_then(|step| i64::try_from(step).ok()).ok_or_else(odd)?;
        let delivery =
            read_number(&mut rest).and_then(|number| u32::try_from(number).ok()).ok_or_else(odd)?;
        let (id, after) = rest.split_first_chunk().ok_or_else(odd)?;
        rest = after;
        before += step;
        entries.push((before, delivery, u32::from_be_bytes(*id)));
    }
    Ok(entries)
}

/// Seven bits in a byte, the lowest first; the highest bit says that more follow.
fn write_number(note: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        note.push(number as u8 | 0x80);
        number >>= 7;
    }
    note.push(number as u8);
}

fn read_number(note: &mut &[u8]) -> Option<u64> {
    let mut number = 0;
    for shift in (0..64).step_by(7) {
        let (&byte, rest) = note.split_first()?;
        *note = rest;
        number |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Some(number);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_is_read_as_it_was_written() {
        let many = vec![(1, 0, 7), (2, 3, 0), (130, 0, u32::MAX), (i64::MAX, u32::MAX, 1)];
        for entries in [vec![], vec![(1, 0, 9)], many] {
            let note = write_note(&entries.iter().copied().collect());
            assert_eq!(read_note(&note), Ok(entries));
        }
        let thousand: BTreeSet<Entry> = (1_000_000..1_001_000).map(|seq| (seq, 0, 5)).collect();
        assert!(write_note(&thousand).len() < 6_010);
    }

    #[test]
    fn a_note_of_another_form_is_refused() {
        for note in [&[][..], &[2, 1, 0, 0, 0, 0, 0], &[1, 0x80], &[1, 5], &[1, 5, 0, 1, 2, 3]] {
            assert!(read_note(note).is_err(), "{note:?}");
        }
    }
}
