//! Messages: send, acknowledge, look, delete.

use admin::{
    AcknowledgeAnswer, AcknowledgeRequest, ActionAnswer, ListFilter, MessageView, PageView, Problem,
    SendAnswer, SendRequest,
};
use axum::Json;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use message::Status;

use super::{ACTOR, App};
use crate::body;
use crate::problem::{Failure, ProblemView, Problems};
use crate::query::{Asked, Named};

type Listed = Result<Json<PageView<MessageView>>, Failure>;

/// Take a message in; it is delivered from here on.
#[utoipa::path(
    post, path = "/api/messages/send", tag = "messages", request_body = SendRequest,
    params(("Idempotency-Key" = Option<String>, Header, description = "The second request with a key gets the first one's answer")),
    responses(
        (status = 202, description = "It is stored and will be delivered", body = SendAnswer),
        (status = 409, description = "The key or id belongs to a different request", body = ProblemView, content_type = "application/problem+json"),
        (status = 413, description = "It is too large", body = ProblemView, content_type = "application/problem+json"),
        (status = 415, description = "The body is not declared as JSON", body = ProblemView, content_type = "application/problem+json"),
        Problems,
    )
)]
pub(super) async fn send(
    State(app): App,
    request: Request,
) -> Result<(StatusCode, Json<SendAnswer>), Failure> {
    let key = idempotency_key(&request)?;
    let body = body::json(request, app.body_limit).await?;
    let asked = SendRequest::parse(&body)?;
    let topic = asked.topic.clone();
    let answer = app.desk.send(asked, key.as_deref()).await?;
    tracing::info!(message_id = %answer.message_id, topic, repeated = answer.repeated, "taken in");
    Ok((StatusCode::ACCEPTED, Json(answer)))
}

fn idempotency_key(request: &Request) -> Result<Option<String>, Problem> {
    let mut given = request.headers().get_all("idempotency-key").iter();
    let Some(key) = given.next() else { return Ok(None) };
    if given.next().is_some() {
        return Err(Problem::bad_request(
            "bad-idempotency-key",
            "That cannot be an idempotency key",
            "`Idempotency-Key` is given twice: leave one of them out.",
        ));
    }
    // Bytes that are not text become a character that no key may have: the desk says what may be.
    Ok(Some(String::from_utf8_lossy(key.as_bytes()).into_owned()))
}

/// A consumer group is done with a message. Repeated, it changes nothing and answers the same.
#[utoipa::path(
    post, path = "/api/messages/acknowledge", tag = "messages", request_body = AcknowledgeRequest,
    responses(
        (status = 200, description = "It is recorded", body = AcknowledgeAnswer),
        (status = 404, description = "There is no such message", body = ProblemView, content_type = "application/problem+json"),
        (status = 409, description = "It was not sent, or the group was not asked", body = ProblemView, content_type = "application/problem+json"),
        Problems,
    )
)]
pub(super) async fn acknowledge(
    State(app): App,
    request: Request,
) -> Result<Json<AcknowledgeAnswer>, Failure> {
    let body = body::json(request, app.body_limit).await?;
    let answer = app.desk.acknowledge(AcknowledgeRequest::parse(&body)?).await?;
    tracing::info!(
        message_id = %answer.message_id, group = answer.consumer_group, repeated = answer.repeated, "acknowledged"
    );
    Ok(Json(answer))
}

/// All that is known of a message.
#[utoipa::path(
    get, path = "/api/messages/status/{id}", tag = "messages",
    params(("id" = String, Path, description = "As `send` answered it")),
    responses(
        (status = 200, description = "The message", body = MessageView),
        (status = 404, description = "There is no such message", body = ProblemView, content_type = "application/problem+json"),
        Problems,
    )
)]
pub(super) async fn status(
    State(app): App,
    Named(id): Named,
    asked: Asked,
) -> Result<Json<MessageView>, Failure> {
    asked.only(&[])?;
    Ok(Json(app.desk.status(&id).await?))
}

