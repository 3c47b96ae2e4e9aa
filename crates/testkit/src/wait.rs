//! Waiting for a fact instead of sleeping and hoping.

use std::future::Future;
use std::time::{Duration, Instant};

/// Between two looks.
const PAUSE: Duration = Duration::from_millis(5);

/// Looks again and again until `fact` is true, for `timeout` at most. `false` when it never was.
pub async fn eventually<F>(timeout: Duration, mut fact: impl FnMut() -> F) -> bool
where
    F: Future<Output = bool>,
{
    let end = Instant::now() + timeout;
    loop {
        if fact().await {
            return true;
        }
        if Instant::now() >= end {
            return false;
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// Longer than anything takes, however slow the machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Looks again and again until `fact` is true.
///
/// # Panics
/// When it never was; `what` says what was missing.
pub async fn until(what: &str, mut fact: impl AsyncFnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !fact().await {
        assert!(Instant::now() < end, "{what} never came");
        tokio::time::sleep(PAUSE).await;
    }
}

/// Looks again and again until `look` finds something, for `timeout` at most.
///
/// # Panics
/// When nothing was found in time; `what` says what was missing.
pub async fn within<F, T>(timeout: Duration, what: &str, mut look: impl FnMut() -> F) -> T
where
    F: Future<Output = Option<T>>,
{
    let end = Instant::now() + timeout;
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(Instant::now() < end, "{what}: not within {timeout:?}");
        tokio::time::sleep(PAUSE).await;
    }
}
