//! For a store that stands before another one: whatever it has nothing to say about is passed on.

/// `testkit::pass_on!(Witness);` gives a type with a field `store: Arc<dyn Store>` the roles that a relay does not play:
/// [`Append`](store::Append), [`Inbox`](store::Inbox), [`Inspect`](store::Inspect) and [`Amend`](store::Amend).
///
/// Whoever uses it has `async-trait`, `message`, `store` and `uuid` among its dependencies.
#[macro_export]
macro_rules! pass_on {
    ($type:ty) => {
        $crate::pass_on!($type: Append {
            fn append(messages: Vec<store::NewMessage>) -> Vec<Result<store::Appended, store::Turned>>;
        });
        $crate::pass_on!($type: Inbox {
            fn check(work: &store::Work) -> ();
            fn process(
                group: &str,
                arrivals: Vec<store::Arrival>,
                work: &store::Work,
                rules: &store::InboxRules
            ) -> Vec<store::Receipt>;
            fn reserve(
                group: &str,
                arrivals: Vec<store::Arrival>,
                lease: std::time::Duration,
                rules: &store::InboxRules
            ) -> Vec<store::Reservation>;
            fn conclude(
                group: &str,
                conclusions: Vec<(store::Arrival, uuid::Uuid, store::Handled)>,
                rules: &store::InboxRules
            ) -> Vec<store::Receipt>;
            fn due(group: &str, limit: usize) -> Vec<store::Arrival>;
            fn processed(group: &str, page: store::Page) -> store::Paged<store::Processed>;
            fn parked(group: &str, page: store::Page) -> store::Paged<store::Parked>;
            fn unpark(group: &str, id: message::MessageId, actor: &str) -> ();
            fn drop_parked(group: &str, id: message::MessageId, actor: &str) -> ();
            fn inbox_counts(group: &str) -> store::InboxCounts;
            fn remembered(group: &str) -> store::Remembered;
            fn forget_ids(group: &str, keep: std::time::Duration) -> u64;
        });
        $crate::pass_on!($type: Inspect {
            fn record(id: message::MessageId) -> Option<store::Record>;
            fn list(filter: &store::Filter, page: store::Page) -> store::Paged<store::Record>;
            fn attempts(id: message::MessageId) -> Vec<store::Attempt>;
            fn unsent(seqs: &[store::Seq]) -> Vec<store::Seq>;
            fn identity() -> String;
            fn counts() -> store::Counts;
            fn holds(limit: usize) -> Vec<store::Hold>;
            fn audit(page: store::Page) -> store::Paged<store::AuditEntry>;
        });
        $crate::pass_on!($type: Amend {
            fn requeue(id: message::MessageId, actor: &str) -> ();
            fn edit(id: message::MessageId, edit: &store::Edit, actor: &str) -> ();
            fn discard(id: message::MessageId, actor: &str) -> ();
            fn delete(id: message::MessageId, actor: &str) -> ();
            fn acknowledge(done: Vec<(message::MessageId, String)>) -> Vec<store::Acknowledged>;
            fn redeliver(id: message::MessageId, group: &str, why: &str) -> bool;
            fn clean(retention: &store::Retention) -> u64;
        });
    };
    ($type:ty: $role:ident { $(fn $name:ident($($argument:ident: $kind:ty),*) -> $answer:ty;)* }) => {
        #[async_trait::async_trait]
        impl store::$role for $type {
            $(async fn $name(&self, $($argument: $kind),*) -> Result<$answer, store::Error> {
                self.store.$name($($argument),*).await
            })*
        }
    };
}
