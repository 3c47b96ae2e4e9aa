//! Exactly once: the messages of a delivery and a note of them, in one transaction of the broker.
//!
//! ```text
//!  lanes are new ─► take them ─► read the notes ─► which of those are not settled?
//!                   fences who    what is in the    they are open: settled when they are
//!                   had them      log, perhaps      claimed, and not sent
//! ```
//!
//! The note of a sender names every message that is in the log and perhaps not settled: those of the transaction it is in,
//! and those that were open before. So whoever takes a lane next, after a crash at any point, knows from the last notes of those who
//! had it what must not be sent again.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use broker::{Line, Outcome, Outgoing, SendTogether};
use store::{Batch, BatchId, Claimed, Latency, Lease, Seq, Verdict};
use tokio::sync::OnceCell;

use crate::Shared;
use crate::publish::{Place, outgoing};
use crate::route::Way;

/// A message in a note: its place, which deliberate delivery of it, and a part of its id. A store that lost its last moments
/// gives places out again.
type Entry = (Seq, u32, u32);

/// By lane, what is in the log and perhaps not settled, in any order.
type Lists = BTreeMap<u16, Vec<Entry>>;

/// Giving lanes back may take so long: who takes them otherwise stops the whole sender, which then needs another.
const GIVEN_BACK: Duration = Duration::from_secs(2);

/// How the transactions into a broker ended since the relay started.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ended {
    /// The broker.
    pub broker: String,
    /// Committed.
    pub committed: u64,
    /// Not committed, as far as is known: their messages are sent again, or found in the log.
    pub rolled_back: u64,
    /// How long they took, however they ended.
    pub took: Latency,
}

/// The senders of all trains, one for each channel.
#[derive(Default)]
pub(crate) struct Senders {
    store: OnceCell<String>,
    ended: Mutex<BTreeMap<String, Ended>>,
    each: Mutex<HashMap<(usize, usize), Arc<Sender>>>,
}

/// One of them.
struct Sender {
    sender: Arc<dyn SendTogether>,
    book: Mutex<Book>,
}

/// What a sender must know of its lanes.
#[derive(Default)]
struct Book(BTreeMap<u16, Lane>);

/// What of a lane is in the log and perhaps not settled.
#[derive(Default)]
struct Lane {
    /// Sent by those who had the lane before.
    inherited: BTreeSet<Entry>,
    /// Sent by us or inherited: by batch that is not settled yet, sorted.
    settling: HashMap<BatchId, Vec<Entry>>,
    /// Those who had the lane before are no longer needed.
    resolved: bool,
}

impl Senders {
    fn each(&self) -> MutexGuard<'_, HashMap<(usize, usize), Arc<Sender>>> {
        self.each.lock().expect("nothing panics while it holds the senders")
    }

    /// How the transactions into each broker ended.
    pub(crate) fn ended(&self) -> Vec<Ended> {
        self.ended.lock().expect("nothing panics while it counts").values().cloned().collect()
    }

    fn count(&self, broker: &str, committed: bool, took: Duration) {
        let mut all = self.ended.lock().expect("nothing panics while it counts");
        let new = || Ended { broker: broker.to_owned(), ..Ended::default() };
        let ended = all.entry(broker.to_owned()).or_insert_with(new);
        ended.committed += u64::from(committed);
        ended.rolled_back += u64::from(!committed);
        ended.took.note(took);
    }

    fn of_train(&self, train: usize) -> Vec<((usize, usize), Arc<Sender>)> {
        let each = self.each();
        let of_train = each.iter().filter(|((of, _), _)| *of == train);
        of_train.map(|(place, sender)| (*place, Arc::clone(sender))).collect()
    }

    /// A train settled these batches, but for those that it found to be another's.
    pub(crate) fn settled(&self, train: usize, batches: &[BatchId], fenced: &[BatchId]) {
        for (place, sender) in self.of_train(train) {
            let mut book = sender.book();
            for batch in batches {
                if !fenced.contains(batch) {
                    book.close(*batch);
                } else if book.0.values().any(|lane| lane.settling.contains_key(batch)) {
                    // Whether it is settled is not known here; the next sender asks the store, and stops this one.
                    drop(self.each().remove(&place));
                }
            }
            let lanes = book.resolved();
            if !lanes.is_empty() {
                sender.sender.resolve(&lanes);
            }
        }
    }

    /// A train gives these lanes to others: nothing of them is on its way.
    pub(crate) async fn give_back(&self, train: usize, lanes: impl Fn(u16) -> bool) {
        for (_, sender) in self.of_train(train) {
            let given = sender.book().give_back(&lanes);
            if !given.is_empty() && sender.sender.is_good() {
                drop(tokio::time::timeout(GIVEN_BACK, sender.sender.give_back(&given)).await);
            }
        }
    }
}

