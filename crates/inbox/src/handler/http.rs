//! Handlers behind HTTP: the payload is POSTed, everything else travels in headers.
//!
//! What an answer means is decided by one question: is this message to blame, or would none pass now? The first
//! costs the message an attempt or its life, the second pauses the group and costs nothing.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, Utc};
use reqwest::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};
use reqwest::{Client, Response, StatusCode, Url, redirect};
use store::{Arrival, Handled};

use super::{BadHandler, Ran, retry};

/// How long an endpoint has to answer when nothing else is said.
const TIMEOUT: Duration = Duration::from_secs(10);

/// How long it takes at most to find out that nobody is there.
const CONNECT: Duration = Duration::from_secs(5);

/// More of an answer is not read: it is only for the error text.
const BODY: usize = 64 << 10;

/// Characters of an answer that are kept in the error.
const SHOWN: usize = 200;

/// Headers that belong to the connection or the body; the writer of a message must not decide them.
const NOT_FORWARDED: [&str; 12] = [
    "connection",
    "content-length",
    "expect",
    "host",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "te",
    "trailer",
    "trailers",
    "transfer-encoding",
    "upgrade",
];

/// POSTs each message to one URL.
///
/// 2xx is done. 408, 425, 429 and 5xx are tried again; so is an answer that does not come in time. 502, 503, 504 and
/// an endpoint that cannot be reached pause the group, and so do 401, 405, 407 and redirects, which no message can
/// mend. Every other answer says that this message will never succeed.
///
/// A message that gets one of the answers that pause the group, or ends the endpoint, again and again while other
/// messages are handled is to blame after all: it is put aside for a later try, which costs it an attempt, and the
/// group goes on. An endpoint that answers like this for all messages, or that cannot be reached, costs none of them
/// anything until `give_up_after` is over.
#[derive(Clone)]
pub struct HttpHandler {
    client: Client,
    url: Url,
    timeout: Duration,
    headers: Arc<HeaderMap>,
}

impl HttpHandler {
    /// A handler at `url`.
    ///
    /// # Errors
    /// When `url` is not an absolute http or https URL.
    pub fn new(url: &str) -> Result<Self, BadHandler> {
        let url = endpoint(url)?;
        // No proxy from the environment: whether the endpoint is down is judged by connecting to it.
        let client = Client::builder()
            .redirect(redirect::Policy::none())
            .connect_timeout(CONNECT)
            .no_proxy()
            .user_agent(concat!("postrider/", env!("CARGO_PKG_VERSION")))
            .build()
            .map_err(|error| BadHandler(format!("cannot make an HTTP client: {error}")))?;
        Ok(Self { client, url, timeout: TIMEOUT, headers: Arc::default() })
    }

    /// How long the endpoint has to answer.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// A header for every request, such as an authorization. It wins over the message's own and is never logged.
    ///
    /// # Errors
    /// When HTTP cannot carry such a name or value.
    pub fn header(mut self, name: &str, value: &str) -> Result<Self, BadHandler> {
        let bad =
            |_| BadHandler(format!("`{name}` cannot be a header, or its value has a forbidden character"));
        let key = HeaderName::try_from(name).map_err(|error| bad(error.to_string()))?;
        let mut value = HeaderValue::try_from(value).map_err(|error| bad(error.to_string()))?;
        value.set_sensitive(true);
        Arc::make_mut(&mut self.headers).insert(key, value);
        Ok(self)
    }

    /// The client's own time limit, and a moment for it to say so.
    pub(crate) fn limit(&self) -> Duration {
        self.timeout + Duration::from_secs(2)
    }

    pub(crate) async fn handle(&self, group: &str, arrival: &Arrival) -> Ran {
        match self.post(group, arrival).await {
            Ok(response) => Ran { handled: self.judge(response).await, reached: true },
            Err(ran) => ran,
        }
    }

    /// The same, for those who want to know what was answered to a message that is done.
    pub(crate) async fn ask(&self, group: &str, arrival: &Arrival, most: usize) -> Result<Vec<u8>, Ran> {
        let response = self.post(group, arrival).await?;
        if !response.status().is_success() {
            return Err(Ran { handled: self.judge(response).await, reached: true });
        }
        let reached = |error: String| Ran { handled: retry(error), reached: true };
        match whole(response, most).await {
            Ok(Some(body)) => Ok(body),
            Ok(None) => Err(reached(format!("{} answered with more than {most} bytes", shown(&self.url)))),
            Err(error) => {
                let (shown, cause) = (shown(&self.url), cause(&error));
                Err(reached(format!("{shown} broke off in the middle of its answer: {cause}")))
            }
        }
    }

    async fn post(&self, group: &str, arrival: &Arrival) -> Result<Response, Ran> {
        let mut headers = headers(group, arrival);
        headers.extend(self.headers.as_ref().clone());
        let request = self.client.post(self.url.clone()).headers(headers).timeout(self.timeout);
        match request.body(arrival.message.payload.clone()).send().await {
            Ok(response) => Ok(response),
            Err(error) => {
                let reached = !error.is_connect() && !error.is_builder();
                Err(Ran { handled: self.failed(&error).await, reached })
            }
        }
    }

