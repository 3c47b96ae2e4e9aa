//! What every listener has around its endpoints: the guard, the API description, and answers for paths and
//! methods that do not exist.

use admin::{Problem, ProblemKind};
use axum::extract::Request;
use axum::http::header;
use axum::routing::get;
use axum::{Router, middleware};
use utoipa_axum::router::OpenApiRouter;

use crate::guard::{Hosts, guard};
use crate::problem::Failure;

/// The finished listener.
pub(crate) fn framed(api: OpenApiRouter, plain: Router, hosts: Hosts) -> Router {
    let (router, description) = api.split_for_parts();
    let json: axum::body::Bytes =
        description.to_json().expect("a description made of strings is always JSON").into();
    let description = move || async move { ([(header::CONTENT_TYPE, "application/json")], json) };
    router
        .merge(plain)
        .route("/openapi.json", get(description))
        .fallback(no_such_path)
        .method_not_allowed_fallback(no_such_method)
        .layer(middleware::from_fn_with_state(hosts, guard))
}

async fn no_such_path(request: Request) -> Failure {
    Failure(Problem::not_found(
        "unknown-path",
        "There is nothing at this path",
        format!("There is nothing at `{}`: /openapi.json describes what there is.", shown(&request)),
    ))
}

async fn no_such_method(request: Request) -> Failure {
    Failure(Problem::new(
        ProblemKind::NotAllowed,
        "wrong-method",
        "The path does not take this method",
        format!(
            "`{}` does not take {}: the `Allow` header names what it takes, /openapi.json describes it.",
            shown(&request),
            request.method()
        ),
    ))
}

fn shown(request: &Request) -> String {
    request.uri().path().chars().take(120).collect::<String>().escape_debug().to_string()
}
