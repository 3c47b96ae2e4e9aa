//! A broker's whole log, read beside its consumers.

use anyhow::{Context, Result, ensure};
use broker::{Span, Surroundings};
use chrono::{DateTime, TimeDelta, Utc};
use message::MessageId;

use crate::ground::{Ground, broker_path};
use crate::shop::TOPIC;

/// The ids of all orders that the broker at `url` was ever given, as committed, one for each time.
///
/// # Errors
/// When it cannot be read, or is not whole any more.
pub(crate) async fn ids(url: &str, ground: &Ground) -> Result<Vec<MessageId>> {
    let surroundings = Surroundings { file: broker_path(ground.folder()), max_payload: 1 << 20 };
    let reader = broker::open(url, &surroundings)?.reader.context("nobody can read this broker's log")?;
    let span = Span { since: DateTime::UNIX_EPOCH, until: Utc::now() + TimeDelta::hours(1) };
    let mut ids = Vec::new();
    let kept = reader.browse(TOPIC, span, &mut |seen| ids.push(seen.id)).await?;
    let began = ground.began();
    ensure!(kept.is_none_or(|since| since <= began), "the broker has removed messages meanwhile");
    Ok(ids)
}
