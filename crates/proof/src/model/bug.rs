//! Faults that can be planted in the models, to show that each would be found.

use super::bounds::Bounds;

/// One fault of the store or the relay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Bug {
    /// A batch is recognised by its messages, whoever took them.
    SettleIgnoresTheEpoch,
    /// A settlement closes whatever batch is open under its lease.
    SettleIgnoresTheBatch,
    /// A released lane starts again at the first epoch.
    ReleaseResetsTheEpoch,
    /// A lane changes hands under the same epoch.
    TakeKeepsTheEpoch,
    /// A lane is taken from an owner whose lease has not run out.
    TakeIgnoresTheLease,
    /// A new owner leaves the batches of the old one as they are.
    OrphansStayOpen,
    /// A new owner resolves one batch of the old one, and leaves the others.
    OrphansOneBatch,
    /// A relay that lost its lane still opens batches on it.
    ClaimIgnoresTheLease,
    /// A second batch of a topic is opened on a lane.
    ClaimIgnoresTheOpenBatch,
    /// A message that has brought relays down travels with others.
    NobodyTravelsAlone,
    /// The relay says Sent before it has sent.
    SentBeforeItIsPublished,
    /// The relay takes silence for consent.
    NoAnswerIsSent,
    /// The relay goes on renewing a lane on which a claim may have been committed that it never heard of.
    UnansweredClaimKeepsTheLane,
    /// What was claimed without an answer counts as left by a crash.
    UnansweredClaimIsACrash,
    /// Operators may change a message that a relay holds.
    AmendIgnoresTheFlight,
    /// Followers are claimed past a held message.
    ClaimIgnoresTheHold,
    /// A drain lets go the newest followers first.
    DrainNewestFirst,
    /// While older followers are let go, newer messages pass them.
    DrainLetsNewerPass,
    /// A drain lets go a follower that is itself in trouble.
    DrainIgnoresTrouble,
    /// The first step of a drain removes the hold.
    HoldRemovedEarly,
    /// Requeueing a message removes its hold.
    RequeueDropsTheHold,
    /// A removed message goes on holding its key.
    RemovedStillHolds,
    /// Of two messages in trouble the later one holds the key.
    LatestTroubleHolds,
    /// A message that is Dead because relays died does not hold its key.
    OrphanedDeadHoldsNobody,
    /// After a failure the later messages of the key in the same batch are sent.
    PublishesPastAFailure,
}

impl Bug {
    /// All of them.
    pub const ALL: [Self; 25] = [
        Self::SettleIgnoresTheEpoch,
        Self::SettleIgnoresTheBatch,
        Self::ReleaseResetsTheEpoch,
        Self::TakeKeepsTheEpoch,
        Self::TakeIgnoresTheLease,
        Self::OrphansStayOpen,
        Self::OrphansOneBatch,
        Self::ClaimIgnoresTheLease,
        Self::ClaimIgnoresTheOpenBatch,
        Self::NobodyTravelsAlone,
        Self::SentBeforeItIsPublished,
        Self::NoAnswerIsSent,
        Self::UnansweredClaimKeepsTheLane,
        Self::UnansweredClaimIsACrash,
        Self::AmendIgnoresTheFlight,
        Self::ClaimIgnoresTheHold,
        Self::DrainNewestFirst,
        Self::DrainLetsNewerPass,
        Self::DrainIgnoresTrouble,
        Self::HoldRemovedEarly,
        Self::RequeueDropsTheHold,
        Self::RemovedStillHolds,
        Self::LatestTroubleHolds,
        Self::OrphanedDeadHoldsNobody,
        Self::PublishesPastAFailure,
    ];

    /// The bounds within which it shows.
    pub fn bounds(self) -> Bounds {
        match self {
            Self::NobodyTravelsAlone => Bounds::CRASHES,
            Self::OrphansOneBatch => Bounds::TWO_CHANNELS,
            Self::OrphanedDeadHoldsNobody => Bounds::CRASHES_IN_ORDER,
            Self::LatestTroubleHolds | Self::DrainIgnoresTrouble => Bounds::SKIP,
            Self::DrainLetsNewerPass => Bounds::DRAIN,
            Self::UnansweredClaimIsACrash => Bounds::CHANNELS_IN_ORDER,
            Self::ReleaseResetsTheEpoch | Self::AmendIgnoresTheFlight => Bounds::MENDED,
            Self::ClaimIgnoresTheHold
            | Self::DrainNewestFirst
            | Self::HoldRemovedEarly
            | Self::RequeueDropsTheHold
            | Self::RemovedStillHolds
            | Self::PublishesPastAFailure => Bounds::HOLD,
            _ => Bounds::TAKEOVER,
        }
    }
}
