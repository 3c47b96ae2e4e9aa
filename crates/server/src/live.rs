//! What the overview page shows, once a second for everybody who looks.
//!
//! However many pages are open, the store is asked once a second; when nobody looks, it is not asked at all.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use admin::{CountsView, Desk, Encoding, HoldView, LaneRow, ListFilter, MessageView, PageRequest, Problem};
use axum::response::sse::{Event, KeepAlive, Sse};
use chrono::{DateTime, Utc};
use futures::stream::{self, Stream, StreamExt};
use message::MessageId;
use serde::Serialize;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::health::{Component, Health};
use crate::serve::Closing;

const TICK: Duration = Duration::from_secs(1);
const REMEMBERED: usize = 60;
const DEAD_SHOWN: usize = 8;
const HOLDS_SHOWN: usize = 8;
/// Characters of a payload, and of an error.
const PAYLOAD_SHOWN: usize = 2000;
const ERROR_SHOWN: usize = 500;

/// The ticker that all open pages share.
#[derive(Clone)]
pub(crate) struct Live(Arc<Inner>);

struct Inner {
    desk: Arc<Desk>,
    health: Health,
    latest: watch::Sender<Option<Arc<str>>>,
    ticker: Mutex<Ticker>,
}

#[derive(Default)]
struct Ticker {
    running: bool,
    /// When the store was last asked: pages that come and go must not make it more often.
    asked: Option<Instant>,
}

/// What is shown.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Snapshot {
    at: DateTime<Utc>,
    counts: CountsView,
    /// Confirmations per second, one for each second watched, oldest first.
    throughput: Vec<f64>,
    lanes: Vec<LaneRow>,
    holds: Vec<HoldView>,
    dead: Vec<Letter>,
    components: Vec<Component>,
}

/// A dead letter in short: payloads may be large, and this is sent to every page every second.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Letter {
    message_id: MessageId,
    #[serde(rename = "type")]
    kind: Option<String>,
    topic: String,
    key: Option<String>,
    reason: Option<String>,
    error: Option<String>,
    attempts: u32,
    written_at: DateTime<Utc>,
    /// As text, because a browser would round large numbers.
    payload: String,
    /// Whether that is only the beginning.
    cut: bool,
}

impl From<MessageView> for Letter {
    fn from(message: MessageView) -> Self {
        let payload = match message.payload_encoding {
            Encoding::Json => message.payload.get().to_owned(),
            Encoding::Text | Encoding::Base64 => {
                serde_json::from_str(message.payload.get()).unwrap_or_default()
            }
        };
        let short = |text: String, most: usize| text.chars().take(most).collect::<String>();
        let shown = short(payload.clone(), PAYLOAD_SHOWN);
        Self {
            message_id: message.message_id,
            kind: message.kind,
            topic: message.topic,
            key: message.key,
            reason: message.dead_reason.map(|text| short(text, ERROR_SHOWN)),
            error: message.last_error.map(|text| short(text, ERROR_SHOWN)),
            attempts: message.attempts,
            written_at: message.written_at,
            cut: shown.len() < payload.len(),
            payload: shown,
        }
    }
}

#[derive(Serialize)]
struct Trouble<'a> {
    problem: &'a str,
}

impl Live {
    pub(crate) fn new(desk: Arc<Desk>, health: Health) -> Self {
        Self(Arc::new(Inner { desk, health, latest: watch::Sender::new(None), ticker: Mutex::default() }))
    }

    /// The stream that one page follows, until it or the listener closes.
    pub(crate) fn follow(
        &self,
        closing: Option<Closing>,
    ) -> Sse<impl Stream<Item = Result<Event, Infallible>> + use<>> {
        let mut seen = self.watch();
        seen.mark_changed();
        let events = stream::unfold(seen, |mut seen| async move {
            loop {
                seen.changed().await.ok()?;
                let text = seen.borrow_and_update().clone();
                if let Some(text) = text {
                    return Some((Ok(Event::default().data(&*text)), seen));
                }
            }
        });
        let until = async move {
            match closing {
                Some(closing) => closing.wait().await,
                None => std::future::pending().await,
            }
        };
        Sse::new(events.take_until(Box::pin(until))).keep_alive(KeepAlive::default())
    }

    fn watch(&self) -> watch::Receiver<Option<Arc<str>>> {
        let mut ticker = self.0.ticker.lock().unwrap_or_else(PoisonError::into_inner);
        // Subscribed under the lock: the ticker decides under it whether anybody is left.
        let receiver = self.0.latest.subscribe();
        if !ticker.running {
            ticker.running = true;
            tokio::spawn(tick(Arc::clone(&self.0), ticker.asked));
        }
        receiver
    }
}

async fn tick(inner: Arc<Inner>, asked: Option<Instant>) {
    let mut totals = VecDeque::with_capacity(REMEMBERED + 1);
    let mut next = asked.map_or_else(Instant::now, |asked| asked + TICK);
    loop {
        tokio::select! {
            () = tokio::time::sleep_until(next) => {}
            () = inner.latest.closed() => {}
        }
        {
            let mut ticker = inner.ticker.lock().unwrap_or_else(PoisonError::into_inner);
            if inner.latest.receiver_count() == 0 {
                ticker.running = false;
                return;
            }
            ticker.asked = Some(Instant::now());
        }
        next = Instant::now() + TICK;
        let text = match snapshot(&inner, &mut totals).await {
            Ok(snapshot) => serde_json::to_string(&snapshot),
            Err(problem) => serde_json::to_string(&Trouble { problem: &problem.detail }),
        };
        inner.latest.send_replace(Some(text.expect("views are always JSON").into()));
    }
}

async fn snapshot(inner: &Inner, totals: &mut VecDeque<(Instant, u64)>) -> Result<Snapshot, Problem> {
    let counts = inner.desk.counts().await?;
    totals.push_back((Instant::now(), counts.publish_success_total));
    if totals.len() > REMEMBERED + 1 {
        totals.pop_front();
    }
    let pairs = totals.iter().zip(totals.iter().skip(1));
    let throughput = pairs
        .map(|((from, before), (to, after))| {
            after.saturating_sub(*before) as f64 / (*to - *from).as_secs_f64().max(0.001)
        })
        .collect();
    let newest = PageRequest { limit: DEAD_SHOWN, ..PageRequest::newest() };
    let dead = inner.desk.list(ListFilter::dead(None, None), newest).await?;
    Ok(Snapshot {
        at: Utc::now(),
        counts,
        throughput,
        lanes: inner.desk.lanes().await?.lanes,
        holds: inner.desk.holds(HOLDS_SHOWN).await?,
        dead: dead.items.into_iter().map(Into::into).collect(),
        components: (inner.health)(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_store_is_asked_only_while_somebody_looks() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = store::sqlite::SqliteStore::open(folder.path().join("x.db")).expect("a store");
        let desk = Desk::new(Arc::new(store), Arc::default(), message::Limits::default());
        let live = Live::new(Arc::new(desk), Arc::new(Vec::new));
        let asked = || live.0.ticker.lock().expect("a lock").asked;
        let running = || live.0.ticker.lock().expect("a lock").running;
        assert!(!running() && asked().is_none());

        let mut page = live.watch();
        page.changed().await.expect("a snapshot");
        let first = asked().expect("the store was asked");
        drop(page);
        while running() {
            tokio::task::yield_now().await;
        }
        assert_eq!(asked(), Some(first));

        let mut page = live.watch();
        page.changed().await.expect("a snapshot");
        assert!(asked().expect("asked again") >= first + TICK, "pages that come and go ask no more often");
    }
}
