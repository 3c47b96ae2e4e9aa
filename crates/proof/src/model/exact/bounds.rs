//! How much of everything there is.

/// What can go wrong in one run, each at most so often.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Faults {
    /// Relays that die and start again with an empty memory.
    pub crashes: u8,
    /// Leases that run out although their owner lives.
    pub pauses: u8,
    /// Claims that are written by a relay that does not know that its lease is over.
    pub blind: u8,
    /// Commits and settlements whose answer does not come.
    pub lost: u8,
    /// Transactions that are aborted.
    pub aborts: u8,
    /// Lanes that are given back.
    pub releases: u8,
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
    /// The lane of each message.
    pub messages: &'static [u8],
    /// Messages of a batch, at most.
    pub batch: u8,
    /// Whether a relay claims a lane before it has a batch of it.
    pub ahead: bool,
    /// What may go wrong, and how often.
    pub faults: Faults,
}

const NONE: Faults = Faults { crashes: 0, pauses: 0, blind: 0, lost: 0, aborts: 0, releases: 0 };

impl Bounds {
    /// Two relays and one message whose lane changes hands; crashes, pauses and lost answers.
    pub const TAKEOVER: Self = Self {
        name: "takeover",
        relays: 2,
        lanes: 1,
        messages: &[0],
        batch: 1,
        ahead: false,
        faults: Faults { crashes: 1, pauses: 1, blind: 1, lost: 1, ..NONE },
    };

    /// Two messages, one behind the other, while lanes are given back.
    pub const RELEASED: Self = Self {
        name: "released",
        messages: &[0, 0],
        batch: 2,
        faults: Faults { crashes: 1, pauses: 1, releases: 1, ..NONE },
        ..Self::TAKEOVER
    };

    /// Messages of two lanes in one transaction.
    pub const TWO_LANES: Self = Self {
        name: "two lanes",
        lanes: 2,
        messages: &[0, 1],
        faults: Faults { pauses: 1, ..NONE },
        ..Self::TAKEOVER
    };

    /// One message, and a second lane that moves for no reason.
    pub const AHEAD: Self = Self {
        name: "claimed ahead",
        messages: &[1],
        ahead: true,
        faults: Faults { pauses: 1, lost: 1, ..NONE },
        ..Self::TWO_LANES
    };

    /// Three relays after one lane.
    pub const THREE_RELAYS: Self =
        Self { name: "three relays", relays: 3, faults: Faults { pauses: 2, ..NONE }, ..Self::TAKEOVER };

    /// What the tests explore.
    pub const SMALL: [Self; 5] =
        [Self::TAKEOVER, Self::RELEASED, Self::TWO_LANES, Self::AHEAD, Self::THREE_RELAYS];

    /// What the command explores.
    pub const LARGE: [Self; 6] = [
        Self {
            name: "takeover, every fault",
            messages: &[0, 0],
            batch: 2,
            faults: Faults { crashes: 1, pauses: 1, blind: 1, lost: 1, aborts: 1, releases: 1 },
            ..Self::TAKEOVER
        },
        Self { name: "takeover, claimed ahead", messages: &[0, 0], ahead: true, ..Self::TAKEOVER },
        Self {
            name: "takeover, three messages",
            messages: &[0, 0, 0],
            batch: 2,
            faults: Faults { crashes: 1, pauses: 2, blind: 1, ..NONE },
            ..Self::TAKEOVER
        },
        Self {
            name: "two lanes, a crash",
            faults: Faults { crashes: 1, pauses: 1, ..NONE },
            ..Self::TWO_LANES
        },
        Self {
            name: "two lanes, three messages",
            messages: &[0, 1, 0],
            batch: 2,
            faults: Faults { pauses: 1, blind: 1, ..NONE },
            ..Self::TWO_LANES
        },
        Self {
            name: "three relays, a lost answer",
            faults: Faults { pauses: 2, blind: 1, lost: 1, ..NONE },
            ..Self::THREE_RELAYS
        },
    ];
}
