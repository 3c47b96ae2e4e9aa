//! Breaking the rules of Amend.

use async_trait::async_trait;
use message::{MessageId, Status};
use store::{Acknowledged, Amend, Edit, Error, Filter, Page, Retention};

use super::{Sabotage, Saboteur};

/// Every record.
const ALL: Page = Page { after: None, limit: 10_000, newest_first: false };

#[async_trait]
impl Amend for Saboteur {
    async fn requeue(&self, id: MessageId, actor: &str) -> Result<(), Error> {
        if self.breaks(Sabotage::RequeuesAtTheEnd)
            && let Some(record) = self.store.record(id).await?
        {
            self.store.discard(id, actor).await?;
            return self.store.append(vec![record.message.into()]).await.map(drop);
        }
        let answer = self.store.requeue(id, actor).await;
        self.answer(answer)
    }

    async fn edit(&self, id: MessageId, edit: &Edit, actor: &str) -> Result<(), Error> {
        if self.breaks(Sabotage::EditsInWords) {
            return self.store.requeue(id, actor).await;
        }
        self.store.edit(id, edit, actor).await
    }

    async fn discard(&self, id: MessageId, actor: &str) -> Result<(), Error> {
        if self.breaks(Sabotage::DiscardsInWords) {
            return Ok(());
        }
        let answer = self.store.discard(id, actor).await;
        self.answer(answer)
    }

    async fn delete(&self, id: MessageId, actor: &str) -> Result<(), Error> {
        if self.breaks(Sabotage::AmendsInFlight) {
            self.release_open().await?;
        }
        let answer = self.store.delete(id, actor).await;
        self.answer(answer)
    }

    async fn acknowledge(&self, done: Vec<(MessageId, String)>) -> Result<Vec<Acknowledged>, Error> {
        let mut in_flight = Vec::new();
        for (id, _) in &done {
            let status = self.store.record(*id).await?.map(|record| record.state.status);
            if status == Some(Status::Pending) && self.breaks(Sabotage::ForgetsWhatWasTried) {
                return Ok(vec![Acknowledged::Refused(Status::Pending); done.len()]);
            }
            in_flight.push(status == Some(Status::InFlight));
        }
        if in_flight.iter().all(|in_flight| *in_flight) && self.breaks(Sabotage::AcknowledgesLater) {
            return Ok(vec![Acknowledged::New; done.len()]);
        }
        let mut answers = self.store.acknowledge(done).await?;
        for answer in &mut answers {
            let wrong = match answer {
                Acknowledged::Repeated => self.breaks(Sabotage::CallsRepeatedNew),
                Acknowledged::Refused(_) => self.breaks(Sabotage::AcceptsAnyAcknowledgement),
                _ => false,
            };
            if wrong {
                *answer = Acknowledged::New;
            }
        }
        Ok(answers)
    }

    async fn redeliver(&self, id: MessageId, group: &str, why: &str) -> Result<bool, Error> {
        if self.breaks(Sabotage::RedeliversInWords) {
            return Ok(true);
        }
        self.store.redeliver(id, group, why).await
    }

    async fn clean(&self, retention: &Retention) -> Result<u64, Error> {
        if self.breaks(Sabotage::CleansEverything) {
            for record in self.store.list(&Filter::default(), ALL).await?.items {
                // What is in flight is refused; everything else goes.
                let _ = self.store.delete(record.message.id, "saboteur").await;
            }
        }
        self.store.clean(retention).await
    }
}

impl Saboteur {
    fn answer(&self, answer: Result<(), Error>) -> Result<(), Error> {
        if answer.is_err() && self.breaks(Sabotage::AllowsAnything) {
            return Ok(());
        }
        answer
    }
}
