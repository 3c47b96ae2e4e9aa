//! What becomes of a record once its message is sent.

/// What becomes of a record once its message is sent and nobody must acknowledge it any more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sent {
    /// It stays until its retention is over.
    #[default]
    Keep,
    /// It is deleted with the settlement.
    Delete,
    /// It stays in a partition of the table that is dropped as a whole when its retention is over.
    Partition,
}
