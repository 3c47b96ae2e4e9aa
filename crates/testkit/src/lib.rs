//! The contracts as tests: what every store and broker must keep true, run on each of them.
//!
//! A rule that is written on a trait is a case here. A backend joins with a fixture and one line
//! (`testkit::store_conformance!(Sqlite);`), and each case is also run against a saboteur that breaks its
//! rule on purpose: a case that does not notice proves nothing. Only ever a dev-dependency.

pub mod broker;
mod line;
mod rejection;
pub mod servers;
pub mod store;
pub mod versions;
mod wait;

pub use line::Line;
pub use wait::{eventually, until, within};
