//! Removing what has been kept long enough, a bounded number at a time.
//!
//! Records stand in the order in which they were written, so old ones are at the front: the first that is too young
//! ends the round. Those that must stay (somebody must acknowledge them, or waits for them) are passed over, and where
//! a round ended is remembered, so that they cannot stop it.

use std::sync::atomic::{AtomicI64, Ordering};

use super::RedisStore;
use super::script::script;
use super::settle::wait;
use crate::{Error, Retention};

/// Records looked at in one script.
const LOOK: usize = 100;

/// Scripts in one call, for each kind of record.
const ROUNDS: usize = 50;

/// Idempotency keys, and audit entries, forgotten in one call.
const FORGET: usize = 1_000;

script!(RECORDS: "prelude.lua", "hold.lua", "amend.lua", "retain.lua");
script!(OTHERS: "prelude.lua", "retain_others.lua");

/// How far retention has looked.
#[derive(Debug, Default)]
pub(super) struct Cleaned {
    sent: AtomicI64,
    dead: AtomicI64,
}

impl RedisStore {
    pub(super) async fn remove_old(&self, retention: &Retention) -> Result<u64, Error> {
        let mut call = self.script(&OTHERS);
        call.arg(wait(retention.keys)).arg(wait(retention.audit)).arg(FORGET);
        let others = self.read(&call).await?.total()?;
        let sent = self.remove_records("sent", wait(retention.sent), &self.cleaned.sent).await?;
        let dead = self.remove_records("dead", wait(retention.dead), &self.cleaned.dead).await?;
        Ok(others + sent + dead)
    }

    async fn remove_records(&self, kind: &str, keep: i64, cleaned: &AtomicI64) -> Result<u64, Error> {
        let mut removed = 0;
        for _ in 0..ROUNDS {
            let mut call = self.script(&RECORDS);
            call.arg(kind).arg(cleaned.load(Ordering::Relaxed)).arg(keep).arg(LOOK);
            let mut answer = self.read(&call).await?;
            removed += answer.total()?;
            let next = answer.number()?;
            cleaned.store(next, Ordering::Relaxed);
            if next == 0 {
                break;
            }
        }
        Ok(removed)
    }
}
