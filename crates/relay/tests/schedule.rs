//! Messages that say when to send them, or until when.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use broker::embedded::{Broker, Config};
use broker::{Guarantees, Outcome, Outgoing, Publisher};
use chrono::{DateTime, Utc};
use message::{DELIVER_AT, Message, MessageId, Status};
use relay::{Relay, Route, Settings, Settle};
use store::sqlite::SqliteStore;
use store::{Append, Inspect};
use testkit::until;

/// The embedded broker, and when it got what.
struct Timing {
    broker: Broker,
    got: Mutex<BTreeMap<MessageId, Vec<DateTime<Utc>>>>,
}

#[async_trait]
impl Publisher for Timing {
    fn guarantees(&self) -> Guarantees {
        self.broker.guarantees()
    }

    async fn publish(&self, batch: Vec<Outgoing>) -> Vec<Outcome> {
        for outgoing in &batch {
            let mut got = self.got.lock().expect("no panic");
            got.entry(outgoing.message.id).or_default().push(Utc::now());
        }
        self.broker.publish(batch).await
    }
}

/// Writes `messages`, has them sent by a route that settles like this until `count` have been, and answers when.
async fn sent(
    settle: Settle,
    messages: Vec<Message>,
    count: usize,
) -> (Arc<SqliteStore>, BTreeMap<MessageId, Vec<DateTime<Utc>>>, tempfile::TempDir) {
    let folder = tempfile::tempdir().expect("a folder");
    let store = Arc::new(SqliteStore::open(folder.path().join("store.db")).expect("a store"));
    let broker = Broker::open(Config::new(folder.path().join("broker.db"))).expect("a broker");
    let timing = Arc::new(Timing { broker, got: Mutex::default() });
    let all = messages.len();
    store.append(messages.into_iter().map(Into::into).collect()).await.expect("stored");
    let route = Route { settle, ..Route::new("main", &["*"], timing.clone()) };
    let relay = Relay::start(store.clone(), vec![route], Settings::default());
    until("the end", async || {
        let counts = store.counts().await.expect("counts");
        let got = timing.got.lock().expect("no panic").len();
        got == count && counts.sent + counts.dead == all as u64
    })
    .await;
    relay.drain().await;
    let got = timing.got.lock().expect("no panic").clone();
    (store, got, folder)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_is_sent_when_its_time_has_come_and_those_behind_it_do_not_wait() {
    for settle in [Settle::After, Settle::Before] {
        let plain = || Message::new("orders", "{}").key("k");
        // Long enough to have the relay at work before.
        let late = plain().deliver_after(Duration::from_secs(4));
        let due = late.occurred_at + Duration::from_secs(4);
        let behind = plain();
        let (first, second) = (late.id, behind.id);
        let (store, got, _folder) = sent(settle, vec![late, behind], 2).await;
        assert!(got[&first].len() == 1 && got[&second].len() == 1, "{settle:?}: each once");
        // A header has milliseconds.
        assert!(
            got[&first][0] >= due - Duration::from_millis(1),
            "{settle:?}: {:?} is too soon",
            got[&first][0]
        );
        assert!(got[&second][0] < got[&first][0], "{settle:?}: the one behind it went first");
        let record = store.record(first).await.expect("readable").expect("kept");
        assert_eq!((record.state.status, record.state.attempts), (Status::Sent, 0));
        assert!(store.attempts(first).await.expect("the history").is_empty(), "waiting is no failure");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_expired_or_says_no_time_is_dead_and_never_sent_and_holds_nobody() {
    for settle in [Settle::After, Settle::Before] {
        let plain = || Message::new("orders", "{}").key("k");
        let over = plain().expires_after(Duration::ZERO);
        let odd = plain().header(DELIVER_AT, "tomorrow");
        let fresh = plain().expires_after(Duration::from_secs(3_600));
        let ids = [over.id, odd.id, fresh.id];
        let (store, got, _folder) = sent(settle, vec![over, odd, fresh], 1).await;
        assert_eq!(got.keys().copied().collect::<Vec<_>>(), [ids[2]], "{settle:?}");
        for (id, reason, word) in [(ids[0], "Expired", "before"), (ids[1], "Unreadable", DELIVER_AT)] {
            let record = store.record(id).await.expect("readable").expect("kept");
            assert_eq!(record.state.status, Status::Dead);
            assert_eq!(record.dead_reason.as_deref(), Some(reason));
            assert!(record.last_error.is_some_and(|error| error.contains(word)));
        }
        assert_eq!(store.counts().await.expect("counts").dead_total, 2);
    }
}
