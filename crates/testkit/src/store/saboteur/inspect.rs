//! Breaking the rules of Inspect.

use async_trait::async_trait;
use message::MessageId;
use store::{Attempt, AuditEntry, Counts, Error, Filter, Hold, Inspect, Page, Paged, Record, Seq};

use super::{Sabotage, Saboteur};

#[async_trait]
impl Inspect for Saboteur {
    async fn record(&self, id: MessageId) -> Result<Option<Record>, Error> {
        Ok(self.store.record(id).await?.map(|record| self.shown(record)))
    }

    async fn list(&self, filter: &Filter, mut page: Page) -> Result<Paged<Record>, Error> {
        let filter = if self.breaks(Sabotage::IgnoresFilters) { Filter::default() } else { filter.clone() };
        if let Some(after) = &mut page.after
            && self.breaks(Sabotage::RepeatsPages)
        {
            *after += if page.newest_first { 1 } else { -1 };
        }
        let paged = self.store.list(&filter, page).await?;
        let items = paged.items.into_iter().map(|record| self.shown(record)).collect();
        Ok(Paged { items, next: paged.next })
    }

    async fn attempts(&self, id: MessageId) -> Result<Vec<Attempt>, Error> {
        let mut attempts = self.store.attempts(id).await?;
        if self.breaks(Sabotage::LosesAttempts) {
            attempts.pop();
        }
        Ok(attempts)
    }

    async fn unsent(&self, seqs: &[Seq]) -> Result<Vec<Seq>, Error> {
        if self.breaks(Sabotage::TakesAllForSent) {
            return Ok(Vec::new());
        }
        self.store.unsent(seqs).await
    }

    async fn identity(&self) -> Result<String, Error> {
        if self.breaks(Sabotage::HasNoIdentity) {
            return Ok("store".to_owned());
        }
        self.store.identity().await
    }

    async fn counts(&self) -> Result<Counts, Error> {
        let mut counts = self.store.counts().await?;
        counts.pending += u64::from(self.breaks(Sabotage::Miscounts));
        Ok(counts)
    }

    async fn holds(&self, limit: usize) -> Result<Vec<Hold>, Error> {
        self.store.holds(limit).await
    }

    async fn audit(&self, page: Page) -> Result<Paged<AuditEntry>, Error> {
        if self.breaks(Sabotage::HidesAudit) {
            return Ok(Paged { items: Vec::new(), next: None });
        }
        self.store.audit(page).await
    }
}

impl Saboteur {
    fn shown(&self, mut record: Record) -> Record {
        if record.state.status != record.state.rest && self.breaks(Sabotage::ShowsRestingStatus) {
            record.state.status = record.state.rest;
        }
        if record.last_error.is_some() && self.breaks(Sabotage::HidesErrors) {
            record.last_error = None;
        }
        record
    }
}
