//! The protocols within small bounds, every state of them, and every planted fault.

use proof::model::{Bounds, Bug, always_ends, exact, explore, hunt};

#[test]
fn no_order_of_events_breaks_a_promise() {
    for bounds in Bounds::SMALL {
        let explored = explore(bounds, 2);
        assert!(explored.is_sound(), "{explored}");
    }
}

#[test]
fn without_faults_nobody_walks_in_circles() {
    for bounds in Bounds::SMALL {
        let states = always_ends(bounds).unwrap_or_else(|world| panic!("{}: {world:#?}", bounds.name));
        assert!(states > 1_000, "only {states} states of `{}` were looked at", bounds.name);
    }
}

#[test]
fn every_seeded_bug_is_caught() {
    for bug in Bug::ALL {
        let (_, steps) = hunt(bug).unwrap_or_else(|| panic!("nobody notices {bug:?}"));
        assert!(!steps.is_empty(), "the world of {bug:?} is broken from the start");
    }
}

#[test]
fn no_order_of_events_puts_a_message_into_the_log_twice() {
    for bounds in exact::Bounds::SMALL {
        let explored = exact::explore(bounds, 2);
        assert!(explored.is_sound(), "{explored}");
    }
}

#[test]
fn without_faults_everything_gets_into_the_log() {
    for bounds in exact::Bounds::SMALL {
        let states = exact::always_ends(bounds).unwrap_or_else(|world| panic!("{}: {world:#?}", bounds.name));
        assert!(states > 1_000, "only {states} states of `{}` were looked at", bounds.name);
    }
}

#[test]
fn every_seeded_bug_of_exactly_once_is_caught() {
    for bug in exact::Bug::ALL {
        let (_, steps) = exact::hunt(bug).unwrap_or_else(|| panic!("nobody notices {bug:?}"));
        assert!(!steps.is_empty(), "the world of {bug:?} is broken from the start");
    }
}
