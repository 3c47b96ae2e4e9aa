//! A transforming group that dies at each step between receiving and committing.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod kafka_place;

use fail::FailScenario;
use kafka_place::{Place, billing};

const POINTS: [&str; 7] = [
    "inbox::transform_received",
    "inbox::transform_made",
    "kafka::finish_begun",
    "kafka::finish_sent",
    "kafka::finish_offsets",
    "kafka::finish_committed",
    "inbox::transform_finished",
];

#[tokio::test(flavor = "multi_thread")]
async fn whatever_step_it_dies_at_each_order_has_one_bill() {
    let scenario = FailScenario::setup();
    let place = Place::new(2);
    let mut orders = 0;
    for point in POINTS {
        fail::cfg(point, "1*panic->off").unwrap();
        place.order(orders..orders + 100).await;
        orders += 100;
        let running = place.start(billing());
        place.check(orders).await;
        // Received more than once proves that it died: only the last two leave nothing to do again.
        if !["kafka::finish_committed", "inbox::transform_finished"].contains(&point) {
            assert!(running.status().received > 100, "{point}");
        }
        running.drain().await;
        fail::remove(point);
    }
    scenario.teardown();
}