/// Messages in the order of writing.
#[utoipa::path(
    get, path = "/api/messages", tag = "messages",
    params(
        ("status" = Option<String>, Query, description = "Pending, InFlight, Sent, Failed or Dead; several with commas"),
        ("topic" = Option<String>, Query, description = "Of this topic"),
        ("key" = Option<String>, Query, description = "Of this key"),
        ("consumerGroup" = Option<String>, Query, description = "That this group must acknowledge"),
        ("newestFirst" = Option<bool>, Query, description = "From the newest to the oldest"),
        ("limit" = Option<usize>, Query, description = "1 to 1000; 100 when left out"),
        ("after" = Option<String>, Query, description = "The `next` of the page before"),
    ),
    responses((status = 200, description = "A part of the list", body = PageView<MessageView>), Problems)
)]
pub(super) async fn list(State(app): App, asked: Asked) -> Listed {
    let asked = asked.only(&["status", "topic", "key", "consumerGroup", "newestFirst", "limit", "after"])?;
    let statuses = asked.text("status").unwrap_or_default();
    let statuses = statuses.split(',').filter(|word| !word.is_empty()).map(str::parse::<Status>);
    let statuses = statuses.collect::<Result<_, _>>().map_err(|unknown| {
        Problem::bad_request("bad-status", "That is not a status", format!("{unknown}."))
    })?;
    let filter = ListFilter {
        statuses,
        topic: asked.text("topic"),
        key: asked.text("key"),
        consumer_group: asked.text("consumerGroup"),
        unacknowledged_by: None,
    };
    let mut page = asked.page()?;
    page.newest_first = asked.read("newestFirst", "true or false")?.unwrap_or_default();
    Ok(Json(app.desk.list(filter, page).await?))
}

/// Messages that are not sent yet: Pending, InFlight and Failed.
#[utoipa::path(
    get, path = "/api/messages/pending", tag = "messages",
    params(
        ("limit" = Option<usize>, Query, description = "1 to 1000; 100 when left out"),
        ("after" = Option<String>, Query, description = "The `next` of the page before"),
    ),
    responses((status = 200, description = "A part of the list", body = PageView<MessageView>), Problems)
)]
pub(super) async fn pending(State(app): App, asked: Asked) -> Listed {
    let page = asked.only(&["limit", "after"])?.page()?;
    Ok(Json(app.desk.list(ListFilter::unsent(), page).await?))
}

/// Messages that a group must acknowledge, or has.
#[utoipa::path(
    get, path = "/api/messages/consumer-group/{group}", tag = "messages",
    params(
        ("group" = String, Path, description = "The consumer group"),
        ("limit" = Option<usize>, Query, description = "1 to 1000; 100 when left out"),
        ("after" = Option<String>, Query, description = "The `next` of the page before"),
    ),
    responses(
        (status = 200, description = "A part of the list", body = PageView<MessageView>),
        (status = 404, description = "There is no such group", body = ProblemView, content_type = "application/problem+json"),
        Problems,
    )
)]
pub(super) async fn of_group(State(app): App, Named(group): Named, asked: Asked) -> Listed {
    let page = asked.only(&["limit", "after"])?.page()?;
    let filter = ListFilter { consumer_group: Some(group), ..ListFilter::default() };
    Ok(Json(app.desk.list(filter, page).await?))
}

/// Messages that are Sent and that a group has not acknowledged yet.
#[utoipa::path(
    get, path = "/api/messages/unacknowledged/{group}", tag = "messages",
    params(
        ("group" = String, Path, description = "The consumer group"),
        ("limit" = Option<usize>, Query, description = "1 to 1000; 100 when left out"),
        ("after" = Option<String>, Query, description = "The `next` of the page before"),
    ),
    responses(
        (status = 200, description = "A part of the list", body = PageView<MessageView>),
        (status = 404, description = "There is no such group", body = ProblemView, content_type = "application/problem+json"),
        Problems,
    )
)]
pub(super) async fn unacknowledged(State(app): App, Named(group): Named, asked: Asked) -> Listed {
    let page = asked.only(&["limit", "after"])?.page()?;
    let filter = ListFilter { unacknowledged_by: Some(group), ..ListFilter::default() };
    Ok(Json(app.desk.list(filter, page).await?))
}

/// Delete the record of a message, with an entry in the audit.
#[utoipa::path(
    delete, path = "/api/messages/{id}", tag = "messages",
    params(("id" = String, Path, description = "The message")),
    responses(
        (status = 200, description = "It is gone", body = ActionAnswer),
        (status = 404, description = "There is no such message", body = ProblemView, content_type = "application/problem+json"),
        (status = 409, description = "A relay is sending it", body = ProblemView, content_type = "application/problem+json"),
        Problems,
    )
)]
pub(super) async fn delete(State(app): App, Named(id): Named) -> Result<Json<ActionAnswer>, Failure> {
    let answer = app.desk.delete(&id, ACTOR).await?;
    tracing::info!(message_id = %answer.message_id, "deleted");
    Ok(Json(answer))
}
