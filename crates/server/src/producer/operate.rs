//! What an operator watches: lanes, routes, held keys, the audit, counts and health.

use admin::{
    AuditView, ConsumerView, Contract, CountsView, HoldView, LanesAnswer, LanesRequest, LanesView,
    PageRequest, PageView, RouteView,
};
use axum::Json;
use axum::extract::{Request, State};
use axum::response::Response;
use serde::Serialize;
use utoipa::ToSchema;

use super::App;
use crate::body;
use crate::health::{self, HealthView};
use crate::problem::{Failure, Problems};
use crate::query::Asked;

/// What is configured.
#[derive(Serialize, ToSchema)]
pub(super) struct RoutesView {
    /// Where topics go.
    routes: Vec<RouteView>,
    /// Who listens.
    consumers: Vec<ConsumerView>,
}

/// Whether every part works, and what is wrong with those that do not.
#[utoipa::path(
    get, path = "/api/messages/health", tag = "operation",
    responses(
        (status = 200, description = "Every part works", body = HealthView),
        (status = 503, description = "A part does not; its `detail` says what is wrong", body = HealthView),
    )
)]
pub(super) async fn health(State(app): App) -> Response {
    health::answer(&app.desk, &app.health).await
}

/// The lanes and the relays that work on them.
#[utoipa::path(
    get, path = "/api/lanes", tag = "operation",
    responses((status = 200, description = "The lanes", body = LanesView), Problems)
)]
pub(super) async fn lanes(State(app): App) -> Result<Json<LanesView>, Failure> {
    Ok(Json(app.desk.lanes().await?))
}

/// Ask for another number of lanes. Running relays drain first.
#[utoipa::path(
    put, path = "/api/lanes", tag = "operation", request_body = LanesRequest,
    responses((status = 200, description = "Whether it is in force already", body = LanesAnswer), Problems)
)]
pub(super) async fn set_lanes(State(app): App, request: Request) -> Result<Json<LanesAnswer>, Failure> {
    let asked = LanesRequest::parse(&body::json(request, app.body_limit).await?)?;
    let answer = app.desk.set_lanes(asked.count).await?;
    tracing::info!(count = answer.count, in_force = answer.in_force, "another number of lanes");
    Ok(Json(answer))
}

/// The routes and consumers that are configured.
#[utoipa::path(
    get, path = "/api/routes", tag = "operation",
    responses((status = 200, description = "What is configured", body = RoutesView), Problems)
)]
pub(super) async fn routes(State(app): App) -> Json<RoutesView> {
    let topology = app.desk.topology();
    Json(RoutesView { routes: topology.routes.clone(), consumers: topology.consumers.clone() })
}

/// What is promised for each route and each group, by what, and what remains.
#[utoipa::path(
    get, path = "/api/contract", tag = "operation",
    responses((status = 200, description = "What is promised", body = Contract), Problems)
)]
pub(super) async fn contract(State(app): App) -> Json<Contract> {
    Json((*app.contract).clone())
}

/// Keys whose messages wait behind another.
#[utoipa::path(
    get, path = "/api/holds", tag = "operation",
    params(("limit" = Option<usize>, Query, description = "1 to 1000; 100 when left out")),
    responses((status = 200, description = "The keys", body = PageView<HoldView>), Problems)
)]
pub(super) async fn holds(State(app): App, asked: Asked) -> Result<Json<PageView<HoldView>>, Failure> {
    let PageRequest { limit, .. } = asked.only(&["limit"])?.page()?;
    Ok(Json(PageView { items: app.desk.holds(limit).await?, next: None }))
}

/// What operators did, newest first.
#[utoipa::path(
    get, path = "/api/audit", tag = "operation",
    params(
        ("limit" = Option<usize>, Query, description = "1 to 1000; 100 when left out"),
        ("after" = Option<String>, Query, description = "The `next` of the page before"),
    ),
    responses((status = 200, description = "A part of the list", body = PageView<AuditView>), Problems)
)]
pub(super) async fn audit(State(app): App, asked: Asked) -> Result<Json<PageView<AuditView>>, Failure> {
    Ok(Json(app.desk.audit(asked.only(&["limit", "after"])?.page()?).await?))
}

/// How many messages are where, and what has happened so far.
#[utoipa::path(
    get, path = "/api/counts", tag = "operation",
    responses((status = 200, description = "The counts", body = CountsView), Problems)
)]
pub(super) async fn counts(State(app): App) -> Result<Json<CountsView>, Failure> {
    Ok(Json(app.desk.counts().await?))
}
