//! A store whose messages are all in memory: what a relay reaches with it is what relay and broker reach together.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use anyhow::Result;
use async_trait::async_trait;
use message::{Event, Message, Next, State, Status, step};
use store::sqlite::SqliteStore;
use store::{
    Batch, Beat, Beaten, Claim, ClaimOrder, Claimed, Error, Instance, LaneView, Lanes, Lease, Left,
    Settlement, Store, Turn, Verdict,
};
use tempfile::TempDir;
use tokio::sync::Notify;
use uuid::Uuid;

const LANES: u16 = 16;

/// See the module. Roles that no relay plays are those of an empty file.
pub(crate) struct Memory {
    store: Arc<dyn Store>,
    _folder: TempDir,
    lease: Uuid,
    waiting: Mutex<Vec<VecDeque<Claimed>>>,
    flying: Mutex<HashMap<Uuid, Vec<Claimed>>>,
    /// What was sent stays, as rows do in a store.
    sent: Mutex<Vec<Claimed>>,
    written: Mutex<i64>,
    bell: Notify,
}

testkit::pass_on!(Memory);

impl Memory {
    /// All of `messages`, those of a key on one lane and in order.
    pub(crate) fn new(messages: Vec<Message>) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let memory = Self {
            store: Arc::new(SqliteStore::open(folder.path().join("empty.db"))?),
            _folder: folder,
            lease: Uuid::new_v4(),
            waiting: Mutex::new((0..LANES).map(|_| VecDeque::new()).collect()),
            flying: Mutex::default(),
            sent: Mutex::default(),
            written: Mutex::default(),
            bell: Notify::new(),
        };
        memory.write(messages)?;
        Ok(memory)
    }

    /// Adds messages, and wakes the relay.
    pub(crate) fn write(&self, messages: Vec<Message>) -> Result<()> {
        let mut waiting = self.waiting();
        let mut written = self.written.lock().expect("nobody panics while it is held");
        for message in messages {
            *written += 1;
            let key = message.key.clone().unwrap_or_default();
            let lane = key.bytes().fold(7_usize, |hash, byte| hash.wrapping_mul(31) + usize::from(byte));
            let fresh = State {
                status: Status::Pending,
                rest: Status::Pending,
                attempts: 0,
                crashes: 0,
                delivery: 0,
            };
            let Next::State(state) = step(fresh, Event::Claim)? else {
                unreachable!("a claim removes nothing")
            };
            let claimed = Claimed {
                seq: *written,
                message: message.into(),
                state,
                ack_groups: None,
                age: Duration::ZERO,
            };
            waiting[lane % usize::from(LANES)].push_back(claimed);
        }
        self.bell.notify_one();
        Ok(())
    }

    /// How many were sent.
    pub(crate) fn sent(&self) -> usize {
        self.done().len()
    }

    fn done(&self) -> MutexGuard<'_, Vec<Claimed>> {
        self.sent.lock().expect("nobody panics while it is held")
    }

    fn waiting(&self) -> MutexGuard<'_, Vec<VecDeque<Claimed>>> {
        self.waiting.lock().expect("nobody panics while it is held")
    }

    fn flying(&self) -> MutexGuard<'_, HashMap<Uuid, Vec<Claimed>>> {
        self.flying.lock().expect("nobody panics while it is held")
    }

    fn settle(&self, settlement: Settlement) {
        let flown = self.flying().remove(&settlement.batch).unwrap_or_default();
        let (mut waiting, mut done) = (self.waiting(), self.done());
        let lane = &mut waiting[usize::from(settlement.lease.lane)];
        for (claimed, (_, verdict)) in flown.into_iter().zip(settlement.verdicts).rev() {
            match verdict {
                Verdict::Sent { .. } => done.push(claimed),
                _ => lane.push_front(claimed),
            }
        }
    }
}

#[async_trait]
impl Lanes for Memory {
    async fn beat(&self, beat: &Beat) -> Result<Beaten, Error> {
        let all = (0..LANES).map(|lane| Lease { lane, epoch: 1, id: self.lease });
        let held = if beat.take { all.collect() } else { beat.held.clone() };
        Ok(Beaten { held, instances: 1, ..Beaten::default() })
    }

    async fn release(&self, _: &[Lease], _: Left) -> Result<(), Error> {
        Ok(())
    }

    async fn leave(&self, _: &Instance) -> Result<(), Error> {
        Ok(())
    }

    async fn lanes(&self) -> Result<Vec<LaneView>, Error> {
        Ok(Vec::new())
    }

    async fn set_lanes(&self, _: u16) -> Result<bool, Error> {
        Ok(true)
    }
}

#[async_trait]
impl Claim for Memory {
    async fn turn(&self, settlements: Vec<Settlement>, order: Option<ClaimOrder>) -> Result<Turn, Error> {
        settlements.into_iter().for_each(|settlement| self.settle(settlement));
        let Some(order) = order else { return Ok(Turn::default()) };
        let share = (order.limit / order.leases.len().max(1)).max(1);
        let mut turn = Turn::default();
        for lease in order.leases {
            let lane = &mut self.waiting()[usize::from(lease.lane)];
            // All messages have one topic and go to one broker.
            let Some(rule) = lane.front().map(|claimed| (order.rule)(&claimed.message.topic)) else {
                continue;
            };
            let room = share.min(rule.take);
            let messages: Vec<Claimed> = lane.drain(..room.min(lane.len())).collect();
            // What may not be taken is no reason to look again.
            turn.more |= room > 0 && !lane.is_empty();
            if !messages.is_empty() {
                let id = Uuid::new_v4();
                self.flying().insert(id, messages.clone());
                turn.batches.push(Batch { id, channel: rule.channel, lease, messages });
            }
        }
        Ok(turn)
    }

    async fn woken(&self) {
        self.bell.notified().await;
    }
}
