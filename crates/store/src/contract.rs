//! What every store keeps true, as numbered rules. Each rule is a case of the conformance suite.
//!
//! Time is always the store's own clock: durations go in, and deadlines are computed and compared inside.

mod append;
mod claim;
mod inbox;
mod inspect;
mod lanes;

pub use append::{Append, Appended, NewMessage, Once, Turned};
pub use claim::{Batch, BatchId, Claim, ClaimOrder, Claimed, Settlement, TopicRule, Turn, Verdict};
pub use inbox::{
    Arrival, Handled, Inbox, InboxCounts, InboxRules, Parked, Processed, Receipt, Remembered, Reservation,
    Work,
};
pub use inspect::{
    Acknowledged, Acknowledgement, Amend, Attempt, AuditEntry, Counts, Edit, Filter, Hold, Inspect, Latency,
    Page, Paged, Record, Retention,
};
pub use lanes::{Beat, Beaten, Instance, LaneView, Lanes, Lease, Left};

/// Everything a store can do, for callers that need several of its roles.
pub trait Store: Append + Lanes + Claim + Inbox + Inspect + Amend {}

impl<T: Append + Lanes + Claim + Inbox + Inspect + Amend> Store for T {}

/// The place of a message in its store: rising in the order of writing, assigned by the store.
pub type Seq = i64;
