//! Reads request bodies: JSON by its declared type, and never more than the limit.

use admin::{Problem, ProblemKind};
use axum::body::{Bytes, to_bytes};
use axum::extract::Request;
use axum::http::header;
use futures::StreamExt;

use crate::problem::Failure;

/// How much of a body that is too large is still read, so that its sender hears why it was refused instead
/// of finding the connection closed under it.
const DRAINED: usize = 16 << 20;

/// The body of `request`, which must be declared as JSON.
///
/// The declaration is not pedantry: a page of another site can post forms and plain text anywhere without
/// being asked, but not JSON.
pub(crate) async fn json(request: Request, limit: usize) -> Result<Bytes, Failure> {
    check_type(&request)?;
    let declared = request
        .headers()
        .get(header::CONTENT_LENGTH)
        .and_then(|length| length.to_str().ok()?.parse::<usize>().ok());
    let body = request.into_body();
    if declared.is_some_and(|length| length > limit) {
        let mut rest = DRAINED;
        let mut chunks = body.into_data_stream();
        while let Some(Ok(chunk)) = chunks.next().await {
            let Some(left) = rest.checked_sub(chunk.len()) else { break };
            rest = left;
        }
        return Err(too_large(limit));
    }
    to_bytes(body, limit).await.map_err(|error| {
        let source = std::error::Error::source(&error).map(ToString::to_string);
        if source.as_deref() == Some("length limit exceeded") {
            return too_large(limit);
        }
        Failure(Problem::bad_request(
            "broken-body",
            "The body did not arrive whole",
            "The connection ended or broke before the whole body had come: send the request again.",
        ))
    })
}

fn check_type(request: &Request) -> Result<(), Failure> {
    let declared =
        request.headers().get(header::CONTENT_TYPE).map(|value| value.to_str().unwrap_or("unreadable"));
    let media = declared.unwrap_or_default().split(';').next().unwrap_or_default().trim();
    if media.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    let found = match declared {
        Some(found) => {
            let shown: String = found.chars().take(80).collect();
            format!("it is `{}`", shown.escape_debug())
        }
        None => "the request has none".to_owned(),
    };
    Err(Failure(Problem::new(
        ProblemKind::Unsupported,
        "not-json",
        "The body must be JSON",
        format!(
            "`Content-Type` must be `application/json`; {found}. With curl: -H \"Content-Type: application/json\"."
        ),
    )))
}

fn too_large(limit: usize) -> Failure {
    Failure(Problem::new(
        ProblemKind::TooLarge,
        "body-too-large",
        "The body is too large",
        format!(
            "The body has more than {limit} bytes, which is the limit: send a reference to the data, or raise the limit."
        ),
    ))
}