impl Book {
    /// A batch is settled.
    fn close(&mut self, batch: BatchId) {
        for lane in self.0.values_mut() {
            let entries = lane.settling.remove(&batch).unwrap_or_default();
            if !lane.inherited.is_empty() {
                lane.inherited.retain(|entry| entries.binary_search(entry).is_err());
            }
        }
    }

    /// Lanes of which all that was inherited is settled by now, and was not before.
    fn resolved(&mut self) -> Vec<u16> {
        let done = self.0.iter_mut().filter(|(_, lane)| !lane.resolved && lane.inherited.is_empty());
        done.map(|(number, lane)| {
            lane.resolved = true;
            *number
        })
        .collect()
    }

    /// Takes the lanes out of the book of which nothing is open.
    fn give_back(&mut self, lanes: impl Fn(u16) -> bool) -> Vec<u16> {
        let given = self.0.extract_if(.., |number, lane| lanes(*number) && lane.is_settled());
        given.map(|(number, _)| number).collect()
    }

    /// What is open.
    fn open(&self) -> Lists {
        self.0
            .iter()
            .filter(|(_, lane)| !lane.is_settled())
            .map(|(number, lane)| (*number, lane.open()))
            .collect()
    }
}

impl Lane {
    fn is_settled(&self) -> bool {
        self.inherited.is_empty() && self.settling.is_empty()
    }

    fn is_open(&self, entry: &Entry) -> bool {
        self.inherited.contains(entry)
            || self.settling.values().any(|entries| entries.binary_search(entry).is_ok())
    }

    fn open(&self) -> Vec<Entry> {
        let settling = self.settling.values().flatten().filter(|entry| !self.inherited.contains(entry));
        self.inherited.iter().chain(settling).copied().collect()
    }
}

/// Sends batches of one channel in a transaction, but for what is not sent now. One outcome for each of their messages.
pub(crate) async fn send(
    shared: &Shared,
    train: usize,
    batches: &[Batch],
    unsendable: &HashMap<Seq, Verdict>,
) -> Vec<Vec<Outcome>> {
    let mut outcomes: Vec<_> =
        batches.iter().map(|batch| vec![Outcome::Held; batch.messages.len()]).collect();
    let first = batches.iter().flat_map(|batch| &batch.messages).next();
    let Some(way) = first.and_then(|claimed| shared.routes.of(&claimed.message.topic)) else {
        return outcomes;
    };
    let stands = |batch: &Batch| shared.leases.until(&batch.lease).is_some();
    let (standing, over): (Vec<_>, Vec<_>) = batches.iter().enumerate().partition(|(_, batch)| stands(batch));
    if !over.is_empty() {
        let messages: usize = over.iter().map(|(_, batch)| batch.messages.len()).sum();
        tracing::warn!(messages, "the lease ended before these were sent: giving them back");
    }
    if standing.is_empty() {
        return outcomes;
    }
    match ready(shared, train, way, &standing).await {
        Ok((sender, mut gone)) => {
            gone.extend(unsendable.keys());
            sender.send(shared, way, &standing, &gone, &mut outcomes).await;
        }
        Err(outcome) => {
            for (b, _) in standing {
                outcomes[b].fill(outcome.clone());
            }
        }
    }
    outcomes
}

