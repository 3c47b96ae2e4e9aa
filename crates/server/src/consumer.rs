//! The consumer's listener: what each group has done, what is parked, and a way to try a handler.

use std::sync::Arc;

use admin::{
    ActionAnswer, Desk, LatencyView, PageView, ParkedView, Problem, ProblemKind, ProcessedView, TestRequest,
};
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use inbox::Group;
use message::MessageId;
use serde::Serialize;
use store::Receipt;
use utoipa::{OpenApi, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::guard::Hosts;
use crate::health::{self, Flows, Health, HealthView, Lost};
use crate::problem::{Failure, ProblemView, Problems};
use crate::producer::ACTOR;
use crate::query::{Asked, Named, NamedPair};
use crate::{body, frame, metrics};

/// What the consumer's listener needs.
#[derive(Clone)]
pub struct Consumer {
    /// Answers its requests.
    pub desk: Arc<Desk>,
    /// The groups whose handlers run in this process.
    pub groups: Vec<Arc<Group>>,
    /// How the parts of this process are.
    pub health: Health,
    /// What they have lost.
    pub lost: Lost,
    /// What those whose work is messages gave up.
    pub dead_letters: Lost,
    /// What they have done.
    pub flows: Flows,
    /// Bytes of a request body at most.
    pub body_limit: usize,
    /// Names it may be called by, beside `localhost` and addresses.
    pub hosts: Hosts,
}

type App = State<Arc<Consumer>>;

/// What a handler did with a message.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct TestAnswer {
    /// The message, for asking again: the second time it is a duplicate.
    #[schema(value_type = String, format = Uuid)]
    message_id: MessageId,
    /// `new`, `duplicate`, `failed` (kept for a later try), `dead` or `unavailable` (nothing was done).
    #[schema(value_type = String, example = "new")]
    result: &'static str,
    /// What that means here.
    detail: String,
}

#[derive(OpenApi)]
#[openapi(
    info(title = "Postrider consumer", description = "What consumer groups have done and what waits in their inboxes."),
    tags((name = "consumer", description = "Consumer groups and their inboxes")),
)]
struct Description;

/// The consumer's listener.
pub fn consumer(consumer: Consumer) -> Router {
    let hosts = consumer.hosts.clone();
    let state = Arc::new(consumer);
    let api = OpenApiRouter::with_openapi(Description::openapi())
        .routes(routes!(processed))
        .routes(routes!(parked))
        .routes(routes!(unpark))
        .routes(routes!(drop_parked))
        .routes(routes!(test_process))
        .routes(routes!(health))
        .with_state(Arc::clone(&state));
    let plain = Router::new().route("/metrics", get(scrape)).with_state(state);
    frame::framed(api, plain, hosts)
}

/// What a group has done, newest first.
#[utoipa::path(
    get, path = "/api/consumer/processed/{group}", tag = "consumer",
    params(
        ("group" = String, Path, description = "The consumer group"),
        ("limit" = Option<usize>, Query, description = "1 to 1000; 100 when left out"),
        ("after" = Option<String>, Query, description = "The `next` of the page before"),
    ),
    responses(
        (status = 200, description = "A part of the list", body = PageView<ProcessedView>),
        (status = 404, description = "There is no such group", body = ProblemView, content_type = "application/problem+json"),
        Problems,
    )
)]
async fn processed(
    State(app): App,
    Named(group): Named,
    asked: Asked,
) -> Result<Json<PageView<ProcessedView>>, Failure> {
    let page = asked.only(&["limit", "after"])?.page()?;
    Ok(Json(app.desk.processed(&group, page).await?))
}

/// What is parked or Dead in the inbox of a group.
#[utoipa::path(
    get, path = "/api/consumer/parked/{group}", tag = "consumer",
    params(
        ("group" = String, Path, description = "The consumer group"),
        ("limit" = Option<usize>, Query, description = "1 to 1000; 100 when left out"),
        ("after" = Option<String>, Query, description = "The `next` of the page before"),
    ),
    responses(
        (status = 200, description = "A part of the list", body = PageView<ParkedView>),
        (status = 404, description = "There is no such group", body = ProblemView, content_type = "application/problem+json"),
        Problems,
    )
)]
async fn parked(
    State(app): App,
    Named(group): Named,
    asked: Asked,
) -> Result<Json<PageView<ParkedView>>, Failure> {
    let page = asked.only(&["limit", "after"])?.page()?;
    Ok(Json(app.desk.parked(&group, page).await?))
}

/// Give a parked or Dead message of the inbox a fresh start now.
#[utoipa::path(
    post, path = "/api/consumer/parked/{group}/{id}/requeue", tag = "consumer",
    params(("group" = String, Path, description = "The consumer group"), ("id" = String, Path, description = "The message")),
    responses(
        (status = 200, description = "It is tried again", body = ActionAnswer),
        (status = 409, description = "It is not parked", body = ProblemView, content_type = "application/problem+json"),
        Problems,
    )
)]
async fn unpark(State(app): App, NamedPair(group, id): NamedPair) -> Result<Json<ActionAnswer>, Failure> {
    let answer = app.desk.unpark(&group, &id, ACTOR).await?;
    tracing::info!(message_id = %answer.message_id, group, "requeued in the inbox");
    Ok(Json(answer))
}

