//! Kafka's part: what is committed, the last note of each sender, and the claims in the order of writing.

/// A set of messages, one bit each.
pub(crate) type Messages = u8;

/// A set of senders, one bit each.
pub(crate) type Senders = u16;

/// The senders of a set.
pub(super) fn bits(senders: Senders) -> impl Iterator<Item = u8> {
    (0..16).filter(move |sender| senders & 1 << sender != 0)
}

/// A sender's transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Transaction {
    /// Nothing was begun, or it was aborted.
    None,
    /// Messages and a note are in the log, seen by nobody, and the commit is on its way.
    Sent {
        /// What was sent.
        messages: Messages,
        /// What the note says.
        note: Messages,
    },
    /// It is committed, and its relay has not heard of it.
    Landed,
}

/// A transactional id, as the log knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sender {
    /// Everything from it is refused.
    pub fenced: bool,
    /// Its last committed note.
    pub note: Messages,
    /// Its last transaction.
    pub transaction: Transaction,
}

/// The log.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Log {
    /// What is committed.
    pub committed: Messages,
    /// Something was committed twice.
    pub twice: bool,
    /// All senders that anybody remembers.
    pub senders: Vec<Sender>,
    /// Lanes and who claimed them, without those that were removed.
    pub claims: Vec<(u8, u8)>,
    /// Of those, what is being removed and nobody waits for.
    pub late: Vec<(u8, u8)>,
}

impl Log {
    /// A sender with an id that was never used.
    pub(super) fn sender(&mut self) -> u8 {
        self.senders.push(Sender { fenced: false, note: 0, transaction: Transaction::None });
        u8::try_from(self.senders.len() - 1).expect("a model has a handful of senders")
    }

    pub(super) fn of(&self, sender: u8) -> &Sender {
        &self.senders[usize::from(sender)]
    }

    fn of_mut(&mut self, sender: u8) -> &mut Sender {
        &mut self.senders[usize::from(sender)]
    }

    /// Whether it was taken.
    pub(super) fn send(&mut self, sender: u8, messages: Messages, note: Messages) -> bool {
        let row = self.of_mut(sender);
        if !row.fenced {
            row.transaction = Transaction::Sent { messages, note };
        }
        !row.fenced
    }

    /// The commit is there: messages and note together.
    pub(super) fn land(&mut self, sender: u8) {
        let row = self.of_mut(sender);
        if let Transaction::Sent { messages, note } = row.transaction {
            row.note = note;
            row.transaction = Transaction::Landed;
            self.twice |= self.committed & messages != 0;
            self.committed |= messages;
        }
    }

    /// What was sent is gone.
    pub(super) fn abort(&mut self, sender: u8) {
        self.of_mut(sender).transaction = Transaction::None;
    }

    /// The sender's relay has heard how its transaction ended, or never will. A commit on its way stays on its way.
    pub(super) fn forget(&mut self, sender: u8) {
        let row = self.of_mut(sender);
        if !matches!(row.transaction, Transaction::Sent { .. }) {
            row.transaction = Transaction::None;
        }
    }

    /// Ends what is open. A commit that is there by now stays; one on its way comes too late.
    pub(super) fn fence(&mut self, sender: u8) {
        let row = self.of_mut(sender);
        row.fenced = true;
        if row.transaction != Transaction::Landed {
            row.transaction = Transaction::None;
        }
    }

    /// Writes a claim. Of two by the same sender the later counts.
    pub(super) fn claim(&mut self, lane: u8, sender: u8) {
        self.remove(lane, sender);
        self.claims.push((lane, sender));
    }

    /// Writes a tombstone.
    pub(super) fn remove(&mut self, lane: u8, sender: u8) {
        self.claims.retain(|claim| *claim != (lane, sender));
    }

    /// Removes what is left of a sender.
    pub(super) fn remove_note(&mut self, sender: u8) {
        self.of_mut(sender).note = 0;
    }

    /// Who claimed the lane before `sender`, the first first: all, where it has no claim.
    pub(super) fn before(&self, lane: u8, sender: u8) -> impl Iterator<Item = u8> {
        let until = self.claims.iter().position(|claim| *claim == (lane, sender));
        let claims = self.claims[..until.unwrap_or(self.claims.len())].iter();
        claims.filter(move |claim| claim.0 == lane).map(|claim| claim.1)
    }
}
