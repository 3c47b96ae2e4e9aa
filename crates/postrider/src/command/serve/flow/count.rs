//! What counts messages as they pass: around a publisher, and around an inbox.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use broker::{Guarantees, Line, Outcome, Outgoing, Publisher, SendTogether, Transactions, WriteNote};
use message::MessageId;
use store::{
    Arrival, Error, Handled, Inbox, InboxCounts, InboxRules, Page, Paged, Parked, Processed, Receipt,
    Remembered, Reservation, Work,
};
use uuid::Uuid;

use super::Flows;

/// Counts what the broker confirms.
pub(in super::super) struct Publishing<P: ?Sized> {
    flows: Arc<Flows>,
    inner: Arc<P>,
}

impl Flows {
    /// `publisher`, counted.
    pub(in super::super) fn publishing(
        self: &Arc<Self>,
        publisher: Arc<dyn Publisher>,
    ) -> Arc<dyn Publisher> {
        Arc::new(Publishing { flows: Arc::clone(self), inner: publisher })
    }

    /// `inbox`, counted.
    pub(in super::super) fn doing(self: &Arc<Self>, inbox: Arc<dyn Inbox>) -> Arc<dyn Inbox> {
        Arc::new(Doing { flows: Arc::clone(self), inner: inbox })
    }

    /// Counts the topics whose messages fared well. Neighbours are mostly of one topic.
    fn count_sent(&self, topics: &[Arc<message::Message>], outcomes: &[Outcome]) {
        let fine = topics.iter().zip(outcomes).filter(|(_, outcome)| **outcome == Outcome::Confirmed);
        let fine: Vec<&str> = fine.map(|(message, _)| message.topic.as_str()).collect();
        fine.chunk_by(|a, b| a == b).for_each(|run| self.sent(run[0], run.len() as u64));
    }

    fn count_done(&self, group: &str, topics: &[String], receipts: &[Receipt]) {
        let done = topics.iter().zip(receipts).filter(|(_, receipt)| **receipt == Receipt::Done);
        let done: Vec<&str> = done.map(|(topic, _)| topic.as_str()).collect();
        done.chunk_by(|a, b| a == b).for_each(|run| self.done(group, run[0], run.len() as u64));
    }
}

/// Messages are shared, so that looking at their topics afterwards costs nothing.
fn messages(batch: &[Outgoing]) -> Vec<Arc<message::Message>> {
    batch.iter().map(|outgoing| Arc::clone(&outgoing.message)).collect()
}

#[async_trait]
impl Publisher for Publishing<dyn Publisher> {
    fn guarantees(&self) -> Guarantees {
        self.inner.guarantees()
    }

    fn once(&self) -> Option<Arc<dyn Publisher>> {
        Some(self.flows.publishing(self.inner.once()?))
    }

    fn transactions(&self) -> Option<Arc<dyn Transactions>> {
        let inner = self.inner.transactions()?;
        Some(Arc::new(Publishing { flows: Arc::clone(&self.flows), inner }))
    }

    async fn recognises(&self, horizon: Duration) -> Result<(), Outcome> {
        self.inner.recognises(horizon).await
    }

    async fn publish(&self, batch: Vec<Outgoing>) -> Vec<Outcome> {
        let sent = messages(&batch);
        let outcomes = self.inner.publish(batch).await;
        self.flows.count_sent(&sent, &outcomes);
        outcomes
    }
}

#[async_trait]
impl Transactions for Publishing<dyn Transactions> {
    async fn sender(&self, line: &Line) -> Result<Arc<dyn SendTogether>, Outcome> {
        let inner = self.inner.sender(line).await?;
        Ok(Arc::new(Publishing { flows: Arc::clone(&self.flows), inner }))
    }
}

#[async_trait]
impl SendTogether for Publishing<dyn SendTogether> {
    async fn take(&self, lanes: &[u16]) -> Result<Vec<Vec<u8>>, Outcome> {
        self.inner.take(lanes).await
    }

    fn resolve(&self, lanes: &[u16]) {
        self.inner.resolve(lanes);
    }

    async fn give_back(&self, lanes: &[u16]) {
        self.inner.give_back(lanes).await;
    }

    async fn publish(&self, batch: Vec<Outgoing>, note: WriteNote<'_>) -> Vec<Outcome> {
        let sent = messages(&batch);
        let outcomes = self.inner.publish(batch, note).await;
        self.flows.count_sent(&sent, &outcomes);
        outcomes
    }

    fn is_good(&self) -> bool {
        self.inner.is_good()
    }
}

/// Counts what groups have done.
struct Doing {
    flows: Arc<Flows>,
    inner: Arc<dyn Inbox>,
}

#[async_trait]
impl Inbox for Doing {
    async fn check(&self, work: &Work) -> Result<(), Error> {
        self.inner.check(work).await
    }

    async fn process(
        &self,
        group: &str,
        arrivals: Vec<Arrival>,
        work: &Work,
        rules: &InboxRules,
    ) -> Result<Vec<Receipt>, Error> {
        let topics: Vec<String> = arrivals.iter().map(|arrival| arrival.message.topic.clone()).collect();
        let receipts = self.inner.process(group, arrivals, work, rules).await?;
        self.flows.count_done(group, &topics, &receipts);
        Ok(receipts)
    }

    async fn reserve(
        &self,
        group: &str,
        arrivals: Vec<Arrival>,
        lease: Duration,
        rules: &InboxRules,
    ) -> Result<Vec<Reservation>, Error> {
        self.inner.reserve(group, arrivals, lease, rules).await
    }

    async fn conclude(
        &self,
        group: &str,
        conclusions: Vec<(Arrival, Uuid, Handled)>,
        rules: &InboxRules,
    ) -> Result<Vec<Receipt>, Error> {
        let topics: Vec<String> =
            conclusions.iter().map(|(arrival, ..)| arrival.message.topic.clone()).collect();
        let receipts = self.inner.conclude(group, conclusions, rules).await?;
        self.flows.count_done(group, &topics, &receipts);
        Ok(receipts)
    }

    async fn due(&self, group: &str, limit: usize) -> Result<Vec<Arrival>, Error> {
        self.inner.due(group, limit).await
    }

    async fn processed(&self, group: &str, page: Page) -> Result<Paged<Processed>, Error> {
        self.inner.processed(group, page).await
    }

    async fn parked(&self, group: &str, page: Page) -> Result<Paged<Parked>, Error> {
        self.inner.parked(group, page).await
    }

    async fn unpark(&self, group: &str, id: MessageId, actor: &str) -> Result<(), Error> {
        self.inner.unpark(group, id, actor).await
    }

    async fn drop_parked(&self, group: &str, id: MessageId, actor: &str) -> Result<(), Error> {
        self.inner.drop_parked(group, id, actor).await
    }

    async fn inbox_counts(&self, group: &str) -> Result<InboxCounts, Error> {
        self.inner.inbox_counts(group).await
    }

    async fn remembered(&self, group: &str) -> Result<Remembered, Error> {
        self.inner.remembered(group).await
    }

    async fn forget_ids(&self, group: &str, keep: Duration) -> Result<u64, Error> {
        self.inner.forget_ids(group, keep).await
    }
}
