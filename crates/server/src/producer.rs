//! The producer's listener: messages in, their status out, dead letters, lanes, the overview page.

mod dead;
mod messages;
mod operate;

use std::sync::Arc;

use admin::{Contract, Desk};
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Extension, Router};
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::guard::Hosts;
use crate::health::{AllOverdue, AllTransactions, Flows, Health, Lost};
use crate::live::Live;
use crate::problem::Failure;
use crate::serve::Closing;
use crate::{assets, frame, metrics};

/// What the producer's listener needs.
#[derive(Clone)]
pub struct Producer {
    /// Answers its requests.
    pub desk: Arc<Desk>,
    /// How the parts of this process are.
    pub health: Health,
    /// What they have lost.
    pub lost: Lost,
    /// What groups have not acknowledged in time.
    pub overdue: AllOverdue,
    /// How transactions ended.
    pub transactions: AllTransactions,
    /// What the brokers took.
    pub flows: Flows,
    /// What is promised.
    pub contract: Arc<Contract>,
    /// Bytes of a request body at most.
    pub body_limit: usize,
    /// Names it may be called by, beside `localhost` and addresses.
    pub hosts: Hosts,
}

/// Who is written into the audit for what comes by HTTP.
pub(crate) const ACTOR: &str = "api";

pub(crate) type App = State<Arc<Producer>>;

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Postrider producer",
        description = "Takes messages in, says where they are, and lets people mend what went wrong.",
    ),
    tags(
        (name = "messages", description = "Messages, from writing to acknowledgement"),
        (name = "dead letters", description = "Messages that wait for a person"),
        (name = "operation", description = "Lanes, routes, held keys, the audit and health"),
    ),
)]
struct Description;

/// The producer's listener.
pub fn producer(producer: Producer) -> Router {
    let hosts = producer.hosts.clone();
    let live = Live::new(Arc::clone(&producer.desk), Arc::clone(&producer.health));
    let state = Arc::new(producer);
    let api = OpenApiRouter::with_openapi(Description::openapi())
        .routes(routes!(messages::send))
        .routes(routes!(messages::acknowledge))
        .routes(routes!(messages::status))
        .routes(routes!(messages::list))
        .routes(routes!(messages::pending))
        .routes(routes!(messages::of_group))
        .routes(routes!(messages::unacknowledged))
        .routes(routes!(messages::delete))
        .routes(routes!(dead::list))
        .routes(routes!(dead::show, dead::edit))
        .routes(routes!(dead::requeue))
        .routes(routes!(dead::discard))
        .routes(routes!(dead::requeue_matching))
        .routes(routes!(dead::discard_matching))
        .routes(routes!(operate::health))
        .routes(routes!(operate::lanes, operate::set_lanes))
        .routes(routes!(operate::routes))
        .routes(routes!(operate::contract))
        .routes(routes!(operate::holds))
        .routes(routes!(operate::audit))
        .routes(routes!(operate::counts))
        .with_state(Arc::clone(&state));
    let scrape = Router::new().route("/metrics", get(scrape)).with_state(state);
    let follow = move |closing: Option<Extension<Closing>>| {
        let events = live.follow(closing.map(|Extension(closing)| closing));
        async move { events }
    };
    let plain = scrape.route("/events", get(follow)).merge(assets::router());
    frame::framed(api, plain, hosts)
}

async fn scrape(State(app): App) -> Response {
    match app.desk.counts().await {
        Ok(counts) => {
            let outbox = metrics::outbox(&counts, &(app.lost)(), &(app.overdue)());
            let transactions = metrics::transactions(&(app.transactions)());
            metrics::answer(outbox + &transactions + &metrics::flows(&(app.flows)()))
        }
        Err(problem) => Failure(problem).into_response(),
    }
}
