//! What the model knows of each message.

use std::sync::Arc;

use message::{Event, Message, MessageId, Next, State, Status, step};
use store::{Acknowledged, Batch, Counts, Filter, Page, Store};

use super::{Fate, ORDERED, acknowledged};

/// A message as the model sees it.
#[derive(Clone, Debug)]
pub(super) struct Known {
    id: MessageId,
    ordered: bool,
    key: Option<String>,
    /// `None`: the record is gone.
    state: Option<State>,
    /// It failed or was postponed, and its wait does not end in this history.
    waits: bool,
    /// Its time had not come: nobody waits for it.
    postponed: bool,
    acknowledged: bool,
    /// What went wrong last is on record.
    erred: bool,
}

impl Known {
    pub(super) fn new(message: &Message) -> Self {
        Self {
            id: message.id,
            ordered: message.topic == ORDERED,
            key: message.key.clone(),
            state: Some(State::NEW),
            waits: false,
            postponed: false,
            acknowledged: false,
            erred: false,
        }
    }

    fn same_key(&self, other: &Self) -> bool {
        self.ordered == other.ordered && self.key.is_some() && self.key == other.key
    }

    fn is(&self, status: Status) -> bool {
        self.state.is_some_and(|state| state.status == status)
    }

    /// Whether a later message of its key must wait for it.
    fn blocks(&self) -> bool {
        let trouble = self.is(Status::Failed) || self.is(Status::Dead);
        let rests = self.is(Status::Pending) || (trouble && self.ordered);
        self.is(Status::InFlight) || (rests && !self.postponed)
    }
}

/// All messages in the order of writing, and what has happened.
#[derive(Default)]
pub(super) struct Model {
    pub(super) known: Vec<Known>,
    success_total: u64,
    failure_total: u64,
    dead_total: u64,
    acknowledged_total: u64,
}

impl Model {
    /// One of the messages ever written, gone ones too.
    pub(super) fn pick(&self, number: usize) -> Option<MessageId> {
        (!self.known.is_empty()).then(|| self.known[number % self.known.len()].id)
    }

    pub(super) fn is_dead(&self, number: usize) -> bool {
        self.known[number].is(Status::Dead)
    }

    fn place(&self, id: MessageId) -> Result<usize, String> {
        self.known.iter().position(|known| known.id == id).ok_or(format!("{id} was never written"))
    }

    /// What `event` makes of the message.
    pub(super) fn happen(&mut self, id: MessageId, event: Event) -> Result<(), String> {
        let place = self.place(id)?;
        let known = &mut self.known[place];
        let Some(before) = known.state else { return Err(format!("{id} is gone")) };
        known.state = match step(before, event).map_err(|refused| refused.to_string())? {
            Next::State(after) => Some(after),
            Next::Gone => None,
        };
        if before.status != Status::Dead && known.is(Status::Dead) {
            self.dead_total += 1;
        }
        Ok(())
    }

    /// Whether this batch may be taken as it is; then it is taken.
    pub(super) fn claimed(&mut self, batch: &Batch) -> Result<(), String> {
        if batch.messages.len() > 1 && batch.messages.iter().any(|claimed| claimed.state.travels_alone()) {
            return Err("a message that must travel alone does not".to_owned());
        }
        let mut taken: Vec<usize> = Vec::new();
        for claimed in &batch.messages {
            let id = claimed.message.id;
            let place = self.place(id)?;
            if self.known[place].waits {
                return Err(format!("{id} was claimed before its wait was over"));
            }
            if taken.last().is_some_and(|last| *last > place) {
                return Err(format!("{id} comes too late in its batch"));
            }
            let overtaken = (0..place).find(|earlier| {
                let other = &self.known[*earlier];
                other.same_key(&self.known[place]) && other.blocks() && !taken.contains(earlier)
            });
            if let Some(overtaken) = overtaken {
                return Err(format!("{id} overtakes {:?}", self.known[overtaken]));
            }
            self.happen(id, Event::Claim)?;
            self.known[place].postponed = false;
            if self.known[place].state != Some(claimed.state) {
                return Err(format!("{:?} was claimed as {:?}", self.known[place], claimed.state));
            }
            taken.push(place);
        }
        Ok(())
    }

