//! Removing what every group has acknowledged, and forgetting groups that will not come back.

use std::sync::Arc;
use std::time::Duration;

use redis::Value;

use super::Broker;
use super::entry::{number, text};
use super::error::{Error, receive as failed};
use super::script::{Call, Link, script};
use crate::ReceiveError;

script!(RETAIN: "retain.lua");
script!(FORGET: "forget.lua");

/// Between two looks at most: consumers of members that are gone are removed then too.
const SELDOM: Duration = Duration::from_secs(60);

/// Between two looks at least.
const OFTEN: Duration = Duration::from_secs(1);

/// Messages of one stream that are removed at once at most: Redis does nothing else meanwhile.
const LIMIT: i64 = 10_000;

/// Removes what is no longer kept, again and again.
pub(super) async fn keep(link: Arc<Link>, tag: String, retain: Duration) {
    loop {
        tokio::time::sleep((retain / 4).clamp(OFTEN, SELDOM)).await;
        if let Err(error) = sweep(&link, &tag, retain).await {
            tracing::debug!(?error, "old messages are still in Redis; trying again");
        }
    }
}

async fn sweep(link: &Link, tag: &str, retain: Duration) -> Result<(), Error> {
    let topics = link.query(redis::cmd("HKEYS").arg(format!("{tag}:topics"))).await?;
    let Value::Array(topics) = topics else { return Ok(()) };
    for topic in topics.into_iter().filter_map(text) {
        let mut call = Call::new(&RETAIN, tag);
        call.arg(topic).arg(u64::try_from(retain.as_millis()).unwrap_or(u64::MAX)).arg(LIMIT);
        while number(&link.invoke(&call).await?).is_some_and(|removed| removed >= LIMIT) {}
    }
    Ok(())
}

impl Broker {
    /// Removes now what every group has acknowledged and what was kept for long enough.
    ///
    /// # Errors
    /// When Redis is away or refuses.
    pub async fn sweep(&self) -> Result<(), ReceiveError> {
        let config = &self.inner.config;
        let swept = sweep(&self.inner.reader, &self.inner.tag, config.retain).await;
        swept.map_err(|error| failed(&error, &config.place()))
    }

    /// Forgets a group that will not come back, so that nothing is kept for it any more.
    ///
    /// # Errors
    /// When it has members at work, or Redis is away or refuses.
    pub async fn forget(&self, group: &str) -> Result<(), ReceiveError> {
        let mut call = Call::new(&FORGET, &self.inner.tag);
        call.arg(group);
        let answer = self.inner.reader.invoke(&call).await;
        let answer = answer.map_err(|error| failed(&error, &self.inner.config.place()))?;
        match number(&answer) {
            Some(0) => Ok(()),
            _ => Err(ReceiveError::Misconfigured(format!(
                "the consumer group `{group}` has members at work: stop them first"
            ))),
        }
    }
}
