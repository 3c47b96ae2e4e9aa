//! The overview page, served from the program itself: no folder to install and nothing to fetch elsewhere.
//!
//! The policy allows only files of our own: even if some payload or error text found its way into the page as
//! markup, it could neither run nor load anything.

use axum::Router;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use axum::routing::get;

const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The page and its files.
pub(crate) fn router() -> Router {
    Router::new()
        .route("/", get(|| file("text/html; charset=utf-8", include_str!("../assets/overview.html"))))
        .route(
            "/assets/overview.css",
            get(|| file("text/css; charset=utf-8", include_str!("../assets/overview.css"))),
        )
        .route(
            "/assets/overview.js",
            get(|| file("text/javascript; charset=utf-8", include_str!("../assets/overview.js"))),
        )
        .route("/favicon.svg", get(|| file("image/svg+xml", include_str!("../assets/favicon.svg"))))
}

async fn file(media: &'static str, content: &'static str) -> Response {
    let headers = [
        (header::CONTENT_TYPE, media),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-cache"),
    ];
    (headers, content).into_response()
}