    async fn judge(&self, response: Response) -> Handled {
        let status = response.status();
        if status.is_success() {
            // The connection can be used again only when the answer was read.
            start_of(response).await;
            return Handled::Done;
        }
        let after = retry_after(response.headers(), Utc::now());
        let body = start_of(response).await;
        let shown = shown(&self.url);
        let mut error = format!("{shown} answered {status}");
        if !body.is_empty() {
            let _ = write!(error, ": {body}");
        }
        match status {
            StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_EARLY | StatusCode::TOO_MANY_REQUESTS => {
                Handled::Retry { error, after }
            }
            StatusCode::BAD_GATEWAY
            | StatusCode::SERVICE_UNAVAILABLE
            | StatusCode::GATEWAY_TIMEOUT
            | StatusCode::UNAUTHORIZED
            | StatusCode::METHOD_NOT_ALLOWED
            | StatusCode::PROXY_AUTHENTICATION_REQUIRED => Handled::Unavailable { error },
            _ if status.is_redirection() => Handled::Unavailable {
                error: format!("{error} (redirects are not followed: configure the final address)"),
            },
            _ if status.is_client_error() => Handled::Dead { error },
            _ => Handled::Retry { error, after },
        }
    }

    async fn failed(&self, error: &reqwest::Error) -> Handled {
        let shown = shown(&self.url);
        let cause = cause(error);
        if error.is_connect() {
            Handled::Unavailable { error: format!("{shown} cannot be reached: {cause}") }
        } else if error.is_builder() {
            Handled::Dead { error: format!("no request to {shown} can be made of this message: {cause}") }
        } else if error.is_timeout() {
            retry(format!("{shown} did not answer within {:?}", self.timeout))
        } else if self.is_gone().await {
            // It died under the request: that says nothing about the message.
            Handled::Unavailable { error: format!("{shown} went away: {cause}") }
        } else {
            retry(format!("{shown} broke off without an answer: {cause}"))
        }
    }

    /// Whether nobody listens at the endpoint any more.
    async fn is_gone(&self) -> bool {
        let (Some(host), Some(port)) = (self.url.host_str(), self.url.port_or_known_default()) else {
            return false;
        };
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let connect = tokio::net::TcpStream::connect((host, port));
        !matches!(tokio::time::timeout(CONNECT, connect).await, Ok(Ok(_)))
    }
}

/// An absolute http or https URL.
pub(crate) fn endpoint(text: &str) -> Result<Url, BadHandler> {
    let url: Url = text.parse().map_err(|error| {
        BadHandler(format!("the URL cannot be read ({error}): write it as http://host:port/path"))
    })?;
    if !matches!(url.scheme(), "http" | "https") || url.host_str().is_none_or(str::is_empty) {
        return Err(BadHandler(format!("`{}` is not an http or https URL", shown(&url))));
    }
    Ok(url)
}

/// The URL for people: user, password and query may be secrets.
pub(crate) fn shown(url: &Url) -> String {
    let host = url.host_str().unwrap_or_default();
    let port = url.port().map(|port| format!(":{port}")).unwrap_or_default();
    format!("{}://{host}{port}{}", url.scheme(), url.path())
}

/// The innermost cause; reqwest's own text says "error sending request" and the URL.
pub(crate) fn cause(error: &reqwest::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    if std::ptr::addr_eq(cause, error) { "the request failed".to_owned() } else { cause.to_string() }
}

fn headers(group: &str, arrival: &Arrival) -> HeaderMap {
    let message = &arrival.message;
    let mut headers = HeaderMap::new();
    for (name, value) in &message.headers {
        let Ok(name) = HeaderName::try_from(name.as_str()) else { continue };
        if NOT_FORWARDED.contains(&name.as_str()) {
            continue;
        }
        let plain = value.bytes().all(|byte| byte.is_ascii_graphic() || byte == b' ');
        let value = if plain { value.clone() } else { encode(value) };
        headers.insert(name, HeaderValue::try_from(value).expect("encoded values are visible ASCII"));
    }
    let mut ours = BTreeMap::from([
        ("idempotency-key", format!("{group}:{}", message.id)),
        ("postrider-message-id", message.id.to_string()),
        ("postrider-topic", encode(&message.topic)),
        ("postrider-group", encode(group)),
        ("postrider-delivery", arrival.delivery.to_string()),
        ("postrider-occurred-at", message.occurred_at.to_rfc3339()),
    ]);
    ours.extend(message.kind.as_deref().map(|kind| ("postrider-type", encode(kind))));
    ours.extend(message.key.as_deref().map(|key| ("postrider-key", encode(key))));
    ours.extend(arrival.seq.map(|seq| ("postrider-seq", seq.to_string())));
    for name in ["postrider-type", "postrider-key", "postrider-seq"] {
        // Without one of ours, the writer's header of that name must not pass for it.
        headers.remove(name);
    }
    for (name, value) in ours {
        let value = HeaderValue::try_from(value).expect("encoded values are visible ASCII");
        headers.insert(HeaderName::from_static(name), value);
    }
    let content_type = HeaderValue::try_from(message.content_type.as_str());
    let unknown = HeaderValue::from_static("application/octet-stream");
    headers.insert(CONTENT_TYPE, content_type.unwrap_or(unknown));
    headers
}

