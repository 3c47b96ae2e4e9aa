//! Who may call: listeners without tokens are for this machine, and for its programs, not for web pages.
//!
//! A page of another site can make a browser call a loopback address. It can point its own name at 127.0.0.1
//! and then even read the answer (DNS rebinding), so the host must be one of ours; and it can post without
//! asking, so requests that write must not come from another origin.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use admin::{Problem, ProblemKind};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, Method, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::problem::Failure;

/// Bytes of request headers at most.
const HEADERS: usize = 16 << 10;

/// The names under which a listener may be called, beside `localhost` and plain addresses.
#[derive(Clone, Debug, Default)]
pub struct Hosts(Arc<[String]>);

impl Hosts {
    /// These names, without ports.
    pub fn new(names: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Self(names.into_iter().map(|name| name.into().to_ascii_lowercase()).collect())
    }

    /// A name could be pointed here by anybody who owns it; an address is what it is.
    fn allow(&self, host: &str) -> bool {
        let name = without_port(host).to_ascii_lowercase();
        let address = name.trim_start_matches('[').trim_end_matches(']');
        name == "localhost"
            || name.ends_with(".localhost")
            || address.parse::<IpAddr>().is_ok()
            || self.0.contains(&name)
    }
}

/// Checks a request before anything else sees it, and logs what became of it.
pub(crate) async fn guard(State(hosts): State<Hosts>, request: Request, next: Next) -> Response {
    let start = Instant::now();
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let mut response = match check(&hosts, &request) {
        Ok(()) => next.run(request).await,
        Err(problem) => Failure(problem).into_response(),
    };
    response
        .headers_mut()
        .insert(header::X_CONTENT_TYPE_OPTIONS, header::HeaderValue::from_static("nosniff"));
    tracing::debug!(%method, path, status = response.status().as_u16(), elapsed = ?start.elapsed(), "answered");
    response
}

fn check(hosts: &Hosts, request: &Request) -> Result<(), Problem> {
    let headers = request.headers();
    let size: usize = headers.iter().map(|(name, value)| name.as_str().len() + value.len()).sum();
    if size > HEADERS {
        return Err(Problem::new(
            ProblemKind::HeadersTooLarge,
            "headers-too-large",
            "The request headers are too large",
            format!(
                "The request headers have {size} bytes and {HEADERS} is the limit: put such data in the body."
            ),
        ));
    }
    let host = match (request.uri().authority(), headers.get(header::HOST)) {
        (Some(authority), _) => Some(authority.as_str()),
        (None, Some(host)) => Some(host.to_str().unwrap_or("")),
        (None, None) => None,
    };
    if let Some(host) = host.filter(|host| !hosts.allow(host)) {
        let shown: String = host.chars().take(80).collect();
        return Err(forbidden(
            "foreign-host",
            "This service does not answer to that name",
            format!(
                "The request is for the host `{}`: call it as localhost, or by its address.",
                shown.escape_debug()
            ),
        ));
    }
    if matches!(*request.method(), Method::GET | Method::HEAD | Method::OPTIONS) {
        return Ok(());
    }
    check_origin(headers, host)
}

fn check_origin(headers: &HeaderMap, host: Option<&str>) -> Result<(), Problem> {
    let text = |name| headers.get(name).map(|value| value.to_str().unwrap_or(""));
    let same = match text(header::ORIGIN) {
        Some(origin) => {
            let origin = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"));
            origin.is_some_and(|origin| host.is_some_and(|host| origin.eq_ignore_ascii_case(host)))
        }
        None => !matches!(
            text(header::HeaderName::from_static("sec-fetch-site")),
            Some("cross-site" | "same-site")
        ),
    };
    if same {
        return Ok(());
    }
    Err(forbidden(
        "foreign-origin",
        "Other sites may not write here",
        "The request comes from a web page of another origin: call this service from a program, or from its own page."
            .to_owned(),
    ))
}

fn forbidden(code: &'static str, title: &'static str, detail: String) -> Problem {
    Problem::new(ProblemKind::Forbidden, code, title, detail)
}

fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        // The colons of a bare IPv6 address are inside brackets.
        Some((name, port)) if !port.contains(']') && port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_local_names_are_ours_and_other_names_are_not() {
        let hosts = Hosts::new(["Producer"]);
        for host in [
            "localhost",
            "LOCALHOST:5299",
            "127.0.0.1:1",
            "[::1]:5299",
            "[::1]",
            "a.localhost",
            "producer:80",
        ] {
            assert!(hosts.allow(host), "{host}");
        }
        for host in
            ["", "evil.example", "localhost.evil.example:5299", "127.0.0.1.evil.example", "producer.evil"]
        {
            assert!(!hosts.allow(host), "{host}");
        }
    }
}
