//! Breaking the rules of Lanes.

use std::time::Duration;

use async_trait::async_trait;
use store::{Beat, Beaten, Error, Instance, LaneView, Lanes, Lease, Left};

use super::{Sabotage, Saboteur};

/// Longer than any case waits.
const FOREVER: Duration = Duration::from_secs(36_000);

#[async_trait]
impl Lanes for Saboteur {
    async fn beat(&self, beat: &Beat) -> Result<Beaten, Error> {
        let mut beat = beat.clone();
        if self.breaks(Sabotage::NeverEndsLeases) {
            beat.lease = FOREVER;
        }
        let mut beaten = self.store.beat(&beat).await?;
        let others: Vec<(Instance, Vec<Lease>)> = {
            let mut known = self.memory.leases();
            known.retain(|(instance, _)| *instance != beat.instance);
            let others = known.clone();
            known.push((beat.instance.clone(), beaten.held.clone()));
            others
        };
        if beat.take && beaten.held.is_empty() && self.breaks(Sabotage::StealsLanes) {
            for (other, _) in &others {
                self.store.leave(other).await?;
            }
            beaten = self.store.beat(&beat).await?;
        }
        if !others.is_empty() && self.breaks(Sabotage::HandsOutLanesTwice) {
            beaten.held.extend(others.into_iter().flat_map(|(_, leases)| leases));
        }
        if self.breaks(Sabotage::RepeatsEpochs) {
            beaten.held.iter_mut().for_each(|lease| lease.epoch = 1);
        }
        let lost: Vec<Lease> =
            beat.held.iter().filter(|lease| !beaten.held.contains(lease)).copied().collect();
        if !lost.is_empty() && self.breaks(Sabotage::RenewsAnything) {
            beaten.held.extend(lost);
        }
        if beaten.surplus > 0 && self.breaks(Sabotage::HidesSurplus) {
            beaten.surplus = 0;
        }
        Ok(beaten)
    }

    async fn release(&self, leases: &[Lease], left: Left) -> Result<(), Error> {
        if self.breaks(Sabotage::ReleasesNothing) {
            return Ok(());
        }
        let left = match left {
            Left::Untouched if self.breaks(Sabotage::BlamesLostAnswers) => Left::Unknown,
            Left::Unknown if self.breaks(Sabotage::ForgetsCrashes) => Left::Untouched,
            left => left,
        };
        self.store.release(leases, left).await
    }

    async fn leave(&self, instance: &Instance) -> Result<(), Error> {
        let busy = !self.memory.open().is_empty();
        if busy && self.breaks(Sabotage::ForgetsCrashes) {
            self.release_open().await?;
        }
        self.store.leave(instance).await
    }

    async fn lanes(&self) -> Result<Vec<LaneView>, Error> {
        self.store.lanes().await
    }

    async fn set_lanes(&self, count: u16) -> Result<bool, Error> {
        let in_force = self.store.set_lanes(count).await?;
        Ok(in_force || self.breaks(Sabotage::ResizesInWords))
    }
}
