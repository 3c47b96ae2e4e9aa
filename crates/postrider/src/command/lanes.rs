//! `lanes`: who works on what, and how many there are.

use admin::Desk;
use comfy_table::Cell;

use super::failure::Failure;
use super::output::{Output, moment, text};

/// All lanes.
pub(super) async fn show(desk: &Desk, output: &mut Output) -> Result<(), Failure> {
    let view = desk.lanes().await?;
    output.answer(&view, |output| {
        output.table(
            ["lane", "epoch", "in flight", "owner", "locked until"],
            view.lanes.iter().map(|lane| {
                [
                    Cell::new(lane.lane),
                    Cell::new(lane.epoch),
                    Cell::new(lane.in_flight),
                    text(lane.owner.as_deref()),
                    moment(lane.locked_until),
                ]
            }),
        )
    })
}

/// Another number of them.
pub(super) async fn set(desk: &Desk, count: u16, output: &mut Output) -> Result<(), Failure> {
    let answer = desk.set_lanes(count).await?;
    output.answer(&answer, |output| {
        output.line(match answer.in_force {
            true => format!("there are {count} lanes now"),
            false => format!("there will be {count} lanes as soon as the running relays have drained theirs"),
        })
    })
}
