//! The signals that ask a process to end.

use super::super::failure::{Exit, Failure};

/// Waits for signals. Made before anything is started: a signal that comes early must find somebody.
pub(super) struct Signals {
    #[cfg(unix)]
    interrupt: tokio::signal::unix::Signal,
    #[cfg(unix)]
    terminate: tokio::signal::unix::Signal,
}

impl Signals {
    #[cfg(unix)]
    pub(super) fn install() -> Result<Self, Failure> {
        use tokio::signal::unix::{SignalKind, signal};
        let of = |kind| signal(kind).map_err(|error| cannot(&error));
        Ok(Self { interrupt: of(SignalKind::interrupt())?, terminate: of(SignalKind::terminate())? })
    }

    /// The name of the next one.
    #[cfg(unix)]
    pub(super) async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.interrupt.recv() => "SIGINT",
            _ = self.terminate.recv() => "SIGTERM",
        }
    }

    #[cfg(not(unix))]
    pub(super) fn install() -> Result<Self, Failure> {
        Ok(Self {})
    }

    /// The name of the next one.
    #[cfg(not(unix))]
    pub(super) async fn next(&mut self) -> &'static str {
        if let Err(error) = tokio::signal::ctrl_c().await {
            tracing::error!("{}", cannot(&error).text);
        }
        "Ctrl-C"
    }
}

fn cannot(error: &std::io::Error) -> Failure {
    Failure::new(Exit::Unexpected, format!("cannot listen for signals: {error}"))
}
