//! Health: which part works, which does not, and what is wrong with it.

use std::sync::Arc;

use admin::{Desk, LatencyView};
use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;

/// A part that can fail on its own: the relay, a broker, a consumer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct Component {
    /// Which: "relay", "broker main", "consumer default-consumer-group".
    pub name: String,
    /// Whether it works.
    pub ok: bool,
    /// What it does, or what is wrong and what will happen next.
    pub detail: String,
}

/// Asks all parts how they are. Must not block: it is called for every health request and page update.
pub type Health = Arc<dyn Fn() -> Vec<Component> + Send + Sync>;

/// Messages lost since the start, by route or by group, where losing them was chosen. Must not block either.
pub type Lost = Arc<dyn Fn() -> Vec<(String, u64)> + Send + Sync>;

/// What a consumer group has not acknowledged in time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Overdue {
    /// The group.
    pub group: String,
    /// Messages that are overdue now.
    pub overdue: u64,
    /// Of those, sent again as often as they may be.
    pub given_up: u64,
    /// Messages sent again since the start.
    pub redelivered: u64,
}

/// What groups have not acknowledged in time. Must not block either.
pub type AllOverdue = Arc<dyn Fn() -> Vec<Overdue> + Send + Sync>;

/// How the transactions into a broker ended since the start.
#[derive(Clone, Debug, PartialEq)]
pub struct TransactionsView {
    /// The broker.
    pub broker: String,
    /// Committed.
    pub committed: u64,
    /// Not committed.
    pub rolled_back: u64,
    /// How long they took.
    pub took: LatencyView,
}

/// How transactions ended on routes that send exactly once. Must not block either.
pub type AllTransactions = Arc<dyn Fn() -> Vec<TransactionsView> + Send + Sync>;

/// How many messages of a route passed, and whether that is as usual.
#[derive(Clone, Debug, PartialEq)]
pub struct FlowView {
    /// The route.
    pub route: String,
    /// Whose work it was; absent where a broker took them.
    pub group: Option<String>,
    /// Messages since the start.
    pub total: u64,
    /// Messages a minute in the last window; absent where nobody watches.
    pub now: Option<f64>,
    /// Messages a minute before that; absent while it is not known.
    pub usual: Option<f64>,
    /// Whether it is suddenly less; absent where nobody watches.
    pub dropped: Option<bool>,
}

/// The flows that are counted in this process. Must not block either.
pub type Flows = Arc<dyn Fn() -> Vec<FlowView> + Send + Sync>;

/// How the service is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct HealthView {
    /// `ok` when every part works, else `failing`.
    #[schema(value_type = String, example = "ok")]
    pub status: &'static str,
    /// Each part.
    pub components: Vec<Component>,
}

/// The store's part first, then those of `parts`.
pub(crate) async fn components(desk: &Desk, parts: &Health) -> Vec<Component> {
    let store = match desk.counts().await {
        Ok(_) => Component { name: "store".to_owned(), ok: true, detail: "answers".to_owned() },
        Err(problem) => Component { name: "store".to_owned(), ok: false, detail: problem.detail },
    };
    std::iter::once(store).chain(parts()).collect()
}

pub(crate) async fn answer(desk: &Desk, parts: &Health) -> Response {
    let components = components(desk, parts).await;
    let ok = components.iter().all(|component| component.ok);
    let (code, status) =
        if ok { (StatusCode::OK, "ok") } else { (StatusCode::SERVICE_UNAVAILABLE, "failing") };
    (code, Json(HealthView { status, components })).into_response()
}
