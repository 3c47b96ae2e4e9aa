//! A message in hand, and what the server is told of it.

use std::time::Duration;

use async_nats::client::Request;
use async_nats::{Client, Message, Subject};
use bytes::Bytes;
use futures::future::try_join_all;

use super::error::Trouble;
use super::link::connections;
use crate::Position;

/// Done.
pub(super) const ACK: &[u8] = b"+ACK";

/// To be delivered again, at once.
pub(super) const NAK: &[u8] = b"-NAK";

/// Still at work: not to be delivered again yet.
pub(super) const IN_PROGRESS: &[u8] = b"+WPI";

/// A message that came and is not finished.
#[derive(Clone, Debug)]
pub(super) struct Item {
    pub(super) position: Position,
    pub(super) message: Message,
    /// Where the server listens for what becomes of it.
    pub(super) reply: Subject,
    /// When it was stored, in nanoseconds since 1970.
    pub(super) stored_at: i64,
}

/// Tells the server the same of all `items`, which are in order, and waits until it has heard.
///
/// The server takes the words on one consumer in the order in which they were sent, so the answer to the last word on each
/// partition speaks for those before it, unless they were sent over different connections.
pub(super) async fn tell(
    client: &Client,
    items: &[Item],
    word: &'static [u8],
    timeout: Duration,
) -> Result<(), Trouble> {
    let number = connections(client);
    let mut last = Vec::new();
    for (place, item) in items.iter().enumerate() {
        let next = items.get(place + 1).map(|next| next.position.partition);
        if next == Some(item.position.partition) {
            let said = client.publish(item.reply.clone(), Bytes::from_static(word)).await;
            said.map_err(|error| Trouble::Away(error.to_string()))?;
        } else {
            last.push(item);
        }
    }
    try_join_all(last.into_iter().map(|item| ask(client, item, word, timeout))).await?;
    if connections(client) != number {
        try_join_all(items.iter().map(|item| ask(client, item, word, timeout))).await?;
    }
    Ok(())
}

async fn ask(client: &Client, item: &Item, word: &'static [u8], timeout: Duration) -> Result<(), Trouble> {
    let request = Request::new().payload(Bytes::from_static(word)).timeout(Some(timeout));
    let answer = client.send_request(item.reply.clone(), request).await;
    answer.map(drop).map_err(|error| Trouble::Away(format!("an acknowledgement was not confirmed: {error}")))
}