/// `text` with everything but visible ASCII, and `%` itself, as `%XX`: decoding gives it back exactly.
fn encode(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_graphic() && byte != b'%' {
            encoded.push(char::from(byte));
        } else {
            let _ = write!(encoded, "%{byte:02X}");
        }
    }
    encoded
}

/// The start of an answer's body, for people.
async fn start_of(mut response: Response) -> String {
    let mut body = Vec::new();
    while let Ok(Some(chunk)) = response.chunk().await {
        let room = BODY - body.len();
        body.extend_from_slice(&chunk[..chunk.len().min(room)]);
        if body.len() == BODY {
            break;
        }
    }
    String::from_utf8_lossy(&body).trim().chars().take(SHOWN).collect()
}

/// All of an answer's body; nothing where it is longer than `most`.
async fn whole(mut response: Response, most: usize) -> Result<Option<Vec<u8>>, reqwest::Error> {
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await? {
        if body.len() + chunk.len() > most {
            return Ok(None);
        }
        body.extend_from_slice(&chunk);
    }
    Ok(Some(body))
}

/// What the endpoint asked for, in seconds or as a date, within reason.
fn retry_after(headers: &HeaderMap, now: DateTime<Utc>) -> Option<Duration> {
    let text = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    let seconds = match text.parse::<u64>() {
        Ok(seconds) => seconds,
        Err(_) => {
            let date = DateTime::parse_from_rfc2822(text).ok()?;
            u64::try_from((date.to_utc() - now).num_seconds()).unwrap_or(0)
        }
    };
    Some(Duration::from_secs(seconds.clamp(1, 60 * 60)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use message::Message;

    fn arrival(message: Message) -> Arrival {
        Arrival { message, seq: Some(7), delivery: 2 }
    }

    #[test]
    fn what_is_not_visible_ascii_is_encoded_and_can_be_decoded() {
        assert_eq!(encode("a b"), "a%20b");
        assert_eq!(encode("100%"), "100%25");
        assert_eq!(encode("é"), "%C3%A9");
        assert_eq!(encode("Order:42/x"), "Order:42/x");
    }

    #[test]
    fn the_writers_headers_are_forwarded_but_never_those_of_the_connection_or_ours() {
        let message = Message::new("orders", "{}")
            .key("café 1")
            .header("traceparent", "00-1-2-01")
            .header("X-Name", "Zoë")
            .header("Host", "evil")
            .header("Transfer-Encoding", "chunked")
            .header("Content-Length", "1")
            .header("Idempotency-Key", "mine")
            .header("postrider-type", "forged")
            .header("content-type", "text/evil");
        let id = message.id;
        let headers = headers("billing", &arrival(message));
        let get = |name: &str| headers.get(name).map(|value| value.to_str().expect("ASCII").to_owned());
        assert_eq!(get("traceparent").as_deref(), Some("00-1-2-01"));
        assert_eq!(get("idempotency-key"), Some(format!("billing:{id}")));
        assert_eq!(get("postrider-key").as_deref(), Some("caf%C3%A9%201"));
        assert_eq!(get("postrider-seq").as_deref(), Some("7"));
        assert_eq!(get("postrider-delivery").as_deref(), Some("2"));
        assert_eq!(get("content-type").as_deref(), Some("application/json"));
        assert_eq!(get("x-name").as_deref(), Some("Zo%C3%AB"));
        for name in ["host", "transfer-encoding", "content-length", "postrider-type"] {
            assert_eq!(get(name), None, "{name}");
        }
    }

    #[test]
    fn a_wait_is_read_from_seconds_or_a_date_and_kept_within_a_second_and_an_hour() {
        let now = DateTime::parse_from_rfc2822("Wed, 21 Oct 2015 07:28:00 GMT").expect("a date").to_utc();
        let after = |text: &str| {
            let headers = HeaderMap::from_iter([(RETRY_AFTER, HeaderValue::try_from(text).expect("ASCII"))]);
            retry_after(&headers, now).map(|wait| wait.as_secs())
        };
        assert_eq!(after("120"), Some(120));
        assert_eq!(after("0"), Some(1));
        assert_eq!(after("999999"), Some(3600));
        assert_eq!(after("Wed, 21 Oct 2015 07:29:00 GMT"), Some(60));
        assert_eq!(after("Wed, 21 Oct 2015 07:00:00 GMT"), Some(1));
        assert_eq!(after("soon"), None);
    }

    #[test]
    fn a_url_that_cannot_be_posted_to_is_refused_and_its_secrets_are_not_shown() {
        assert!(HttpHandler::new("nonsense").is_err());
        assert!(HttpHandler::new("ftp://host/").is_err());
        let url = endpoint("https://user:secret@host:8443/in?token=secret").expect("a URL");
        assert_eq!(shown(&url), "https://host:8443/in");
    }
}
