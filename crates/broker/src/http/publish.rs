//! Sending: a window of requests, one outcome for each message.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use chrono::Utc;
use futures::future::join_all;
use hyper::body::{Body, Incoming};
use hyper::{Request, Response, StatusCode};
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

use super::Broker;
use super::error::{Failure, answered, failed, wait};
use super::write::{Letter, Payload};
use crate::{Guarantees, Outcome, Outgoing, Publisher};

/// Bytes of an answer that are read, and how long that may take: enough to use the connection again, and to know what a
/// refusal says.
const ANSWER: usize = 64 << 10;
const READING: Duration = Duration::from_millis(500);

/// Bytes of an answer that are kept, and characters of it that people are shown.
const KEPT: usize = 2 << 10;
const SHOWN: usize = 200;

/// Informational answers that may come before the real one.
const INFORMATIONAL: usize = 16;

/// Messages of one call for each request that may be under way: enough that the window stays full, few enough that
/// a call ends soon.
const ROUNDS: usize = 8;

/// What the messages of one call share.
struct Call {
    /// Nothing begins after that.
    end: Instant,
    /// Nothing begins any more: the destination is down.
    over: AtomicBool,
}

#[async_trait]
impl Publisher for Broker {
    fn guarantees(&self) -> Guarantees {
        let config = &self.inner.config;
        let window = config.concurrency * ROUNDS;
        // A call that is held back by the rate must end in time, too.
        let paced = config.rate.map_or(window, |rate| (rate * config.timeout.as_secs_f64() / 2.0) as usize);
        Guarantees {
            key_order: true,
            ordered_batches: false,
            groups: false,
            fenced: true,
            max_payload: None,
            max_batch: paced.clamp(1, window),
            deduplication: None,
            durability: "what the destination promises by answering 2xx",
            needs: &[
                "it answers 2xx only once it has stored the message",
                "it recognises webhook-id, which is the same each time a message is sent",
            ],
        }
    }

    /// Ends within twice the time limit of a request: one for those that wait for their turn, one for those that
    /// have it. A message that had no turn is [`Outcome::Held`]: it was not tried, so it is not to blame.
    async fn publish(&self, batch: Vec<Outgoing>) -> Vec<Outcome> {
        if let Some(closed) = self.closed() {
            return vec![closed; batch.len()];
        }
        let end = Instant::now() + self.inner.config.timeout;
        let call = Call { end, over: AtomicBool::new(false) };
        join_all(batch.iter().map(|outgoing| self.deliver(outgoing, &call))).await
    }
}

impl Broker {
    /// Why nothing is sent now.
    fn closed(&self) -> Option<Outcome> {
        let origin = || self.inner.config.origin();
        if let Some(error) = self.inner.gone.get() {
            return Some(Outcome::Misconfigured { error: error.clone() });
        }
        let rest = Duration::from_secs(self.inner.turns.resting()?.as_secs() + 1);
        let error = format!("{} wants no request for {}", origin(), humantime::format_duration(rest));
        Some(Outcome::Unreachable { error })
    }

    async fn deliver(&self, outgoing: &Outgoing, call: &Call) -> Outcome {
        let letter = match Letter::new(outgoing, &self.inner.headers) {
            Ok(letter) => letter,
            Err(error) => return Outcome::Rejected { error },
        };
        let Some(_turn) = self.inner.turns.take(call.end).await else { return Outcome::Held };
        // What the others of this call heard while this one waited.
        if call.over.load(Ordering::Relaxed) {
            return Outcome::Held;
        }
        match self.closed() {
            Some(gone @ Outcome::Misconfigured { .. }) => return gone,
            Some(_) => return Outcome::Held,
            None => {}
        }
        let outcome = Box::pin(self.attempt(&letter)).await;
        match &outcome {
            Outcome::Unreachable { .. } => call.over.store(true, Ordering::Relaxed),
            Outcome::Deferred { after: Some(after), .. } => self.inner.turns.rest(*after),
            _ => {}
        }
        outcome
    }

    /// One request, from the signature to the answer.
    async fn attempt(&self, letter: &Letter) -> Outcome {
        let config = &self.inner.config;
        let end = Instant::now() + config.timeout;
        let begun = Arc::new(AtomicBool::new(false));
        let flooded = Arc::new(Notify::new());
        let request = self.request(letter, &begun, &flooded);
        let answer = tokio::select! {
            answer = timeout_at(end, self.inner.client.send(request)) => match answer {
                Ok(answer) => answer.map_err(Failure::Client),
                Err(_) => Err(Failure::Timeout(config.timeout)),
            },
            () = flooded.notified() => Err(Failure::Flood),
        };
        match answer {
            Ok(answer) => self.judge(answer, end).await,
            Err(failure) => failed(&config.origin(), &failure, begun.load(Ordering::Relaxed)),
        }
    }

    fn request(&self, letter: &Letter, begun: &Arc<AtomicBool>, flooded: &Arc<Notify>) -> Request<Payload> {
        let mut request = Request::new(Payload::new(letter.payload.clone(), Arc::clone(begun)));
        *request.method_mut() = hyper::Method::POST;
        *request.uri_mut() = self.inner.client.destination.clone();
        *request.headers_mut() = letter.headers(&self.inner.config.secrets, Utc::now().timestamp());
        let (flooded, seen) = (Arc::clone(flooded), AtomicUsize::new(0));
        hyper::ext::on_informational(&mut request, move |_| {
            if seen.fetch_add(1, Ordering::Relaxed) == INFORMATIONAL {
                flooded.notify_one();
            }
        });
        request
    }

    /// What an answer means.
    async fn judge(&self, answer: Response<Incoming>, end: Instant) -> Outcome {
        let status = answer.status();
        let wait = wait(answer.headers(), SystemTime::now());
        let end = end.min(Instant::now() + READING);
        let text = beginning(answer.into_body(), end).await;
        if status.is_success() {
            return Outcome::Confirmed;
        }
        let origin = self.inner.config.origin();
        let mut error = format!("{origin} answered {status}");
        if status.is_redirection() {
            error.push_str(", and redirects are not followed: put the final address into the URL");
        }
        if !text.is_empty() {
            // Cut only after that: half a secret is still a secret.
            let shown: String = self.inner.config.redacted(&text).chars().take(SHOWN).collect();
            error = format!("{error}: {shown}");
        }
        if status == StatusCode::GONE {
            error.push_str("; nothing more is sent there until the program is started again");
            tracing::warn!(destination = origin, "the destination is gone: nothing more is sent there");
            self.inner.gone.get_or_init(|| error.clone());
        }
        answered(status, wait, error)
    }
}

/// Reads an answer to its end, where that is near, and gives back how it begins.
async fn beginning(mut body: Incoming, end: Instant) -> String {
    let (mut kept, mut size) = (Vec::new(), 0);
    let read = async {
        while let Some(Ok(frame)) = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await {
            let Some(data) = frame.data_ref() else { continue };
            size += data.len();
            kept.extend(data.iter().take(KEPT.saturating_sub(kept.len())));
            if size > ANSWER {
                break;
            }
        }
    };
    // What is not read by then is not waited for: the status was the answer.
    let _ = timeout_at(end, read).await;
    let text = String::from_utf8_lossy(&kept).replace(char::is_control, " ");
    text.trim().to_owned()
}