/// A sender that has the lanes of `batches`. Answers those of their messages, too, that somebody has settled meanwhile: if this
/// process slept, its lease may be over and not known to be.
async fn ready(
    shared: &Shared,
    train: usize,
    way: &Way,
    batches: &[(usize, &Batch)],
) -> Result<(Arc<Sender>, HashSet<Seq>), Outcome> {
    let place = (train, way.channel);
    let known = shared.senders.each().get(&place).filter(|sender| sender.sender.is_good()).cloned();
    let sender = match known {
        Some(sender) => sender,
        None => {
            // The connections of the old one go first.
            drop(shared.senders.each().remove(&place));
            let sender = Arc::new(Sender::new(shared, way).await?);
            shared.senders.each().insert(place, Arc::clone(&sender));
            sender
        }
    };
    // Those that have nothing to send now are taken with those that have.
    let held = shared.leases.usable(crate::train::lanes_of(train, shared));
    let lanes = held.iter().map(|lease: &Lease| lease.lane);
    let mut lanes: BTreeSet<u16> = lanes.chain(batches.iter().map(|(_, batch)| batch.lease.lane)).collect();
    lanes.retain(|lane| !sender.book().0.contains_key(lane));
    let settled = if lanes.is_empty() { HashSet::new() } else { sender.take(shared, lanes, batches).await? };
    Ok((sender, settled))
}

fn unreachable(error: String) -> Outcome {
    Outcome::Unreachable { error }
}

fn entry(claimed: &Claimed) -> Entry {
    let id = claimed.message.id.0.as_u128();
    (claimed.seq, claimed.state.delivery, id as u32)
}

impl Sender {
    async fn new(shared: &Shared, way: &Way) -> Result<Self, Outcome> {
        let transactions = way.route.publisher.transactions().ok_or_else(|| Outcome::Misconfigured {
            error: format!("the broker `{}` has no transactions", way.route.broker),
        })?;
        let store = shared.senders.store.get_or_try_init(|| shared.store.identity()).await;
        let store =
            store.map_err(|error| unreachable(format!("the store does not say who it is: {error}")))?;
        let line = Line { store: store.clone(), broker: way.route.broker.clone() };
        Ok(Self { sender: transactions.sender(&line).await?, book: Mutex::default() })
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().expect("nothing panics while it holds the book")
    }

    /// Takes lanes. Answers which messages of `batches` in these lanes are settled.
    async fn take(
        &self,
        shared: &Shared,
        lanes: BTreeSet<u16>,
        batches: &[(usize, &Batch)],
    ) -> Result<HashSet<Seq>, Outcome> {
        let notes = self.sender.take(&lanes.iter().copied().collect::<Vec<_>>()).await?;
        let mut taken: BTreeMap<u16, Lane> = lanes.iter().map(|lane| (*lane, Lane::default())).collect();
        for note in &notes {
            for (lane, entries) in read_note(note).map_err(|error| Outcome::Misconfigured { error })? {
                if let Some(lane) = taken.get_mut(&lane) {
                    lane.inherited.extend(entries);
                }
            }
        }
        let batches = batches.iter().filter(|(_, batch)| lanes.contains(&batch.lease.lane));
        let claimed: Vec<Seq> =
            batches.flat_map(|(_, batch)| &batch.messages).map(|claimed| claimed.seq).collect();
        let noted = taken.values().flat_map(|lane| &lane.inherited).map(|(seq, ..)| *seq);
        let asked: Vec<Seq> = noted.chain(claimed.iter().copied()).collect();
        let unsent = shared.store.unsent(&asked).await;
        let unsent =
            unsent.map_err(|error| unreachable(format!("the store does not say what is sent: {error}")))?;
        let unsent: HashSet<Seq> = unsent.into_iter().collect();
        for lane in taken.values_mut() {
            lane.inherited.retain(|(seq, ..)| unsent.contains(seq));
        }
        let found: usize = taken.values().map(|lane| lane.inherited.len()).sum();
        if found > 0 {
            tracing::info!(
                messages = found,
                "found in the broker's log and not settled: they are not sent again"
            );
        }
        let mut book = self.book();
        book.0.extend(taken);
        let lanes = book.resolved();
        drop(book);
        self.sender.resolve(&lanes);
        Ok(claimed.into_iter().filter(|seq| !unsent.contains(seq)).collect())
    }

