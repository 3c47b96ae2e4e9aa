//! Messages that go to another broker than the orders: they must not notice what happens to that one.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use message::{Message, Status};
use store::{NewMessage, Store};

/// Their topic. The embedded broker takes them.
pub(crate) const TOPIC: &str = "elsewhere";

/// Between two looks.
const PAUSE: Duration = Duration::from_millis(20);

/// What became of them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Watched {
    /// How many were written and sent.
    pub(crate) messages: u64,
    /// The longest that one took from its commit until it was seen as Sent.
    pub(crate) slowest: Duration,
}

/// Writes one message after another, each when the one before it is Sent, until the time is over.
pub(crate) async fn watch(store: &dyn Store, time: Duration) -> Result<Watched> {
    let (began, mut watched) = (Instant::now(), Watched::default());
    while began.elapsed() < time {
        let message = Message::new(TOPIC, "still here");
        let id = message.id;
        for appended in store.append(vec![NewMessage::from(message)]).await? {
            appended?;
        }
        let written = Instant::now();
        while store.record(id).await?.context("a message is gone")?.state.status != Status::Sent {
            tokio::time::sleep(PAUSE).await;
        }
        watched.messages += 1;
        watched.slowest = watched.slowest.max(written.elapsed());
    }
    Ok(watched)
}
