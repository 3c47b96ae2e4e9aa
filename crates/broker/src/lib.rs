//! BROKER: where messages go, and where consumers get them.
//!
//! [`contract`] says in numbered rules what every broker's publisher and subscriber keep true; each backend is
//! a folder with the same files.

#[allow(dead_code, reason = "no backend uses all of it")]
mod address;
pub mod contract;
#[cfg(feature = "embedded")]
pub mod embedded;
#[cfg(feature = "wire")]
mod envelope;
#[cfg(feature = "http")]
pub mod http;
#[cfg(feature = "kafka")]
pub mod kafka;
#[cfg(feature = "nats")]
pub mod nats;
mod open;
#[allow(dead_code, reason = "no backend uses all of it")]
mod partition;
#[cfg(feature = "pubsub")]
pub mod pubsub;
#[cfg(feature = "rabbitmq")]
pub mod rabbitmq;
#[cfg(feature = "redis-streams")]
pub mod redis_streams;
#[cfg(feature = "sqs")]
pub mod sqs;
#[cfg(feature = "wire")]
#[allow(dead_code, reason = "no backend uses all of it")]
mod unfinished;

pub use address::{BadUrl, Secret};
pub use contract::*;
pub use open::{Abilities, Connected, Surroundings, Unopened, abilities, check, open};
