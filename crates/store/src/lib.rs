//! STORE: where messages wait until they are sent, and where the inbox remembers what it has done.
//!
//! [`contract`] says in numbered rules what every store keeps true; each backend is a folder with the same
//! files. The application writes in its own transaction, relays lease lanes and claim batches, the inbox
//! marks what it handled, and operators look and mend: four callers, four traits.

mod audit;
mod column;
pub mod contract;
mod error;
mod forgetful;
#[cfg(feature = "hybrid")]
pub mod hybrid;
#[cfg(feature = "link")]
pub mod link;
#[cfg(feature = "mysql")]
pub mod mysql;
mod pick;
#[cfg(feature = "postgres")]
pub mod postgres;
#[cfg(feature = "redis")]
pub mod redis;
mod sent;
#[cfg(feature = "sqlite")]
pub mod sqlite;
#[cfg(any(feature = "sqlite", feature = "postgres", feature = "mysql"))]
mod statement;
#[cfg(any(feature = "sqlite", feature = "postgres", feature = "mysql", feature = "redis"))]
mod stuck;
mod tally;

pub use contract::*;
pub use error::Error;
pub use forgetful::Forgetful;
pub use sent::Sent;
