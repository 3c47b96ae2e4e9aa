//! Dead letters: look, requeue, mend, discard.

use admin::{
    ActionAnswer, BulkAnswer, BulkRequest, DeadView, EditRequest, ListFilter, MessageView, PageView,
};
use axum::Json;
use axum::extract::{Request, State};

use super::{ACTOR, App};
use crate::body;
use crate::problem::{Failure, ProblemView, Problems};
use crate::query::{Asked, Named};

/// Dead messages, newest first.
#[utoipa::path(
    get, path = "/api/dead", tag = "dead letters",
    params(
        ("topic" = Option<String>, Query, description = "Of this topic"),
        ("key" = Option<String>, Query, description = "Of this key"),
        ("limit" = Option<usize>, Query, description = "1 to 1000; 100 when left out"),
        ("after" = Option<String>, Query, description = "The `next` of the page before"),
    ),
    responses((status = 200, description = "A part of the list", body = PageView<MessageView>), Problems)
)]
pub(super) async fn list(State(app): App, asked: Asked) -> Result<Json<PageView<MessageView>>, Failure> {
    let asked = asked.only(&["topic", "key", "limit", "after"])?;
    let mut page = asked.page()?;
    page.newest_first = true;
    Ok(Json(app.desk.list(ListFilter::dead(asked.text("topic"), asked.text("key")), page).await?))
}

/// A Dead message and its tries.
#[utoipa::path(
    get, path = "/api/dead/{id}", tag = "dead letters",
    params(("id" = String, Path, description = "The message")),
    responses(
        (status = 200, description = "The message and its tries", body = DeadView),
        (status = 404, description = "There is no such message", body = ProblemView, content_type = "application/problem+json"),
        (status = 409, description = "It is not Dead", body = ProblemView, content_type = "application/problem+json"),
        Problems,
    )
)]
pub(super) async fn show(State(app): App, Named(id): Named) -> Result<Json<DeadView>, Failure> {
    Ok(Json(app.desk.dead_show(&id).await?))
}

/// Mend a Dead message and send it again. What is left out stays; the original is kept in the audit.
#[utoipa::path(
    put, path = "/api/dead/{id}", tag = "dead letters", request_body = EditRequest,
    params(("id" = String, Path, description = "The message")),
    responses(
        (status = 200, description = "It is on its way again", body = ActionAnswer),
        (status = 404, description = "There is no such message", body = ProblemView, content_type = "application/problem+json"),
        (status = 409, description = "It is not Dead", body = ProblemView, content_type = "application/problem+json"),
        Problems,
    )
)]
pub(super) async fn edit(
    State(app): App,
    Named(id): Named,
    request: Request,
) -> Result<Json<ActionAnswer>, Failure> {
    let body = body::json(request, app.body_limit).await?;
    let answer = app.desk.edit(&id, EditRequest::parse(&body)?, ACTOR).await?;
    tracing::info!(message_id = %answer.message_id, "edited and requeued");
    Ok(Json(answer))
}

/// Send a Dead message again as it is.
#[utoipa::path(
    post, path = "/api/dead/{id}/requeue", tag = "dead letters",
    params(
        ("id" = String, Path, description = "The message"),
        ("anyway" = Option<bool>, Query, description = "Even if it is older than its consumers remember: it may be done twice"),
    ),
    responses(
        (status = 200, description = "It is on its way again", body = ActionAnswer),
        (status = 404, description = "There is no such message", body = ProblemView, content_type = "application/problem+json"),
        (status = 409, description = "It is not Dead, or too old", body = ProblemView, content_type = "application/problem+json"),
        Problems,
    )
)]
pub(super) async fn requeue(
    State(app): App,
    Named(id): Named,
    asked: Asked,
) -> Result<Json<ActionAnswer>, Failure> {
    let anyway = asked.only(&["anyway"])?.read("anyway", "true or false")?.unwrap_or_default();
    let answer = app.desk.requeue(&id, anyway, ACTOR).await?;
    tracing::info!(message_id = %answer.message_id, "requeued");
    Ok(Json(answer))
}

/// Give up a Dead message, with an entry in the audit.
#[utoipa::path(
    post, path = "/api/dead/{id}/discard", tag = "dead letters",
    params(("id" = String, Path, description = "The message")),
    responses(
        (status = 200, description = "It is gone", body = ActionAnswer),
        (status = 404, description = "There is no such message", body = ProblemView, content_type = "application/problem+json"),
        (status = 409, description = "It is not Dead", body = ProblemView, content_type = "application/problem+json"),
        Problems,
    )
)]
pub(super) async fn discard(State(app): App, Named(id): Named) -> Result<Json<ActionAnswer>, Failure> {
    let answer = app.desk.discard(&id, ACTOR).await?;
    tracing::info!(message_id = %answer.message_id, "discarded");
    Ok(Json(answer))
}

/// Send many Dead messages again.
#[utoipa::path(
    post, path = "/api/dead/requeue", tag = "dead letters", request_body = BulkRequest,
    responses((status = 200, description = "What was done", body = BulkAnswer), Problems)
)]
pub(super) async fn requeue_matching(State(app): App, request: Request) -> Result<Json<BulkAnswer>, Failure> {
    let asked = BulkRequest::parse(&body::json(request, app.body_limit).await?)?;
    let answer =
        app.desk.requeue_matching(asked.filter()?, asked.dry_run, asked.anyway, ACTOR, |_| {}).await?;
    tracing::info!(matched = answer.matched, done = answer.done, dry_run = answer.dry_run, "requeued many");
    Ok(Json(answer))
}

/// Give up many Dead messages, each with an entry in the audit.
#[utoipa::path(
    post, path = "/api/dead/discard", tag = "dead letters", request_body = BulkRequest,
    responses((status = 200, description = "What was done", body = BulkAnswer), Problems)
)]
pub(super) async fn discard_matching(State(app): App, request: Request) -> Result<Json<BulkAnswer>, Failure> {
    let asked = BulkRequest::parse(&body::json(request, app.body_limit).await?)?;
    let answer = app.desk.discard_matching(asked.filter()?, asked.dry_run, ACTOR, |_| {}).await?;
    tracing::info!(matched = answer.matched, done = answer.done, dry_run = answer.dry_run, "discarded many");
    Ok(Json(answer))
}
