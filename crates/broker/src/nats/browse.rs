//! Reading the stream beside its groups, through a consumer that acknowledges nothing and is gone afterwards.

use std::time::Duration;

use async_nats::jetstream::consumer::{AckPolicy, DeliverPolicy, PullConsumer, pull};
use async_nats::jetstream::context::Context;
use async_nats::jetstream::stream::{DiscardPolicy, Info, RetentionPolicy};
use async_trait::async_trait;
use chrono::{DateTime, TimeDelta, Utc};
use futures::StreamExt;
use tokio::time::Instant;

use super::Broker;
use super::acknowledge::Item;
use super::error::{Trouble, unserved};
use super::fetch::numbers;
use super::receive::delivery;
use super::stream::subject;
use crate::{Browse, Position, ReceiveError, See, Seen, Span};

/// Messages of the first batch, before anything is known of their size.
const FIRST: usize = 16;

/// Messages of a batch at most, and bytes of it, near enough.
const MOST: usize = 1_000;
const BYTES: usize = 8 << 20;

/// How long the server waits for more before it says that there is nothing. It must be told to: asked for what is there
/// at once, it says nothing at all if what it had in mind is removed meanwhile.
const NOTHING: Duration = Duration::from_millis(200);

/// When the server throws the consumer away if nobody did.
const FORGOTTEN: Duration = Duration::from_secs(30);

#[async_trait]
impl Browse for Broker {
    async fn browse(
        &self,
        topic: &str,
        span: Span,
        see: See<'_>,
    ) -> Result<Option<DateTime<Utc>>, ReceiveError> {
        self.walk(topic, span, see).await.map_err(|trouble| trouble.receive())
    }
}

impl Broker {
    async fn walk(&self, topic: &str, span: Span, see: See<'_>) -> Result<Option<DateTime<Utc>>, Trouble> {
        let inner = &self.inner;
        let Some(info) = inner.look().await? else { return Ok(None) };
        if info.config.retention != RetentionPolicy::Limits {
            // There, who reads a message takes it from others or keeps it for them.
            return Err(Trouble::Refused(format!(
                "the stream `{}` removes what was read: it cannot be read beside its groups",
                inner.config.stream
            )));
        }
        let context = inner.link.connected(&inner.config).await?;
        let mut consumer = self.open_reader(context, topic, span).await?;
        let read = self.drain(&mut consumer, topic, span, see).await;
        let name = consumer.cached_info().name.clone();
        // If it cannot be deleted now, the server does so soon.
        let _ = context.delete_consumer_from_stream(name, &inner.config.stream).await;
        read?;
        // Asked for last: what was removed while this was reading counts as well.
        Ok(inner.look().await?.and_then(|info| kept_since(&info)))
    }

    async fn open_reader(&self, context: &Context, topic: &str, span: Span) -> Result<PullConsumer, Trouble> {
        let config = &self.inner.config;
        let time = async_nats::datetime::parse_rfc3339(&span.since.to_rfc3339());
        let start_time = time.map_err(|error| Trouble::Refused(error.to_string()))?;
        let first = subject(&config.prefix, topic, 0);
        let wanted = pull::Config {
            description: Some("Postrider: reading beside the groups".to_owned()),
            deliver_policy: DeliverPolicy::ByStartTime { start_time },
            ack_policy: AckPolicy::None,
            filter_subject: format!("{}*", first.trim_end_matches('0')),
            inactive_threshold: FORGOTTEN,
            memory_storage: true,
            num_replicas: 1,
            ..pull::Config::default()
        };
        let made = context.create_consumer_on_stream(wanted, &config.stream).await;
        made.map_err(|error| unserved(&error).unwrap_or_else(|| Trouble::Away(error.to_string())))
    }

    async fn drain(
        &self,
        consumer: &mut PullConsumer,
        topic: &str,
        span: Span,
        see: See<'_>,
    ) -> Result<(), Trouble> {
        let away = |error: &dyn std::fmt::Display| Trouble::Away(error.to_string());
        let (patience, stream) = (self.inner.config.timeout, &self.inner.config.stream);
        let late = || Trouble::Away(format!("nothing came within {patience:?}"));
        let (mut count, mut deliveries, mut last) = (FIRST, 0, Instant::now());
        loop {
            let asked = consumer.batch().max_messages(count).expires(NOTHING).messages();
            let asked = tokio::time::timeout(patience, asked).await.map_err(|_| late())?;
            let mut batch = asked.map_err(|error| away(&error))?;
            let (mut came, mut largest) = (0, 1);
            while let Some(message) =
                tokio::time::timeout(patience, batch.next()).await.map_err(|_| late())?
            {
                let message = message.map_err(|error| away(&error))?.message;
                let reply = message.reply.clone().unwrap_or_else(|| "".into());
                let Some([seq, number, stored_at]) = numbers(&reply) else { continue };
                (came, largest) = (came + 1, largest.max(message.length));
                deliveries += 1;
                if number != deliveries {
                    return Err(Trouble::Away("a message was lost on the way: try again".to_owned()));
                }
                let time = DateTime::from_timestamp_nanos(stored_at);
                if time >= span.until {
                    return Ok(());
                }
                let position = Position { partition: 0, offset: seq };
                let read = delivery(topic, stream, &Item { position, message, reply, stored_at });
                let (id, seq, delivery) = (read.message.id, read.seq, read.delivery);
                see(Seen { id, seq, delivery, stored_at: time, made: false });
            }
            if came > 0 {
                (count, last) = ((BYTES / largest).clamp(1, MOST), Instant::now());
                continue;
            }
            let info = consumer.info().await.map_err(|error| away(&error))?;
            match i64::try_from(info.delivered.consumer_sequence) {
                Ok(number) if number != deliveries => {
                    return Err(Trouble::Away("a message was lost on the way: try again".to_owned()));
                }
                _ if info.num_pending == 0 => return Ok(()),
                _ if last.elapsed() > patience => return Err(late()),
                _ => {}
            }
        }
    }
}

/// Since when nothing was removed: since the oldest message, or for as long as everything is kept.
fn kept_since(info: &Info) -> Option<DateTime<Utc>> {
    let (config, state, now) = (&info.config, &info.state, Utc::now());
    if config.max_messages_per_subject > 0 {
        // Then what is removed is anywhere.
        return Some(now);
    }
    if state.first_sequence <= 1 {
        return None;
    }
    let crowded = config.discard == DiscardPolicy::Old && (config.max_bytes > 0 || config.max_messages > 0);
    let age = TimeDelta::from_std(config.max_age).ok().filter(|age| !crowded && !age.is_zero());
    let promised = now - age.unwrap_or_default();
    let nanos = i64::try_from(state.first_timestamp.unix_timestamp_nanos()).ok();
    let oldest = nanos.filter(|_| state.messages > 0).map(DateTime::from_timestamp_nanos);
    Some(oldest.map_or(promised, |oldest| promised.min(oldest)))
}
