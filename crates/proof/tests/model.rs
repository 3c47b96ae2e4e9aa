//! The protocol within small bounds, every state of it, and every planted fault.

use proof::model::{Bounds, Bug, explore, hunt};

#[test]
fn no_order_of_events_breaks_a_promise() {
    for bounds in Bounds::SMALL {
        let explored = explore(bounds, 2);
        println!("{explored}");
        assert!(explored.violations.is_empty() && explored.unseen.is_empty(), "{explored}");
    }
}

#[test]
fn every_seeded_bug_is_caught() {
    for bug in Bug::ALL {
        let (property, steps) = hunt(bug).unwrap_or_else(|| panic!("nobody notices {bug:?}"));
        println!("{bug:?}: {} steps: {property}", steps.len());
    }
}
