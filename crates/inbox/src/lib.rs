//! INBOX: receives messages, does the work of each once, and says so.
//!
//! A [`Group`] knows how one consumer group handles messages; a [`Consumer`] feeds it from a broker. The order of
//! the steps is what makes a crash harmless: the work and its mark are committed, then the producer hears of it,
//! then the broker may forget the message. A crash between any two of them brings the message again, and the mark
//! turns it into a duplicate that is acknowledged once more.
//!
//! Work that the store can do itself (`log`, `sql`) shares the transaction of the mark. Work outside (`http`,
//! `command`, closures) runs under a reservation: at least once, with an idempotency key that stays the same; once where it
//! makes the mark in a transaction of its own ([`Transact`]).
//!
//! A [`Transform`] is a group of another kind: its work is messages, and they are one transaction of the broker with what
//! they were made of.

mod acknowledge;
mod breaker;
mod consumer;
mod cost;
mod group;
mod handler;
mod housekeeping;
mod in_store;
mod reserved;
mod shares;
#[cfg(feature = "sqlx")]
pub mod sqlx;
mod status;
mod suspect;
mod transform;
mod worker;

pub use acknowledge::Acknowledge;
pub use consumer::{Consumer, Running};
pub use group::Group;
pub use handler::command::CommandHandler;
#[cfg(feature = "http")]
pub use handler::http::HttpHandler;
pub use handler::{BadHandler, Handle, Handler, Together, Transact, Verdict};
pub use status::{Condition, Monitor, Status};
pub use transform::{Maker, Transform};
