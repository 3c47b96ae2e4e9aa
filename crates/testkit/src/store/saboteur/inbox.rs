//! Breaking the rules of Inbox.

use std::time::Duration;

use async_trait::async_trait;
use message::MessageId;
use store::{
    Arrival, Error, Handled, Inbox, InboxCounts, InboxRules, Page, Paged, Parked, Processed, Receipt,
    Remembered, Reservation, Work,
};
use uuid::Uuid;

use super::{Sabotage, Saboteur};

/// Everything that is parked.
const ALL: Page = Page { after: None, limit: 10_000, newest_first: false };

#[async_trait]
impl Inbox for Saboteur {
    async fn check(&self, work: &Work) -> Result<(), Error> {
        if self.breaks(Sabotage::ChecksNothing) {
            return Ok(());
        }
        self.store.check(work).await
    }

    async fn process(
        &self,
        group: &str,
        arrivals: Vec<Arrival>,
        work: &Work,
        rules: &InboxRules,
    ) -> Result<Vec<Receipt>, Error> {
        let rules = self.rules(rules);
        if self.breaks(Sabotage::MarksBeforeTheWork) {
            return self.mark_then_work(group, arrivals, work, &rules).await;
        }
        let mut receipts = self.store.process(group, arrivals.clone(), work, &rules).await?;
        if receipts.contains(&Receipt::Busy) && self.breaks(Sabotage::PassesTheBusy) {
            for (receipt, arrival) in receipts.iter_mut().zip(&arrivals) {
                receipt.clone_from(&self.store.process(group, vec![arrival.clone()], work, &rules).await?[0]);
            }
        }
        let unavailable = |receipt: &Receipt| matches!(receipt, Receipt::Unavailable { .. });
        if receipts.len() > 1 && receipts.iter().all(unavailable) && self.breaks(Sabotage::TriesTheRest) {
            let rest = self.store.process(group, arrivals[1..].to_vec(), &Work::Mark, &rules).await?;
            receipts.splice(1.., rest);
        }
        for receipt in &mut receipts {
            if *receipt == Receipt::Duplicate && self.breaks(Sabotage::CallsDuplicatesDone) {
                *receipt = Receipt::Done;
            }
            if matches!(receipt, Receipt::Dead { .. }) && self.breaks(Sabotage::ComparesIdsOnly) {
                *receipt = Receipt::Duplicate;
            }
        }
        Ok(receipts)
    }

    async fn reserve(
        &self,
        group: &str,
        arrivals: Vec<Arrival>,
        lease: Duration,
        rules: &InboxRules,
    ) -> Result<Vec<Reservation>, Error> {
        let endless = self.breaks(Sabotage::EndlessReservations);
        let lease = if endless { Duration::from_secs(36_000) } else { lease };
        let mut reservations = self.store.reserve(group, arrivals, lease, rules).await?;
        for reservation in &mut reservations {
            let busy = *reservation == Reservation::Settled(Receipt::Busy);
            if busy && self.breaks(Sabotage::GrantsTwice) {
                *reservation = Reservation::Granted(Uuid::new_v4());
            }
        }
        Ok(reservations)
    }

    async fn conclude(
        &self,
        group: &str,
        mut conclusions: Vec<(Arrival, Uuid, Handled)>,
        rules: &InboxRules,
    ) -> Result<Vec<Receipt>, Error> {
        for (_, _, handled) in &mut conclusions {
            let error = match handled {
                Handled::Unavailable { error } if self.breaks(Sabotage::BlamesTheMessage) => error.clone(),
                Handled::Dead { error } if self.breaks(Sabotage::NeverBuries) => error.clone(),
                Handled::Done if self.breaks(Sabotage::DistrustsConclusions) => "perhaps".to_owned(),
                _ => continue,
            };
            *handled = Handled::Retry { error, after: None };
        }
        let mut receipts = self.store.conclude(group, conclusions, rules).await?;
        for receipt in &mut receipts {
            if *receipt == Receipt::Busy && self.breaks(Sabotage::AcceptsOldTokens) {
                *receipt = Receipt::Done;
            }
        }
        Ok(receipts)
    }

