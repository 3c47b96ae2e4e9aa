//! The value that flows through Postrider and the rules of its life.
//!
//! Nothing here does I/O: stores, relays, models and simulations all call the same pure functions, so that
//! what a message may do is decided in exactly one place ([`step`]).

mod capability;
mod finding;
mod id;
mod message;
mod pattern;
mod retry;
mod schedule;
mod semantics;
mod state;

pub use capability::{CAPABILITY, Secrets, ShortSecret, prove};
pub use finding::{Finding, Health};
pub use id::{MessageId, NoSuchField};
pub use message::{Invalid, Limits, Message, check_group, check_topic};
pub use pattern::TopicPattern;
pub use retry::RetryPolicy;
pub use schedule::{DELIVER_AT, EXPIRES_AT, Schedule};
pub use semantics::{OnDead, Order, Semantics, UnknownSemantics};
pub use state::{Event, Next, Refused, State, Status, UnknownStatus, step};
