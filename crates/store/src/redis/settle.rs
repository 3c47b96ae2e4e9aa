//! Saying what became of batches: the arguments of the script that writes it.
//!
//! The script looks at all settlements before it writes any: one that comes too late changes nothing, and one that
//! does not name its whole batch stops the turn.

use std::time::Duration;

use super::append;
use super::script::Call;
use crate::column::{HISTORY, clip, groups_json, millis};
use crate::{NewMessage, Settlement, Verdict};

/// The longest wait there is: past any, and still a number that Lua can count with and print.
const LONGEST: i64 = 9_000_000_000_000;

/// A duration as scripts take it.
pub(super) fn wait(duration: Duration) -> i64 {
    millis(duration).min(LONGEST)
}

pub(super) fn settlements(call: &mut Call<'_>, settlements: &[Settlement]) {
    call.arg(HISTORY).arg(settlements.len());
    for Settlement { batch, lease, verdicts, beside } in settlements {
        call.arg(lease.lane).arg(lease.epoch).arg(lease.id.to_string()).arg(batch.to_string());
        call.arg(verdicts.len());
        for (seq, verdict) in verdicts {
            call.arg(*seq);
            write(call, verdict);
        }
        call.arg(beside.len());
        for message in beside {
            append::write(call, &NewMessage::from(message.clone()));
        }
    }
}

fn write(call: &mut Call<'_>, verdict: &Verdict) {
    match verdict {
        Verdict::Sent { ack_groups } => call.arg("sent").arg(groups_json(ack_groups)),
        Verdict::Failed { error, retry_after, hold } => {
            call.arg("failed").arg(clip(error)).arg(wait(*retry_after)).flag(*hold)
        }
        Verdict::Dead { reason, error, attempted, hold } => {
            call.arg("dead").arg(reason).arg(clip(error)).flag(*attempted).flag(*hold)
        }
        Verdict::Postponed { wait: later } => call.arg("postponed").arg(wait(*later)),
        Verdict::Released { error: Some(error) } => call.arg("tried").arg(clip(error)),
        Verdict::Released { error: None } => call.arg("released"),
    };
}