    /// Sends what is not in the log, but for what is `gone`.
    async fn send(
        &self,
        shared: &Shared,
        way: &Arc<Way>,
        batches: &[(usize, &Batch)],
        gone: &HashSet<Seq>,
        outcomes: &mut [Vec<Outcome>],
    ) {
        // By place in the outcomes.
        let mut fresh: Vec<(Place, &Batch, &Claimed)> = Vec::new();
        let before = {
            let book = self.book();
            for (b, batch) in batches {
                let lane = book.0.get(&batch.lease.lane).filter(|lane| !lane.is_settled());
                for (m, claimed) in batch.messages.iter().enumerate() {
                    if lane.is_some_and(|lane| lane.is_open(&entry(claimed))) {
                        outcomes[*b][m] = Outcome::Confirmed;
                    } else if fresh.len() < way.guarantees.max_batch && !gone.contains(&claimed.seq) {
                        fresh.push(((*b, m), batch, claimed));
                    }
                }
            }
            book.open()
        };
        if !fresh.is_empty() {
            // Most are of the same topic as the one before.
            let (mut topic, mut own) = ("", way);
            let messages = fresh.iter().map(|(_, _, claimed)| {
                if claimed.message.topic != topic {
                    topic = &claimed.message.topic;
                    own = shared.routes.of(topic).unwrap_or(way);
                }
                outgoing(claimed, &own.route)
            });
            let messages: Vec<Outgoing> = messages.collect();
            let note = |places: &[usize]| {
                let mut open = before.clone();
                for (_, batch, claimed) in places.iter().map(|place| fresh[*place]) {
                    open.entry(batch.lease.lane).or_default().push(entry(claimed));
                }
                write_note(open)
            };
            let began = Instant::now();
            let told = self.sender.publish(messages, &note).await;
            let committed = told.contains(&Outcome::Confirmed);
            shared.senders.count(&way.route.broker, committed, began.elapsed());
            for (((b, m), ..), outcome) in fresh.into_iter().zip(told) {
                outcomes[b][m] = outcome;
            }
        }
        let mut book = self.book();
        for (b, batch) in batches {
            let confirmed = batch
                .messages
                .iter()
                .zip(&outcomes[*b])
                .filter(|(_, outcome)| **outcome == Outcome::Confirmed);
            let mut entries: Vec<Entry> = confirmed.map(|(claimed, _)| entry(claimed)).collect();
            if !entries.is_empty() {
                entries.sort_unstable();
                book.0.entry(batch.lease.lane).or_default().settling.insert(batch.id, entries);
            }
        }
    }
}

/// The form of a note.
const FORM: u8 = 2;

/// Lane by lane how many, then places as the differences between them, deliveries, and parts of ids: seven bytes for most
/// messages.
fn write_note(open: Lists) -> Vec<u8> {
    let mut note = vec![FORM];
    for (lane, mut entries) in open.into_iter().filter(|(_, entries)| !entries.is_empty()) {
        entries.sort_unstable();
        write_number(&mut note, u64::from(lane));
        write_number(&mut note, entries.len() as u64);
        let mut before = 0;
        for (seq, delivery, id) in entries {
            write_number(&mut note, seq.abs_diff(before));
            write_number(&mut note, u64::from(delivery));
            note.extend(id.to_be_bytes());
            before = seq;
        }
    }
    note
}

fn read_note(note: &[u8]) -> Result<Lists, String> {
    let odd = "the note in the broker was written by another version of Postrider: use that one";
    match note.split_first() {
        Some((&FORM, rest)) => read_open(rest).ok_or_else(|| odd.to_owned()),
        _ => Err(odd.to_owned()),
    }
}

