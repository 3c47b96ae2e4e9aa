//! Reliable message delivery for services that write to a database and must tell others about it.
//!
//! Business change and message are written in one transaction of your own database. A relay carries the message to
//! a broker, a consumer does its work once, and a person can see and mend what went wrong:
//!
//! ```text
//!   your transaction ──► outbox ──► relay ──► broker ──► inbox ──► handler's transaction
//! ```
//!
//! This crate is all that a service needs to depend on. The parts are crates of their own and are re-exported here:
//!
//! - [`Message`] is what flows. [`sqlite::append`] writes one with rusqlite, and `sqlite::sqlx::append` (feature
//!   `sqlx`) inside a transaction of your sqlx pool; plain `INSERT INTO outbox_events (topic, payload)` does too.
//! - [`Relay`] takes messages from a [`SqliteStore`] and publishes them by [`Route`]s to a [`Publisher`], such as the
//!   [`embedded`] broker or one of [`broker`].
//! - [`Consumer`] feeds a [`Group`] from a [`Subscriber`]. Its [`Handler`] is a closure, SQL, a URL or a program; with
//!   the feature `sqlx`, a `Transactional` closure does its work in one transaction with the mark that says so.
//! - [`Transform`] is a group whose [`Maker`] answers each message with messages: on Kafka, those and how far the group is
//!   are one transaction.
//!
//! # The whole arrow in one program
//!
//! `cargo run --example first_outbox --features sqlx` runs this and ends:
//!
//! ```no_run
#![cfg_attr(feature = "sqlx", doc = include_str!("../examples/first_outbox.rs"))]
#![cfg_attr(not(feature = "sqlx"), doc = "// examples/first_outbox.rs: it needs the feature `sqlx`.")]
//! ```

pub use broker::{Publisher, Subscriber};
pub use inbox::{Acknowledge, Consumer, Group, Handle, Handler, Maker, Transform};
pub use message::{Message, MessageId, OnDead, Order, RetryPolicy, Semantics, Status, TopicPattern};
pub use relay::{Relay, Route, Settings};
pub use store::{Append, Arrival, Handled, InboxRules, NewMessage, Store};

/// Every broker of this build: [`broker::open`] gives one for a URL.
pub use broker;
#[cfg(feature = "embedded")]
pub use broker::embedded;
#[cfg(feature = "sqlx")]
pub use inbox::sqlx::{Permanent, Transactional};
#[cfg(feature = "mysql")]
pub use store::mysql::{self, MysqlStore};
#[cfg(feature = "postgres")]
pub use store::postgres::{self, PostgresStore};
#[cfg(feature = "redis")]
pub use store::redis::{self, RedisStore};
#[cfg(feature = "sqlite")]
pub use store::sqlite::{self, SqliteStore};
