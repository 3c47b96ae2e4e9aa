//! How much of everything a model has: small enough to look at every state there is.

use super::relay::Outcome;

/// Messages and lanes that a model can have.
pub(super) const MOST: usize = 5;

/// What can go wrong in one run, each at most so often.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Faults {
    /// Relays that die and start again with an empty memory.
    pub crashes: u8,
    /// Leases that run out although their owner lives: it was paused, or could not renew.
    pub pauses: u8,
    /// Transactions that were committed and whose answer was lost.
    pub lost: u8,
    /// Publications that do not end well.
    pub failures: u8,
    /// Lanes that are given back.
    pub releases: u8,
    /// Messages that an operator requeues, discards or deletes.
    pub mends: u8,
}

/// The size of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Bounds {
    /// For people.
    pub name: &'static str,
    /// Relays.
    pub relays: u8,
    /// Lanes.
    pub lanes: u8,
    /// Brokers, each with a topic of its own. A key belongs to one of them.
    pub channels: u8,
    /// The key of each message, in the order of writing.
    pub keys: &'static [u8],
    /// Messages that are there at the start; the others are written at any time.
    pub written: u8,
    /// Messages of a batch, at most.
    pub batch: u8,
    /// Whether a failed message holds its key back: the route keeps each key in order.
    pub ordered: bool,
    /// Whether a Dead one does too.
    pub hold_dead: bool,
    /// Attempts of a message.
    pub max_attempts: u32,
    /// What may go wrong, and how often.
    pub faults: Faults,
    /// In which ways a publication may not end well.
    pub trouble: &'static [Outcome],
}

const NONE: Faults = Faults { crashes: 0, pauses: 0, lost: 0, failures: 0, releases: 0, mends: 0 };

impl Bounds {
    /// Two relays and one lane that changes hands; crashes, pauses and lost answers.
    pub const TAKEOVER: Self = Self {
        name: "takeover",
        relays: 2,
        lanes: 1,
        channels: 1,
        keys: &[0, 0],
        written: 2,
        batch: 2,
        ordered: false,
        hold_dead: false,
        max_attempts: 2,
        faults: Faults { crashes: 1, pauses: 1, lost: 1, failures: 1, ..NONE },
        trouble: &[Outcome::Unconfirmed, Outcome::Unreachable],
    };

    /// The same while lanes are given back and operators mend what they see.
    pub const MENDED: Self = Self {
        name: "mended",
        faults: Faults { pauses: 1, failures: 1, releases: 1, mends: 2, ..NONE },
        trouble: &[Outcome::Rejected],
        ..Self::TAKEOVER
    };

    /// Two relays that share two lanes.
    pub const TWO_LANES: Self = Self {
        name: "two lanes",
        lanes: 2,
        keys: &[0, 1],
        faults: Faults { pauses: 1, failures: 1, ..NONE },
        trouble: &[Outcome::Unconfirmed],
        ..Self::TAKEOVER
    };

    /// One lane with messages for two brokers, each on its way by itself, while the lane changes hands.
    pub const TWO_CHANNELS: Self = Self {
        name: "two channels",
        channels: 2,
        keys: &[0, 1],
        faults: Faults { crashes: 1, pauses: 1, failures: 1, ..NONE },
        trouble: &[Outcome::Unconfirmed],
        ..Self::TAKEOVER
    };

    /// Two brokers on one lane, each key in order, while answers are lost and lanes are given back.
    pub const CHANNELS_IN_ORDER: Self = Self {
        name: "channels in order",
        relays: 1,
        channels: 2,
        keys: &[0, 1, 0, 1],
        written: 4,
        faults: Faults { lost: 1, failures: 2, releases: 1, ..NONE },
        trouble: &[Outcome::Deferred],
        ..Self::HOLD
    };

    /// Three relays after one lane, each a while too slow.
    pub const THREE_RELAYS: Self = Self {
        name: "three relays",
        relays: 3,
        faults: Faults { pauses: 2, failures: 1, ..NONE },
        trouble: &[Outcome::Unconfirmed],
        ..Self::TAKEOVER
    };

    /// Relays that die until a message is quarantined for it.
    pub const CRASHES: Self = Self {
        name: "crashes",
        relays: 1,
        faults: Faults { crashes: 5, failures: 1, ..NONE },
        trouble: &[Outcome::Deferred],
        ..Self::TAKEOVER
    };