fn read_open(mut rest: &[u8]) -> Option<Lists> {
    let mut open = Lists::new();
    while !rest.is_empty() {
        let lane = u16::try_from(read_number(&mut rest)?).ok()?;
        let entries = open.entry(lane).or_default();
        let mut before = 0;
        for _ in 0..read_number(&mut rest)? {
            before += i64::try_from(read_number(&mut rest)?).ok()?;
            let delivery = u32::try_from(read_number(&mut rest)?).ok()?;
            let (id, after) = rest.split_first_chunk()?;
            rest = after;
            entries.push((before, delivery, u32::from_be_bytes(*id)));
        }
    }
    Some(open)
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

    fn lists(lanes: &[(u16, &[Entry])]) -> Lists {
        lanes.iter().map(|(lane, entries)| (*lane, entries.to_vec())).collect()
    }

    fn written(open: &Lists) -> Vec<u8> {
        let backwards = |entries: &Vec<Entry>| entries.iter().rev().copied().collect();
        write_note(open.iter().map(|(lane, entries)| (*lane, backwards(entries))).collect())
    }

    #[test]
    fn a_note_is_read_as_it_was_written() {
        let many: &[Entry] = &[(1, 0, 7), (2, 3, 0), (130, 0, u32::MAX), (i64::MAX, u32::MAX, 1)];
        for open in [lists(&[]), lists(&[(0, &[(1, 0, 9)])]), lists(&[(3, many), (1023, &[(5, 0, 0)])])] {
            assert_eq!(read_note(&written(&open)), Ok(open));
        }
        assert_eq!(read_note(&written(&lists(&[(1, &[])]))), Ok(Lists::new()));
        let thousand: Vec<Entry> = (1_000_000..1_001_000).map(|seq| (seq, 0, 5)).collect();
        assert!(written(&lists(&[(7, &thousand)])).len() < 6_010);
    }

    #[test]
    fn a_note_of_another_form_is_refused() {
        for note in [
            &[][..],
            &[1, 1, 0],
            &[2, 0x80],
            &[2, 0, 1, 5],
            &[2, 0, 1, 5, 0, 1, 2, 3],
            &[2, 0xff, 0xff, 4, 0],
        ] {
            assert!(read_note(note).is_err(), "{note:?}");
        }
    }

    /// A lane with one inherited message, and two without.
    fn book() -> Book {
        let inherited = Lane { inherited: BTreeSet::from([(1, 0, 1)]), ..Lane::default() };
        Book(BTreeMap::from([(0, inherited), (1, Lane::default()), (2, Lane::default())]))
    }

    fn settling(book: &mut Book, lane: u16, entries: &[Entry]) -> BatchId {
        let batch = BatchId::new_v4();
        book.0.entry(lane).or_default().settling.insert(batch, entries.to_vec());
        batch
    }

    #[test]
    fn a_lane_is_given_back_and_its_former_owner_forgotten_only_when_nothing_of_it_is_open() {
        let mut book = book();
        assert_eq!(book.resolved(), [1, 2]);
        let own = settling(&mut book, 2, &[(5, 0, 5)]);
        assert_eq!(book.give_back(|_| true), [1]);
        let found = settling(&mut book, 0, &[(1, 0, 1)]);
        book.close(found);
        assert_eq!((book.resolved(), book.resolved()), (vec![0], vec![]));
        book.close(own);
        assert_eq!(book.give_back(|_| true), [0, 2]);
    }

    #[test]
    fn what_is_open_is_what_was_inherited_and_what_is_being_settled_() {
        let mut book = book();
        settling(&mut book, 0, &[(1, 0, 1), (2, 0, 2)]);
        settling(&mut book, 2, &[(5, 0, 5)]);
        assert_eq!(book.open(), lists(&[(0, &[(1, 0, 1), (2, 0, 2)]), (2, &[(5, 0, 5)])]));
        let lane = &book.0[&0];
        assert!(lane.is_open(&(1, 0, 1)) && lane.is_open(&(2, 0, 2)) && !lane.is_open(&(2, 1, 2)));
    }
}
