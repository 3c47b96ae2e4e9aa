//! Reading streams beside their groups: `XRANGE` moves nobody's place and leaves nothing pending.

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use redis::{Value, cmd};

use super::Broker;
use super::entry::{Entry, EntryId, list, number, text};
use super::error::{Error, receive as failed};
use crate::{Browse, Position, ReceiveError, See, Seen, Span};

/// Entries of the first look at a stream, before anything is known of their size.
const FIRST: usize = 16;

/// Entries of a look at most, and bytes of it, near enough: Redis does nothing else meanwhile.
const MOST: usize = 1_000;
const BYTES: usize = 8 << 20;

#[async_trait]
impl Browse for Broker {
    async fn browse(
        &self,
        topic: &str,
        span: Span,
        see: See<'_>,
    ) -> Result<Option<DateTime<Utc>>, ReceiveError> {
        self.walk(topic, span, see).await.map_err(|error| failed(&error, &self.inner.config.place()))
    }
}

impl Broker {
    async fn walk(&self, topic: &str, span: Span, see: See<'_>) -> Result<Option<DateTime<Utc>>, Error> {
        let (reader, tag) = (&self.inner.reader, &self.inner.tag);
        let partitions = reader.query(cmd("HGET").arg(format!("{tag}:topics")).arg(topic)).await?;
        let streams = (0..number(&partitions).unwrap_or(0)).map(|n| format!("{tag}:stream:{topic}:{n}"));
        let streams: Vec<String> = streams.collect();
        for stream in &streams {
            self.walk_stream(topic, stream, span, see).await?;
        }
        let mut since = None;
        for stream in &streams {
            since = since.max(self.kept_since(stream).await?);
        }
        Ok(since)
    }

    async fn walk_stream(&self, topic: &str, stream: &str, span: Span, see: See<'_>) -> Result<(), Error> {
        let here = Position { partition: 0, offset: 0 };
        // The ids of entries are their times: up to the last moment, and without it.
        let end = format!("({}-0", span.until.timestamp_millis().max(0));
        let mut from = EntryId::at(span.since);
        let mut count = FIRST;
        loop {
            let page =
                cmd("XRANGE").arg(stream).arg(from.to_string()).arg(&end).arg("COUNT").arg(count).clone();
            let entries = list(self.inner.reader.query(&page).await?).unwrap_or_default();
            let (read, mut largest) = (entries.len(), 1);
            for entry in entries.into_iter().filter_map(Entry::from_value) {
                let id = entry.id;
                from = id.next();
                let delivery = entry.read(topic, stream, here);
                largest = largest.max(delivery.message.size());
                if let Some(stored_at) = id.time() {
                    see(Seen {
                        id: delivery.message.id,
                        seq: delivery.seq,
                        delivery: delivery.delivery,
                        stored_at,
                        made: false,
                    });
                }
            }
            if read < count {
                return Ok(());
            }
            count = (BYTES / largest).clamp(1, MOST);
        }
    }

    /// Since when nothing was removed from a stream: since its oldest entry, or for as long as everything is kept.
    async fn kept_since(&self, stream: &str) -> Result<Option<DateTime<Utc>>, Error> {
        let fields = match self.inner.reader.query(cmd("XINFO").arg("STREAM").arg(stream)).await {
            Ok(fields) => fields,
            Err(Error::Said { text, .. }) if text.contains("no such key") => return Ok(None),
            Err(error) => return Err(error),
        };
        let (mut added, mut length, mut oldest) = (0, 0, None);
        let mut fields = pairs(fields).into_iter();
        while let (Some(name), Some(value)) = (fields.next(), fields.next()) {
            match text(name).as_deref() {
                Some("entries-added") => added = number(&value).unwrap_or(0),
                Some("length") => length = number(&value).unwrap_or(0),
                // The one before it may be of the same millisecond.
                Some("first-entry") => {
                    oldest = Entry::from_value(value).and_then(|entry| entry.id.next_time())
                }
                _ => {}
            }
        }
        if added == length {
            return Ok(None);
        }
        let kept = self.now().await? - self.inner.config.retain;
        Ok(Some(oldest.map_or(kept, |oldest| kept.min(oldest))))
    }

    /// By the server's clock.
    async fn now(&self) -> Result<DateTime<Utc>, Error> {
        let time = list(self.inner.reader.query(&cmd("TIME")).await?).unwrap_or_default();
        let seconds = time.first().and_then(number);
        let now = seconds.and_then(|seconds| DateTime::from_timestamp(seconds, 0));
        now.ok_or_else(|| Error::caught("ERR the server does not know its time"))
    }
}

/// Names and values, one after another, however the connection writes them.
fn pairs(fields: Value) -> Vec<Value> {
    match fields {
        Value::Map(pairs) => pairs.into_iter().flat_map(|(name, value)| [name, value]).collect(),
        other => list(other).unwrap_or_default(),
    }
}