    /// One key in order; a Dead message holds it until a person decides.
    pub const HOLD: Self = Self {
        name: "hold",
        relays: 1,
        keys: &[0, 0, 0, 0],
        written: 2,
        batch: 3,
        ordered: true,
        hold_dead: true,
        faults: Faults { failures: 3, mends: 2, ..NONE },
        trouble: &[Outcome::Deferred, Outcome::Rejected, Outcome::Unreachable],
        ..Self::TAKEOVER
    };

    /// One key in order; a Dead message lets the later ones pass.
    pub const SKIP: Self = Self {
        name: "skip",
        hold_dead: false,
        trouble: &[Outcome::Deferred, Outcome::Rejected],
        ..Self::HOLD
    };

    /// A queue behind one message, long enough to be let go in several turns while newer ones arrive.
    pub const DRAIN: Self = Self {
        name: "drain",
        keys: &[0, 0, 0, 0, 0],
        written: 3,
        batch: 5,
        faults: Faults { failures: 2, mends: 1, ..NONE },
        ..Self::HOLD
    };

    /// Two keys on one lane: a key in trouble must not trouble the other.
    pub const TWO_KEYS: Self = Self {
        name: "two keys",
        keys: &[0, 1, 0, 1],
        written: 4,
        faults: Faults { failures: 2, mends: 2, ..NONE },
        ..Self::HOLD
    };

    /// One key in order while its lane changes hands.
    pub const ORDERED_TAKEOVER: Self = Self {
        name: "ordered takeover",
        relays: 2,
        keys: &[0, 0, 0],
        written: 3,
        batch: 2,
        faults: Faults { pauses: 1, failures: 1, mends: 1, ..NONE },
        trouble: &[Outcome::Deferred, Outcome::Rejected],
        ..Self::HOLD
    };

    /// A message that brings relays down holds its key when it is quarantined.
    pub const CRASHES_IN_ORDER: Self = Self {
        name: "crashes in order",
        keys: &[0, 0],
        written: 2,
        faults: Faults { crashes: 5, failures: 1, mends: 1, ..NONE },
        trouble: &[Outcome::Deferred],
        ..Self::HOLD
    };

    /// What the tests explore.
    pub const SMALL: [Self; 13] = [
        Self::TAKEOVER,
        Self::MENDED,
        Self::TWO_LANES,
        Self::TWO_CHANNELS,
        Self::CHANNELS_IN_ORDER,
        Self::THREE_RELAYS,
        Self::CRASHES,
        Self::HOLD,
        Self::SKIP,
        Self::DRAIN,
        Self::TWO_KEYS,
        Self::ORDERED_TAKEOVER,
        Self::CRASHES_IN_ORDER,
    ];

    /// What the command explores.
    pub const LARGE: [Self; 7] = [
        Self {
            name: "takeover, every fault",
            faults: Faults { crashes: 1, pauses: 1, lost: 1, failures: 1, releases: 1, mends: 1 },
            trouble: &Outcome::TROUBLE,
            ..Self::TAKEOVER
        },
        Self {
            name: "takeover, three messages",
            keys: &[0, 0, 0],
            written: 3,
            faults: Faults { crashes: 1, pauses: 2, lost: 1, failures: 1, ..NONE },
            ..Self::TAKEOVER
        },
        Self {
            name: "two lanes, two pauses",
            keys: &[0, 1, 0],
            written: 3,
            faults: Faults { pauses: 2, failures: 1, ..NONE },
            ..Self::TWO_LANES
        },
        Self {
            name: "three relays, a crash and a lost answer",
            faults: Faults { crashes: 1, pauses: 2, lost: 1, failures: 1, ..NONE },
            ..Self::THREE_RELAYS
        },
        Self {
            name: "hold, four failures",
            keys: &[0, 0, 0, 0, 0],
            faults: Faults { failures: 4, mends: 3, ..NONE },
            ..Self::HOLD
        },
        Self {
            name: "skip, four failures",
            keys: &[0, 0, 0, 0, 0],
            faults: Faults { failures: 4, mends: 3, ..NONE },
            ..Self::SKIP
        },
        Self {
            name: "ordered takeover, every fault",
            faults: Faults { crashes: 1, pauses: 1, lost: 1, failures: 2, releases: 0, mends: 1 },
            ..Self::ORDERED_TAKEOVER
        },
    ];
}
