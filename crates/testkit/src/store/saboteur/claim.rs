//! Breaking the rules of Claim.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use store::{Batch, Claim, ClaimOrder, Error, Lease, Settlement, TopicRule, Turn, Verdict};

use super::{Sabotage, Saboteur};

#[async_trait]
impl Claim for Saboteur {
    async fn turn(&self, settlements: Vec<Settlement>, order: Option<ClaimOrder>) -> Result<Turn, Error> {
        let settlements: Vec<_> =
            settlements.into_iter().map(|settlement| self.settlement(settlement)).collect();
        let order = order.map(|order| self.order(order));
        let earlier: Vec<Batch> = self.memory.open().values().cloned().collect();
        let settled: Vec<_> = settlements.iter().map(|settlement| settlement.batch).collect();
        let beside: Vec<_> = settlements.iter().flat_map(|settlement| settlement.beside.clone()).collect();
        if !beside.is_empty() && self.breaks(Sabotage::WritesBesideInAnyCase) {
            self.store.append(beside.into_iter().map(Into::into).collect()).await?;
        }
        let mut turn = self.store.turn(settlements, order).await?;
        {
            let mut open = self.memory.open();
            for batch in settled.iter().filter(|batch| !turn.fenced.contains(batch)) {
                open.remove(batch);
            }
            open.extend(turn.batches.iter().map(|batch| (batch.id, batch.clone())));
        }
        if !earlier.is_empty() && self.breaks(Sabotage::ClaimsTwice) {
            turn.batches.extend(earlier);
        }
        if !turn.fenced.is_empty() && self.breaks(Sabotage::HidesFenced) {
            turn.fenced.clear();
        }
        let several = turn.batches.iter().any(|batch| batch.messages.len() > 1);
        if several && self.breaks(Sabotage::ReversesBatches) {
            turn.batches.iter_mut().for_each(|batch| batch.messages.reverse());
        }
        if !turn.batches.is_empty() && self.breaks(Sabotage::ClaimsInWords) {
            self.release_open().await?;
        }
        Ok(turn)
    }

    async fn woken(&self) {
        if self.breaks(Sabotage::NeverRings) {
            std::future::pending::<()>().await;
        }
        self.store.woken().await;
    }
}

impl Saboteur {
    fn settlement(&self, mut settlement: Settlement) -> Settlement {
        let names: Vec<i64> = settlement.verdicts.iter().map(|(seq, _)| *seq).collect();
        let batch = self.memory.open().get(&settlement.batch).cloned();
        let seqs: Vec<i64> =
            batch.iter().flat_map(|batch| &batch.messages).map(|claimed| claimed.seq).collect();
        if !seqs.is_empty() && names != seqs && self.breaks(Sabotage::CompletesSettlements) {
            let sent = || Verdict::Sent { ack_groups: Vec::new() };
            settlement.verdicts = seqs.into_iter().map(|seq| (seq, sent())).collect();
        }
        if !settlement.beside.is_empty() && self.breaks(Sabotage::ForgetsWhatIsBeside) {
            settlement.beside.clear();
        }
        // The real store knows its batch in the right order only.
        settlement.verdicts.sort_by_key(|(seq, _)| *seq);
        for (_, verdict) in &mut settlement.verdicts {
            match verdict {
                Verdict::Failed { hold, retry_after, .. } => {
                    self.hold(hold);
                    if self.breaks(Sabotage::ShortensWaits) {
                        *retry_after = Duration::ZERO;
                    }
                }
                Verdict::Postponed { wait } if self.breaks(Sabotage::ShortensWaits) => *wait = Duration::ZERO,
                Verdict::Dead { hold, .. } => self.hold(hold),
                Verdict::Sent { .. } | Verdict::Postponed { .. } | Verdict::Released { .. } => {}
            }
        }
        settlement
    }

    fn hold(&self, hold: &mut bool) {
        if self.breaks(Sabotage::ForgetsHolds) {
            *hold = false;
        }
        if self.breaks(Sabotage::HoldsAlways) {
            *hold = true;
        }
    }

    fn order(&self, mut order: ClaimOrder) -> ClaimOrder {
        if self.breaks(Sabotage::ClaimsForAnybody)
            && let Some((_, leases)) = self.memory.leases().last()
        {
            order.leases.clone_from(leases);
        }
        if self.breaks(Sabotage::IgnoresLimits) {
            (order.limit, order.bytes) = (usize::MAX, usize::MAX);
        }
        let open: HashSet<Lease> = self.memory.open().values().map(|batch| batch.lease).collect();
        if !open.is_empty() && self.breaks(Sabotage::ShutsLanes) {
            order.leases.retain(|lease| !open.contains(lease));
        }
        let (all, hold) = (self.breaks(Sabotage::IgnoresTake), self.breaks(Sabotage::HoldsAlways));
        let mixed = self.breaks(Sabotage::MixesChannels);
        let rule = Arc::clone(&order.rule);
        order.rule = Arc::new(move |topic| {
            let rule = rule(topic);
            TopicRule {
                channel: if mixed { 0 } else { rule.channel },
                take: if all { usize::MAX } else { rule.take },
                hold_failed: hold || rule.hold_failed,
                hold_dead: hold || rule.hold_dead,
            }
        });
        order
    }
}
