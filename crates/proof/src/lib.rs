//! Shows that what Postrider promises holds, with commands that anyone can run.
//!
//! A **worker** process runs the whole arrow, or parts of it: an application (the **shop**), relay, broker, inbox, on
//! a real store and on **ground** of its own. A **nemesis** kills it, stops it, changes its clock or lets it crash at a
//! named point, as its **scenario** says. A **checker** then reads nothing but databases and the relays' append-only
//! **trails**: what the application committed against what the handler did.

pub mod check;
mod elsewhere;
pub mod ground;
mod listener;
mod log;
pub mod model;
pub mod nemesis;
mod receiver;
pub mod scenario;
mod server;
pub mod shop;
pub mod trail;
mod unsteady;
pub mod worker;
