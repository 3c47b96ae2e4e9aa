//! An inbox that remembers nothing, for groups that promise nothing.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use message::MessageId;
use uuid::Uuid;

use crate::{
    Arrival, Error, Handled, Inbox, InboxCounts, InboxRules, Page, Paged, Parked, Processed, Receipt,
    Remembered, Reservation, Work,
};

/// The inbox of one group that does not try again what failed.
///
/// It keeps no rule of [`Inbox`] that needs a memory: what comes twice is done twice, and what fails is
/// [lost](Receipt::Lost). Nothing is written anywhere; how much was done is counted for as long as this lives.
#[derive(Debug, Default)]
pub struct Forgetful {
    done: AtomicU64,
}

impl Forgetful {
    fn count_done(&self, receipts: &[Receipt]) {
        let done = receipts.iter().filter(|receipt| **receipt == Receipt::Done).count();
        self.done.fetch_add(done as u64, Ordering::Relaxed);
    }
}

#[async_trait]
impl Inbox for Forgetful {
    async fn check(&self, work: &Work) -> Result<(), Error> {
        let kind = match work {
            Work::Mark => return Ok(()),
            Work::Sql(_) => "sql",
            Work::Script(_) => "script",
        };
        Err(Error::Refused(format!("a group that remembers nothing has no store in which {kind} could work")))
    }

    async fn process(
        &self,
        _: &str,
        arrivals: Vec<Arrival>,
        work: &Work,
        _: &InboxRules,
    ) -> Result<Vec<Receipt>, Error> {
        self.check(work).await?;
        let receipts = vec![Receipt::Done; arrivals.len()];
        self.count_done(&receipts);
        Ok(receipts)
    }

    async fn reserve(
        &self,
        _: &str,
        arrivals: Vec<Arrival>,
        _: Duration,
        _: &InboxRules,
    ) -> Result<Vec<Reservation>, Error> {
        Ok(vec![Reservation::Granted(Uuid::nil()); arrivals.len()])
    }

    async fn conclude(
        &self,
        _: &str,
        conclusions: Vec<(Arrival, Uuid, Handled)>,
        _: &InboxRules,
    ) -> Result<Vec<Receipt>, Error> {
        let receipts = conclusions.into_iter().map(|(_, _, handled)| match handled {
            Handled::Done => Receipt::Done,
            Handled::Retry { error, .. } | Handled::Dead { error } => Receipt::Lost { error },
            Handled::Unavailable { error } => Receipt::Unavailable { error },
        });
        let receipts: Vec<Receipt> = receipts.collect();
        self.count_done(&receipts);
        Ok(receipts)
    }

    async fn due(&self, _: &str, _: usize) -> Result<Vec<Arrival>, Error> {
        Ok(Vec::new())
    }

    async fn processed(&self, _: &str, _: Page) -> Result<Paged<Processed>, Error> {
        Ok(Paged { items: Vec::new(), next: None })
    }

    async fn parked(&self, _: &str, _: Page) -> Result<Paged<Parked>, Error> {
        Ok(Paged { items: Vec::new(), next: None })
    }

    async fn unpark(&self, group: &str, id: MessageId, _: &str) -> Result<(), Error> {
        Err(not_parked(group, id))
    }

    async fn drop_parked(&self, group: &str, id: MessageId, _: &str) -> Result<(), Error> {
        Err(not_parked(group, id))
    }

    async fn inbox_counts(&self, _: &str) -> Result<InboxCounts, Error> {
        Ok(InboxCounts { processed: self.done.load(Ordering::Relaxed), ..InboxCounts::default() })
    }

    async fn remembered(&self, _: &str) -> Result<Remembered, Error> {
        Ok(Remembered { ids: 0, bytes: Some(0) })
    }

    async fn forget_ids(&self, _: &str, _: Duration) -> Result<u64, Error> {
        Ok(0)
    }
}

fn not_parked(group: &str, id: MessageId) -> Error {
    Error::Refused(format!("the inbox of {group} keeps no message, so not {id} either"))
}
