//! Problems on the wire: `application/problem+json` (RFC 9457).

use admin::{Problem, ProblemKind};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::{IntoResponses, ToSchema};

/// Why a request was not done.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ProblemView {
    /// Names the kind of problem.
    #[serde(rename = "type")]
    #[schema(example = "urn:postrider:problem:unknown-topic")]
    pub urn: String,
    /// What is wrong, the same for every case of this code.
    #[schema(example = "No route takes this topic")]
    pub title: &'static str,
    /// The HTTP status.
    #[schema(example = 400)]
    pub status: u16,
    /// What is wrong here, and what to do.
    pub detail: String,
    /// A stable word for programs.
    #[schema(example = "unknown-topic")]
    pub code: &'static str,
}

/// The problems that any call may answer with, for the API description.
#[derive(IntoResponses)]
#[expect(dead_code, reason = "read by utoipa, never built")]
pub(crate) enum Problems {
    /// The request is wrong; `detail` says where.
    #[response(status = 400, content_type = "application/problem+json")]
    BadRequest(#[to_schema] ProblemView),
    /// The caller's host or origin is not allowed.
    #[response(status = 403, content_type = "application/problem+json")]
    Forbidden(#[to_schema] ProblemView),
    /// The store cannot be used now; try again.
    #[response(status = 503, content_type = "application/problem+json")]
    Unavailable(#[to_schema] ProblemView),
}

/// The answer to a request that was not done.
pub(crate) struct Failure(pub(crate) Problem);

impl From<Problem> for Failure {
    fn from(problem: Problem) -> Self {
        Self(problem)
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let problem = self.0;
        let status = status(problem.kind);
        if status.is_server_error() {
            tracing::warn!(code = problem.code, detail = problem.detail, "a request failed");
        }
        let view = ProblemView {
            urn: format!("urn:postrider:problem:{}", problem.code),
            title: problem.title,
            status: status.as_u16(),
            detail: problem.detail,
            code: problem.code,
        };
        let body = serde_json::to_vec(&view).expect("strings and a number are always JSON");
        let mut response =
            (status, [(header::CONTENT_TYPE, "application/problem+json")], body).into_response();
        if let Some(wait) = problem.retry_after {
            // Whole seconds, rounded up: a caller that comes back too early would fail again.
            let seconds = wait.as_millis().div_ceil(1000).max(1);
            let value = HeaderValue::from_str(&seconds.to_string()).expect("digits are a header value");
            response.headers_mut().insert(header::RETRY_AFTER, value);
        }
        response
    }
}

fn status(kind: ProblemKind) -> StatusCode {
    match kind {
        ProblemKind::BadRequest => StatusCode::BAD_REQUEST,
        ProblemKind::Forbidden => StatusCode::FORBIDDEN,
        ProblemKind::NotFound => StatusCode::NOT_FOUND,
        ProblemKind::NotAllowed => StatusCode::METHOD_NOT_ALLOWED,
        ProblemKind::Conflict => StatusCode::CONFLICT,
        ProblemKind::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
        ProblemKind::Unsupported => StatusCode::UNSUPPORTED_MEDIA_TYPE,
        ProblemKind::HeadersTooLarge => StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
        ProblemKind::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        ProblemKind::Internal => StatusCode::INTERNAL_SERVER_ERROR,
    }
}
