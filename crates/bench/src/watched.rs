//! A store that notes when each message was sent, in memory or on PostgreSQL.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use anyhow::Result;
use async_trait::async_trait;
use message::{Message, MessageId};
use store::{
    Beat, Beaten, Claim, ClaimOrder, Error, Instance, LaneView, Lease, Left, NewMessage, Seq, Settlement,
    Store, Turn, Verdict,
};

use crate::memory::Memory;
use crate::postgres::Database;

/// Messages written in one transaction.
pub(crate) const TOGETHER: usize = 1_000;

/// See the module.
pub(crate) struct Watched {
    store: Arc<dyn Store>,
    behind: Behind,
    ids: Mutex<HashMap<Seq, MessageId>>,
    sent: Mutex<Vec<(MessageId, Instant)>>,
}

/// What it stands before.
enum Behind {
    Memory(Arc<Memory>),
    Postgres(Database),
}

testkit::pass_on!(Watched);
testkit::pass_on!(Watched: Lanes {
    fn beat(beat: &Beat) -> Beaten;
    fn release(leases: &[Lease], left: Left) -> ();
    fn leave(instance: &Instance) -> ();
    fn lanes() -> Vec<LaneView>;
    fn set_lanes(count: u16) -> bool;
});

impl Watched {
    /// An empty one: on a server of PostgreSQL, or in memory.
    pub(crate) async fn new(server: Option<&str>) -> Result<Arc<Self>> {
        let (store, behind): (Arc<dyn Store>, _) = match server {
            None => {
                let memory = Arc::new(Memory::new(Vec::new())?);
                (memory.clone(), Behind::Memory(memory))
            }
            Some(server) => {
                let database = Database::make(server).await?;
                (database.open().await?, Behind::Postgres(database))
            }
        };
        Ok(Arc::new(Self { store, behind, ids: Mutex::default(), sent: Mutex::default() }))
    }

    pub(crate) async fn write(&self, messages: Vec<Message>) -> Result<()> {
        if let Behind::Memory(memory) = &self.behind {
            return memory.write(messages);
        }
        let messages: Vec<NewMessage> = messages.into_iter().map(NewMessage::from).collect();
        for together in messages.chunks(TOGETHER) {
            for result in self.store.append(together.to_vec()).await? {
                result?;
            }
        }
        Ok(())
    }

    /// When each message was sent and the store knew it.
    pub(crate) fn sent(&self) -> MutexGuard<'_, Vec<(MessageId, Instant)>> {
        self.sent.lock().expect("nobody panics while it is held")
    }

    /// Nobody uses it any more.
    pub(crate) async fn forget(&self) -> Result<()> {
        match &self.behind {
            Behind::Memory(_) => Ok(()),
            Behind::Postgres(database) => database.forget().await,
        }
    }
}

#[async_trait]
impl Claim for Watched {
    async fn turn(&self, settlements: Vec<Settlement>, order: Option<ClaimOrder>) -> Result<Turn, Error> {
        let verdicts = settlements.iter().flat_map(|settlement| &settlement.verdicts);
        let sent = verdicts.filter(|(_, verdict)| matches!(verdict, Verdict::Sent { .. }));
        let sent: Vec<Seq> = sent.map(|(seq, _)| *seq).collect();
        let turn = self.store.turn(settlements, order).await?;
        let now = Instant::now();
        let mut ids = self.ids.lock().expect("nobody panics while it is held");
        self.sent().extend(sent.into_iter().filter_map(|seq| Some((*ids.get(&seq)?, now))));
        let claimed = turn.batches.iter().flat_map(|batch| &batch.messages);
        ids.extend(claimed.map(|claimed| (claimed.seq, claimed.message.id)));
        Ok(turn)
    }

    async fn woken(&self) {
        self.store.woken().await;
    }
}