    async fn due(&self, group: &str, limit: usize) -> Result<Vec<Arrival>, Error> {
        if self.breaks(Sabotage::IsAlwaysDue) {
            let parked = self.store.parked(group, ALL).await?.items;
            return Ok(parked.into_iter().map(|parked| parked.arrival).collect());
        }
        self.store.due(group, limit).await
    }

    async fn processed(&self, group: &str, page: Page) -> Result<Paged<Processed>, Error> {
        self.store.processed(group, page).await
    }

    async fn parked(&self, group: &str, page: Page) -> Result<Paged<Parked>, Error> {
        self.store.parked(group, page).await
    }

    async fn unpark(&self, group: &str, id: MessageId, actor: &str) -> Result<(), Error> {
        if self.breaks(Sabotage::UnparksInWords) {
            return Ok(());
        }
        self.store.unpark(group, id, actor).await
    }

    async fn drop_parked(&self, group: &str, id: MessageId, actor: &str) -> Result<(), Error> {
        if self.breaks(Sabotage::DropsInWords) {
            return Ok(());
        }
        self.store.drop_parked(group, id, actor).await
    }

    async fn inbox_counts(&self, group: &str) -> Result<InboxCounts, Error> {
        let mut counts = self.store.inbox_counts(group).await?;
        counts.parked += u64::from(self.breaks(Sabotage::MiscountsInbox));
        Ok(counts)
    }

    async fn remembered(&self, group: &str) -> Result<Remembered, Error> {
        let mut remembered = self.store.remembered(group).await?;
        if self.breaks(Sabotage::RemembersForEver) {
            remembered.ids = self.store.inbox_counts(group).await?.processed;
        }
        Ok(remembered)
    }

    async fn forget_ids(&self, group: &str, keep: Duration) -> Result<u64, Error> {
        if self.breaks(Sabotage::ForgetsNothing) {
            return Ok(0);
        }
        if !self.breaks(Sabotage::ForgetsIdsEarly) {
            return self.store.forget_ids(group, keep).await;
        }
        // An id is old once the store's clock has moved on.
        crate::eventually(Duration::from_secs(1), || async {
            self.store.forget_ids(group, Duration::ZERO).await.is_ok_and(|forgotten| forgotten > 0)
        })
        .await;
        Ok(0)
    }
}

impl Saboteur {
    fn rules(&self, rules: &InboxRules) -> InboxRules {
        let mut rules = rules.clone();
        if rules.acknowledge && self.breaks(Sabotage::AcknowledgesNothing) {
            rules.acknowledge = false;
        }
        if self.breaks(Sabotage::NeverBuries) {
            rules.retry.max_attempts = u32::MAX;
        }
        if self.breaks(Sabotage::IgnoresInboxOrder) {
            rules.ordered = false;
        }
        if self.breaks(Sabotage::LetsInboxFollowersPass) {
            rules.hold_dead = false;
        }
        rules
    }

    /// Two transactions where there must be one.
    async fn mark_then_work(
        &self,
        group: &str,
        arrivals: Vec<Arrival>,
        work: &Work,
        rules: &InboxRules,
    ) -> Result<Vec<Receipt>, Error> {
        let mut receipts = self.store.process(group, arrivals.clone(), &Work::Mark, rules).await?;
        for (receipt, mut arrival) in receipts.iter_mut().zip(arrivals) {
            if *receipt == Receipt::Done {
                arrival.message.id = MessageId::new();
                let worked = self.store.process("elsewhere", vec![arrival], work, rules).await?;
                receipt.clone_from(&worked[0]);
            }
        }
        Ok(receipts)
    }
}
