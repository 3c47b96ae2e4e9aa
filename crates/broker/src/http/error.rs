//! What an answer, or the lack of one, means to the relay.

use std::error::Error;
use std::io;
use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use hyper::{HeaderMap, StatusCode, header};

use super::guard::Refused;
use crate::Outcome;

/// The wait that a destination may ask for: not so short that it is none, not so long that a message is forgotten.
const WAIT: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(24 * 60 * 60));

/// None of the addresses that a name has may be connected to.
#[derive(Debug, thiserror::Error)]
#[error("{host} is at {address}, which is refused: {refused}")]
pub(super) struct Forbidden {
    pub(super) host: String,
    pub(super) address: IpAddr,
    pub(super) refused: Refused,
}

/// Why there is no answer.
#[derive(Debug)]
pub(super) enum Failure {
    /// The client's own words.
    Client(hyper_util::client::legacy::Error),
    /// The time for one request is over.
    Timeout(Duration),
    /// More informational answers than anybody needs.
    Flood,
}

/// What an answer means. `error` is what people are told.
pub(super) fn answered(status: StatusCode, wait: Option<Duration>, error: String) -> Outcome {
    match status.as_u16() {
        200..=299 => Outcome::Confirmed,
        410 => Outcome::Misconfigured { error },
        408 | 425 | 429 | 500..=599 if wait.is_some() => Outcome::Deferred { error, after: wait },
        // A gateway's words for a service that is away: nobody's message is to blame. After 502 and 504 the service
        // may have had it.
        503 => Outcome::Unreachable { error },
        502 | 504 => Outcome::Unconfirmed { error },
        408 | 425 | 429 | 500..=599 => Outcome::Deferred { error, after: None },
        // Redirects among them: where they lead, nobody has allowed.
        300..=499 => Outcome::Rejected { error },
        // A status that does not exist.
        _ => Outcome::Deferred { error, after: None },
    }
}

/// What no answer means. `begun`: a part of the request may have been sent.
pub(super) fn failed(origin: &str, failure: &Failure, begun: bool) -> Outcome {
    let forbidden = match failure {
        Failure::Client(error) => chain(error).find_map(|error| forbidden(error)),
        Failure::Timeout(_) | Failure::Flood => None,
    };
    if let Some(forbidden) = forbidden {
        return Outcome::Misconfigured { error: forbidden.to_string() };
    }
    let reason = match failure {
        Failure::Client(error) => reason(error),
        Failure::Timeout(limit) => format!("no answer within {}", humantime::format_duration(*limit)),
        Failure::Flood => "it sends informational answers without end".to_owned(),
    };
    match begun {
        true => Outcome::Unconfirmed { error: format!("{origin} gave no answer: {reason}") },
        false => Outcome::Unreachable { error: format!("{origin} cannot be reached: {reason}") },
    }
}

/// An address that was refused travels as an `io::Error`, and in one of those the sources begin behind what is inside.
fn forbidden<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a Forbidden> {
    let inner = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
    error.downcast_ref().or_else(|| inner?.downcast_ref())
}

/// An error and all behind it.
fn chain<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |&error| error.source())
}

/// The last word is the one that says something: "Connection refused", not "client error (Connect)".
pub(super) fn reason(error: &(dyn Error + 'static)) -> String {
    chain(error).last().map_or_else(String::new, ToString::to_string)
}

/// How long the destination wants to be left alone: seconds, or a date.
pub(super) fn wait(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let text = headers.get(header::RETRY_AFTER)?.to_str().ok()?.trim();
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let asked = match digits {
        // More digits than fit are a long time, too.
        true => Duration::from_secs(text.parse().unwrap_or(u64::MAX)),
        false => httpdate::parse_http_date(text).ok()?.duration_since(now).unwrap_or_default(),
    };
    Some(asked.clamp(WAIT.0, WAIT.1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn retry_after(value: &str, now: SystemTime) -> Option<Duration> {
        let mut headers = HeaderMap::new();
        headers.insert(header::RETRY_AFTER, value.parse().expect("a value"));
        wait(&headers, now)
    }

    #[test]
    fn every_status_has_its_meaning_with_and_without_a_wait() {
        let asked = Duration::from_secs(7);
        for code in 100..=999 {
            let status = StatusCode::from_u16(code).expect("a status");
            for wait in [None, Some(asked)] {
                let outcome = answered(status, wait, String::new());
                let expected = match (code, wait) {
                    (200..=299, _) => "Confirmed",
                    (410, _) => "Misconfigured",
                    (408 | 425 | 429 | 500..=599, Some(_)) => "Deferred for 7",
                    (503, None) => "Unreachable",
                    (502 | 504, None) => "Unconfirmed",
                    (300..=407 | 409 | 411..=424 | 426..=428 | 430..=499, _) => "Rejected",
                    _ => "Deferred",
                };
                let found = match outcome {
                    Outcome::Confirmed => "Confirmed",
                    Outcome::Deferred { after: Some(after), .. } if after == asked => "Deferred for 7",
                    Outcome::Deferred { after: None, .. } => "Deferred",
                    Outcome::Unreachable { .. } => "Unreachable",
                    Outcome::Unconfirmed { .. } => "Unconfirmed",
                    Outcome::Rejected { .. } => "Rejected",
                    Outcome::Misconfigured { .. } => "Misconfigured",
                    other => panic!("{code}: {other:?}"),
                };
                assert_eq!(found, expected, "{code} with {wait:?}");
            }
        }
    }

    #[test]
    fn a_wait_is_read_as_seconds_or_as_a_date_and_kept_within_bounds() {
        let now = httpdate::parse_http_date("Sun, 06 Nov 1994 08:49:37 GMT").expect("a date");
        let cases = [
            ("7", Some(7)),
            (" 120 ", Some(120)),
            ("0", Some(1)),
            ("86400", Some(86_400)),
            ("86401", Some(86_400)),
            ("99999999999999999999999999", Some(86_400)),
            ("Sun, 06 Nov 1994 08:50:37 GMT", Some(60)),
            ("Sunday, 06-Nov-94 08:50:37 GMT", Some(60)),
            ("Sun Nov  6 08:50:37 1994", Some(60)),
            ("Sun, 06 Nov 1994 08:49:37 GMT", Some(1)),
            ("Sat, 05 Nov 1994 08:49:37 GMT", Some(1)),
            ("Sat, 06 Nov 2094 08:49:37 GMT", Some(86_400)),
            ("-1", None),
            ("1.5", None),
            ("soon", None),
            ("", None),
        ];
        for (value, expected) in cases {
            assert_eq!(retry_after(value, now), expected.map(Duration::from_secs), "{value:?}");
        }
        assert_eq!(wait(&HeaderMap::new(), now), None);
    }

    #[test]
    fn without_an_answer_it_matters_whether_anything_was_sent() {
        let limit = Duration::from_secs(15);
        let outcome = failed("https://example.com", &Failure::Timeout(limit), false);
        let error = "https://example.com cannot be reached: no answer within 15s".to_owned();
        assert_eq!(outcome, Outcome::Unreachable { error });
        for failure in [Failure::Timeout(limit), Failure::Flood] {
            let outcome = failed("https://example.com", &failure, true);
            assert!(matches!(outcome, Outcome::Unconfirmed { .. }), "{outcome:?}");
        }
    }
}
