//! Faults that can be planted in the protocol, to show that each would be found.

use super::bounds::Bounds;

/// One fault of a relay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Bug {
    /// The claims of others are read before the own is written.
    ClaimWrittenAfterReading,
    /// Of those who claimed the lane before, only the last is fenced.
    OnlyTheLatestIsFenced,
    /// Notes of others are read, and nobody is fenced.
    NobodyIsFenced,
    /// A sender's note is read before it is fenced.
    NoteReadBeforeFencing,
    /// A relay takes the claims of its own former senders for its own.
    OwnFormerClaimsIgnored,
    /// A note names only what is sent with it.
    NoteWithoutTheOpen,
    /// The claim of a former sender is removed while what it left is not settled.
    FormerClaimRemovedEarly,
    /// A lane is given back while something of it is open.
    ReleasedWhileOpen,
    /// Messages are sent under a claim that was withdrawn.
    WithdrawnClaimStaysGood,
    /// Nobody waits until a claim is really withdrawn: that may come when the same sender has claimed the lane again.
    WithdrawalComesLate,
    /// A note is removed when its sender has none of the lanes left that it had before it was fenced.
    NoteRemovedEarly,
    /// A sender goes on although nobody knows how its last transaction ended.
    UnknownEndKeepsTheSender,
    /// What could not be settled is forgotten.
    FencedSettlementForgets,
    /// Nobody asks whether the batch in hand was settled by others.
    BatchNotAskedFor,
    /// The store is asked about the batch in hand before others are fenced.
    BatchAskedForBeforeFencing,
}

impl Bug {
    /// All of them.
    pub const ALL: [Self; 15] = [
        Self::ClaimWrittenAfterReading,
        Self::OnlyTheLatestIsFenced,
        Self::NobodyIsFenced,
        Self::NoteReadBeforeFencing,
        Self::OwnFormerClaimsIgnored,
        Self::NoteWithoutTheOpen,
        Self::FormerClaimRemovedEarly,
        Self::ReleasedWhileOpen,
        Self::WithdrawnClaimStaysGood,
        Self::WithdrawalComesLate,
        Self::NoteRemovedEarly,
        Self::UnknownEndKeepsTheSender,
        Self::FencedSettlementForgets,
        Self::BatchNotAskedFor,
        Self::BatchAskedForBeforeFencing,
    ];

    /// The bounds within which it shows.
    pub fn bounds(self) -> Bounds {
        match self {
            Self::ReleasedWhileOpen | Self::WithdrawnClaimStaysGood | Self::WithdrawalComesLate => {
                Bounds::RELEASED
            }
            Self::NoteWithoutTheOpen | Self::FencedSettlementForgets => Bounds::TWO_LANES,
            Self::NoteRemovedEarly => Bounds::AHEAD,
            _ => Bounds::TAKEOVER,
        }
    }
}
