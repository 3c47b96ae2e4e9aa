//! The cases: each a sentence that is true of every store.

pub mod amend;
pub mod append;
pub mod claim;
pub mod inbox;
pub mod inspect;
pub mod lanes;
pub mod order;
pub mod parked;

use std::sync::Arc;
use std::time::Duration;

use message::{Message, MessageId, State};
use store::{Appended, NewMessage, Page, Record, Store};

/// Long enough for anything that happens at all.
const PATIENCE: Duration = Duration::from_secs(5);

/// Far beyond the end of any case.
const HOUR: Duration = Duration::from_secs(3_600);

/// A whole list, oldest first.
const ALL: Page = Page { after: None, limit: 10_000, newest_first: false };

/// Writes messages of one topic, one for each key, in order.
async fn write(store: &Arc<dyn Store>, topic: &str, keys: &[&str]) -> Vec<MessageId> {
    let messages: Vec<NewMessage> =
        keys.iter().map(|key| Message::new(topic, "{}").key(*key).into()).collect();
    let results = store.append(messages).await.expect("messages can be appended");
    results
        .into_iter()
        .map(|result| match result {
            Ok(Appended::New(id)) => id,
            other => panic!("a new message is stored, not {other:?}"),
        })
        .collect()
}

async fn record(store: &Arc<dyn Store>, id: MessageId) -> Record {
    store.record(id).await.expect("records can be read").expect("the record is there")
}

async fn state(store: &Arc<dyn Store>, id: MessageId) -> State {
    record(store, id).await.state
}

fn ids(claimed: &[store::Claimed]) -> Vec<MessageId> {
    claimed.iter().map(|claimed| claimed.message.id).collect()
}

fn ids_of(batches: &[store::Batch]) -> Vec<MessageId> {
    batches.iter().flat_map(|batch| ids(&batch.messages)).collect()
}
