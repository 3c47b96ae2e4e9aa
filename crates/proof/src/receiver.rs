//! The other side of HTTP: a service that believes signed requests, does their work once and says so.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use broker::http::{Key, Received, read, verify};
use inbox::Group;
use store::{Arrival, Receipt};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

/// What both sides know.
const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";

/// How old a request may be.
const TOLERANCE: Duration = Duration::from_secs(300);

/// A request waits so long for a store that is busy, and is asked again after each pause.
const PATIENCE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(100);

/// What a relay has to be told of a receiver at `address`.
pub(crate) fn url(address: SocketAddr) -> String {
    format!("http://{address}/in?allow_loopback=true&secret={SECRET}")
}

/// Receives at the address of `url`, until it is aborted.
pub(crate) async fn start(url: &str, group: Group) -> Result<JoinHandle<()>> {
    let address = url.trim_start_matches("http://").split('/').next().unwrap_or_default();
    let listener = TcpListener::bind(address).await.with_context(|| format!("cannot listen at {address}"))?;
    let desk = Arc::new(Desk { keys: [Key::parse(SECRET)?], group });
    let service = Router::new().route("/in", post(receive)).with_state(desk);
    Ok(tokio::spawn(async move {
        // It only ends with the runtime.
        let _ = axum::serve(listener, service).await;
    }))
}

struct Desk {
    keys: [Key; 1],
    group: Group,
}

async fn receive(State(desk): State<Arc<Desk>>, headers: HeaderMap, body: Bytes) -> StatusCode {
    if verify(&desk.keys, &headers, &body, TOLERANCE).is_err() {
        return StatusCode::UNAUTHORIZED;
    }
    let Some(Received { message, seq, delivery }) = read(&headers, body) else {
        return StatusCode::BAD_REQUEST;
    };
    let arrival = Arrival { message, seq, delivery };
    let asked = Instant::now();
    loop {
        match desk.group.process(vec![arrival.clone()]).await.as_deref() {
            Ok([Receipt::Done | Receipt::Duplicate | Receipt::Parked { .. } | Receipt::Dead { .. }]) => {
                return StatusCode::NO_CONTENT;
            }
            // What a receiver that was killed had in hand, its database may hold for a moment longer.
            _ if asked.elapsed() < PATIENCE => tokio::time::sleep(PAUSE).await,
            _ => return StatusCode::SERVICE_UNAVAILABLE,
        }
    }
}
