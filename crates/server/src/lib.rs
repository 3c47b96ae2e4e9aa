//! SERVER: the HTTP skin over the desk: two APIs, an overview page and metrics. What groups say to a producer by HTTP they
//! may say in a topic too, and [`listen`] hears it.
//!
//! Handlers read, call [`admin::Desk`] and write; what a request means is decided there. What is decided here is
//! only what HTTP adds: statuses, problems as JSON, limits, and who may call a listener that has no tokens.

mod assets;
mod body;
mod consumer;
mod frame;
mod guard;
mod health;
mod hearing;
mod live;
mod metrics;
mod problem;
mod producer;
mod query;
mod serve;

pub use consumer::{Consumer, consumer};
pub use guard::Hosts;
pub use health::{
    AllOverdue, AllTransactions, Component, FlowView, Flows, Health, HealthView, Lost, Overdue,
    TransactionsView,
};
pub use hearing::{Hearing, listen};
pub use problem::ProblemView;
pub use producer::{Producer, producer};
pub use serve::serve;
