//! Shows that what Postrider promises holds, with commands that anyone can run.
//!
//! A **worker** process runs the whole arrow (application, relay, broker, inbox) on real files. A **nemesis**
//! kills it, again and again, or lets it crash at a named point. A **checker** then reads nothing but the
//! database: what the application committed against what the handler did.

pub mod check;
pub mod model;
pub mod nemesis;
pub mod worker;
