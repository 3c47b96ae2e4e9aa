//! The HTTP listeners on a real store: every endpoint, and every mistake a caller can make.

mod consumer;
mod dead;
mod description;
mod look;
mod metrics;
mod page;
mod refusals;
mod send;
mod serve;
mod service;
