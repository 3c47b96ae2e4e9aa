//! Runs a listener until it is told to stop, then lets open requests finish.

use std::io;
use std::time::Duration;

use axum::serve::ListenerExt;
use axum::{Extension, Router};
use tokio::net::TcpListener;
use tokio::sync::watch;

/// How long open requests may take once the listener stops.
const GRACE: Duration = Duration::from_secs(5);

/// Tells streams that never end by themselves that the listener is closing.
#[derive(Clone)]
pub(crate) struct Closing(watch::Receiver<bool>);

impl Closing {
    /// Waits until the listener closes.
    pub(crate) async fn wait(mut self) {
        // An error means that the listener is gone altogether, which is closing too.
        let _ = self.0.wait_for(|closing| *closing).await;
    }
}

/// Serves `router` on `listener` until `shutdown`, then finishes the requests that are open, for a few
/// seconds at most.
///
/// # Errors
/// When the listener cannot be used.
///
/// # Cancel safety
/// Dropped, it closes the listener; requests that are open are cut off.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    let (closing, closed) = watch::channel(false);
    let router = router.layer(Extension(Closing(closed.clone())));
    let listener = listener.tap_io(|stream| {
        // Answers are small and written whole: waiting to fill a packet only adds latency.
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "a connection keeps its delay");
        }
    });
    let server = axum::serve(listener, router).with_graceful_shutdown(async move {
        shutdown.await;
        closing.send_replace(true);
        // Held until here, or streams would take the end of this future for the end of the listener.
        drop(closing);
    });
    let too_late = async move {
        Closing(closed).wait().await;
        tokio::time::sleep(GRACE).await;
    };
    tokio::select! {
        served = server => served,
        () = too_late => {
            tracing::warn!("requests were still open after {GRACE:?} and are cut off");
            Ok(())
        }
    }
}
