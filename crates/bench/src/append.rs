//! Sixty-four writers at once, each waiting for its message to be on disk.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use store::Append;
use store::sqlite::SqliteStore;
use tokio::task::JoinSet;

use crate::Size;
use crate::arrow::message;

/// Writers at once, and rows in a transaction of the bare program.
pub(crate) const WRITERS: usize = 64;

pub(crate) async fn run(size: Size) -> Result<Duration> {
    let folder = tempfile::tempdir()?;
    let store = Arc::new(SqliteStore::open(folder.path().join("store.db"))?);
    let started = Instant::now();
    let mut writers = JoinSet::new();
    for writer in 0..WRITERS {
        let store = store.clone();
        writers.spawn(async move {
            for number in (writer..size.messages).step_by(WRITERS) {
                for result in store.append(vec![message(size, number).into()]).await? {
                    result?;
                }
            }
            Ok::<_, anyhow::Error>(())
        });
    }
    while let Some(writer) = writers.join_next().await {
        writer??;
    }
    Ok(started.elapsed())
}