    /// What the relay said of a message that it held.
    pub(super) fn settled(&mut self, id: MessageId, fate: Fate) -> Result<(), String> {
        let event = match fate {
            Fate::Sent => Event::Confirmed,
            Fate::Failed { .. } => Event::Failed { max_attempts: u32::MAX },
            Fate::Dead { attempted: true } => Event::Rejected,
            Fate::Dead { attempted: false } => Event::GaveUp,
            Fate::Released { .. } | Fate::Postponed { .. } => Event::Released,
        };
        match fate {
            Fate::Sent => self.success_total += 1,
            Fate::Released { error: false } | Fate::Postponed { .. } => {}
            _ => self.failure_total += 1,
        }
        self.happen(id, event)?;
        let place = self.place(id)?;
        let known = &mut self.known[place];
        known.waits = matches!(fate, Fate::Failed { later: true } | Fate::Postponed { later: true });
        known.postponed = matches!(fate, Fate::Postponed { .. });
        known.erred |= !matches!(fate, Fate::Sent | Fate::Released { error: false } | Fate::Postponed { .. });
        Ok(())
    }

    pub(super) fn acknowledge(&mut self, id: MessageId) -> Acknowledged {
        let Some(known) = self.known.iter_mut().find(|known| known.id == id) else {
            return Acknowledged::Unknown;
        };
        let Some(state) = known.state else { return Acknowledged::Unknown };
        if step(state.perhaps_sent(known.erred), Event::Acknowledged).is_err() {
            return Acknowledged::Refused(state.status);
        }
        let first = !std::mem::replace(&mut known.acknowledged, true);
        self.acknowledged_total += u64::from(first);
        acknowledged(first)
    }

    /// Whether it is sent again, and then it is.
    pub(super) fn redeliver(&mut self, id: MessageId) -> Result<bool, String> {
        let place = self.place(id)?;
        let known = &mut self.known[place];
        if !known.is(Status::Sent) || known.acknowledged {
            return Ok(false);
        }
        known.erred = true;
        self.happen(id, Event::Unacknowledged).map(|()| true)
    }

    /// Whether every record is what the model says, and the counts are those of the records.
    pub(super) async fn compare(&self, store: &Arc<dyn Store>) -> Result<(), String> {
        let page = Page { after: None, limit: 10_000, newest_first: false };
        let records = store.list(&Filter::default(), page).await.map_err(|error| error.to_string())?.items;
        let expected: Vec<(MessageId, State)> =
            self.known.iter().filter_map(|known| known.state.map(|state| (known.id, state))).collect();
        let found: Vec<(MessageId, State)> =
            records.iter().map(|record| (record.message.id, record.state)).collect();
        if found != expected {
            return Err(format!("the records are\n{found:#?}\nand the model says\n{expected:#?}"));
        }
        let counts = store.counts().await.map_err(|error| error.to_string())?;
        let count = |status| expected.iter().filter(|(_, state)| state.status == status).count() as u64;
        let expected = Counts {
            pending: count(Status::Pending),
            in_flight: count(Status::InFlight),
            failed: count(Status::Failed),
            sent: count(Status::Sent),
            dead: count(Status::Dead),
            publish_success_total: self.success_total,
            publish_failure_total: self.failure_total,
            dead_total: self.dead_total,
            acknowledged_total: self.acknowledged_total,
            oldest_age: counts.oldest_age,
            write_to_sent: counts.write_to_sent.clone(),
            sent_to_acknowledged: counts.sent_to_acknowledged.clone(),
        };
        if counts != expected {
            return Err(format!("the counts are {counts:?} and the model says {expected:?}"));
        }
        Ok(())
    }

    /// Whether all is sent but what waits, and what waits behind that.
    pub(super) fn nothing_is_left_behind(&self) -> Result<(), String> {
        for (place, known) in self.known.iter().enumerate() {
            let waits = known.waits && (known.is(Status::Failed) || known.postponed);
            let behind = known.ordered
                && self.known[..place]
                    .iter()
                    .any(|earlier| earlier.same_key(known) && earlier.waits && earlier.blocks());
            if known.state.is_some() && !known.is(Status::Sent) && !waits && !behind {
                return Err(format!("{known:?} is left behind"));
            }
        }
        Ok(())
    }
}