/// Give up a parked or Dead message of the inbox.
#[utoipa::path(
    post, path = "/api/consumer/parked/{group}/{id}/discard", tag = "consumer",
    params(("group" = String, Path, description = "The consumer group"), ("id" = String, Path, description = "The message")),
    responses(
        (status = 200, description = "It is gone", body = ActionAnswer),
        (status = 409, description = "It is not parked", body = ProblemView, content_type = "application/problem+json"),
        Problems,
    )
)]
async fn drop_parked(
    State(app): App,
    NamedPair(group, id): NamedPair,
) -> Result<Json<ActionAnswer>, Failure> {
    let answer = app.desk.drop_parked(&group, &id, ACTOR).await?;
    tracing::info!(message_id = %answer.message_id, group, "discarded in the inbox");
    Ok(Json(answer))
}

/// Run a message through a group's handler, as if a broker had delivered it.
#[utoipa::path(
    post, path = "/api/consumer/test-process", tag = "consumer", request_body = TestRequest,
    responses(
        (status = 200, description = "What the handler did", body = TestAnswer),
        (status = 404, description = "There is no such group here", body = ProblemView, content_type = "application/problem+json"),
        Problems,
    )
)]
async fn test_process(State(app): App, request: Request) -> Result<Json<TestAnswer>, Failure> {
    let asked = TestRequest::parse(&body::json(request, app.body_limit).await?)?;
    let group = find(&app, &asked)?;
    let arrival = app.desk.arrival(asked)?;
    let message_id = arrival.message.id;
    let receipt = group.process(vec![arrival]).await.map_err(Problem::from)?.pop();
    let (result, detail) = match receipt {
        Some(Receipt::Done) => ("new", format!("The handler ({}) has done it.", group.handler_kind())),
        Some(Receipt::Duplicate) => {
            ("duplicate", "It had been done before; nothing was done again.".to_owned())
        }
        Some(Receipt::Parked { error }) => ("failed", format!("It is kept for a later try: {error}")),
        Some(Receipt::Dead { error }) => ("dead", format!("It is kept for a person: {error}")),
        Some(Receipt::Lost { error }) => ("failed", format!("Nobody keeps it: {error}")),
        Some(Receipt::Unavailable { error }) => ("unavailable", format!("Nothing was done: {error}")),
        Some(Receipt::Busy) => {
            ("unavailable", "Another worker is at this message; nothing was done.".to_owned())
        }
        None => {
            return Err(Failure(Problem::new(
                ProblemKind::Internal,
                "no-receipt",
                "The inbox did not answer",
                "The inbox did not say what became of the message: look at the logs of this service.",
            )));
        }
    };
    tracing::info!(%message_id, group = group.name(), result, "tried");
    Ok(Json(TestAnswer { message_id, result, detail }))
}

fn find(app: &Consumer, asked: &TestRequest) -> Result<Arc<Group>, Problem> {
    let name = asked.consumer_group.as_str();
    let Some(group) = app.groups.iter().find(|group| group.name() == name) else {
        let known: Vec<_> = app.groups.iter().map(|group| format!("`{}`", group.name())).collect();
        let known = if known.is_empty() { "no group runs here".to_owned() } else { known.join(", ") };
        let shown: String = name.chars().take(64).collect();
        let topology = app.desk.topology();
        let transforms = topology
            .consumers
            .iter()
            .any(|consumer| consumer.group == name && consumer.semantics == message::Semantics::ExactlyOnce);
        if transforms {
            return Err(Problem::bad_request(
                "no-trial",
                "This group cannot try a message",
                format!(
                    "What the consumer group `{name}` receives and what it makes are one transaction of the broker: send \
                     the message to its topic instead."
                ),
            ));
        }
        return Err(Problem::not_found(
            "unknown-group",
            "There is no such consumer group here",
            format!("No consumer group `{}` runs in this process: {known}.", shown.escape_debug()),
        ));
    };
    let configured = app.desk.topology().consumers.iter().find(|consumer| consumer.group == name);
    match configured {
        Some(consumer) if !consumer.topics.contains(&asked.topic) => {
            let topics: Vec<_> = consumer.topics.iter().map(|topic| format!("`{topic}`")).collect();
            let shown: String = asked.topic.chars().take(64).collect();
            Err(Problem::bad_request(
                "unknown-topic",
                "The group does not listen to this topic",
                format!(
                    "The consumer group `{name}` does not listen to `{}`: it listens to {}.",
                    shown.escape_debug(),
                    topics.join(", ")
                ),
            ))
        }
        _ => Ok(Arc::clone(group)),
    }
}

/// Whether every part works, and what is wrong with those that do not.
#[utoipa::path(
    get, path = "/api/consumer/health", tag = "consumer",
    responses(
        (status = 200, description = "Every part works", body = HealthView),
        (status = 503, description = "A part does not; its `detail` says what is wrong", body = HealthView),
    )
)]
async fn health(State(app): App) -> Response {
    health::answer(&app.desk, &app.health).await
}

async fn scrape(State(app): App) -> Response {
    let mut groups = Vec::with_capacity(app.groups.len());
    for consumer in &app.desk.topology().consumers {
        match app.desk.inbox_counts(&consumer.group).await {
            Ok(counts) => groups.push((consumer.group.clone(), counts)),
            Err(problem) => return Failure(problem).into_response(),
        }
    }
    let deduplication: Vec<_> = app
        .groups
        .iter()
        .flat_map(|group| {
            let steps = group.deduplication().into_iter();
            steps.map(|(step, latency)| (group.name().to_owned(), step, LatencyView::from(latency)))
        })
        .collect();
    let inbox = metrics::inbox(&groups, &(app.lost)(), &deduplication);
    let dead_letters = metrics::dead_letters(&(app.dead_letters)());
    metrics::answer(inbox + &dead_letters + &metrics::flows(&(app.flows)()))
}
