//! The contract of stores on SQLite behind a Redis that answers "seen".

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use message::MessageId;
use redis::Commands;
use store::hybrid::{Config, Hybrid};
use store::sqlite::SqliteStore;
use store::{
    Acknowledged, Amend, Append, Appended, Arrival, Attempt, AuditEntry, Beat, Beaten, Claim, ClaimOrder,
    Counts, Edit, Error, Filter, Handled, Hold, Inbox, InboxCounts, InboxRules, Inspect, Instance, LaneView,
    Lanes, Lease, Left, NewMessage, Page, Paged, Parked, Processed, Receipt, Record, Remembered, Reservation,
    Retention, Seq, Settlement, Store, Turn, Turned, Work,
};
use tempfile::TempDir;
use uuid::Uuid;

/// A store whose inbox is the hybrid one; the rest is SQLite's.
struct Behind {
    store: Arc<SqliteStore>,
    inbox: Hybrid,
}

/// Methods that do what `self.$to` does.
macro_rules! delegate {
    ($trait:ident to $to:ident: $($name:ident($($arg:ident: $type:ty),*) -> $out:ty;)*) => {
        #[async_trait]
        impl $trait for Behind {
            $(async fn $name(&self, $($arg: $type),*) -> $out {
                self.$to.$name($($arg),*).await
            })*
        }
    };
}

delegate! { Append to store:
    append(messages: Vec<NewMessage>) -> Result<Vec<Result<Appended, Turned>>, Error>;
}

delegate! { Lanes to store:
    beat(beat: &Beat) -> Result<Beaten, Error>;
    release(leases: &[Lease], left: Left) -> Result<(), Error>;
    leave(instance: &Instance) -> Result<(), Error>;
    lanes() -> Result<Vec<LaneView>, Error>;
    set_lanes(count: u16) -> Result<bool, Error>;
}

delegate! { Claim to store:
    turn(settlements: Vec<Settlement>, order: Option<ClaimOrder>) -> Result<Turn, Error>;
    woken() -> ();
}

delegate! { Inbox to inbox:
    check(work: &Work) -> Result<(), Error>;
    process(group: &str, arrivals: Vec<Arrival>, work: &Work, rules: &InboxRules) -> Result<Vec<Receipt>, Error>;
    reserve(group: &str, arrivals: Vec<Arrival>, lease: Duration, rules: &InboxRules)
        -> Result<Vec<Reservation>, Error>;
    conclude(group: &str, conclusions: Vec<(Arrival, Uuid, Handled)>, rules: &InboxRules)
        -> Result<Vec<Receipt>, Error>;
    due(group: &str, limit: usize) -> Result<Vec<Arrival>, Error>;
    processed(group: &str, page: Page) -> Result<Paged<Processed>, Error>;
    parked(group: &str, page: Page) -> Result<Paged<Parked>, Error>;
    unpark(group: &str, id: MessageId, actor: &str) -> Result<(), Error>;
    drop_parked(group: &str, id: MessageId, actor: &str) -> Result<(), Error>;
    inbox_counts(group: &str) -> Result<InboxCounts, Error>;
    remembered(group: &str) -> Result<Remembered, Error>;
    forget_ids(group: &str, keep: Duration) -> Result<u64, Error>;
}

delegate! { Inspect to store:
    unsent(seqs: &[Seq]) -> Result<Vec<Seq>, Error>;
    identity() -> Result<String, Error>;
    record(id: MessageId) -> Result<Option<Record>, Error>;
    list(filter: &Filter, page: Page) -> Result<Paged<Record>, Error>;
    attempts(id: MessageId) -> Result<Vec<Attempt>, Error>;
    counts() -> Result<Counts, Error>;
    holds(limit: usize) -> Result<Vec<Hold>, Error>;
    audit(page: Page) -> Result<Paged<AuditEntry>, Error>;
}

delegate! { Amend to store:
    requeue(id: MessageId, actor: &str) -> Result<(), Error>;
    edit(id: MessageId, edit: &Edit, actor: &str) -> Result<(), Error>;
    discard(id: MessageId, actor: &str) -> Result<(), Error>;
    redeliver(id: MessageId, group: &str, why: &str) -> Result<bool, Error>;
    delete(id: MessageId, actor: &str) -> Result<(), Error>;
    acknowledge(done: Vec<(MessageId, String)>) -> Result<Vec<Acknowledged>, Error>;
    clean(retention: &Retention) -> Result<u64, Error>;
}

/// SQLite in a folder of its own, and a scope of its own in Redis.
struct Fixture {
    folder: TempDir,
    config: Config,
}

#[async_trait]
impl testkit::store::Fixture for Fixture {
    async fn fresh() -> Self {
        // Patient, so that the cases run on Redis however busy the machine is.
        let patience = Duration::from_secs(10);
        let config = Config::new(testkit::servers::url("redis"), Uuid::new_v4().to_string());
        let folder = TempDir::new().expect("a folder can be made");
        Self { folder, config: Config { patience, ..config } }
    }

    async fn open(&self) -> Arc<dyn Store> {
        let store = Arc::new(SqliteStore::open(self.folder.path().join("store.db")).expect("a store"));
        let inbox = Hybrid::new(store.clone(), &self.config).expect("an inbox");
        Arc::new(Behind { store, inbox })
    }

    fn work(&self) -> Work {
        Work::Sql(
            "INSERT INTO outbox_events (id, topic, payload) VALUES (:payload, 'effects', :id)".to_owned(),
        )
    }

    fn impossible_work(&self) -> Work {
        Work::Sql("INSERT INTO no_such_table VALUES (:id)".to_owned())
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        let mut redis = redis::Client::open(self.config.url.as_str())
            .and_then(|client| client.get_connection())
            .expect("Redis was there a moment ago");
        let keys: Vec<String> = redis.keys(format!("postrider:seen:*{}*", self.config.scope)).expect("keys");
        for key in keys {
            redis.del::<_, ()>(key).expect("deleted");
        }
    }
}

mod hybrid {
    testkit::store_conformance!(super::Fixture);
}
