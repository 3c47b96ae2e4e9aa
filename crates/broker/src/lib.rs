//! BROKER: where messages go, and where consumers get them.
//!
//! [`contract`] says in numbered rules what every broker's publisher and subscriber keep true; each backend is
//! a folder with the same files.

pub mod contract;
#[cfg(feature = "embedded")]
pub mod embedded;

pub use contract::*;
