//! The thread on which leases are renewed and old messages removed.
//!
//! A thread of its own, because a handler that blocks the caller's runtime must not cost a member its
//! partitions, and because a broker may be opened before there is any runtime.

use std::future::Future;

use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::Error;

/// Runs tasks until it is dropped.
pub(super) struct Keeper {
    handle: Handle,
    /// Dropping it ends the thread.
    _running: oneshot::Sender<()>,
}

impl Keeper {
    pub(super) fn start() -> Result<Self, Error> {
        let runtime =
            Builder::new_current_thread().enable_time().build().map_err(|e| Error::Thread(e.to_string()))?;
        let handle = runtime.handle().clone();
        let (running, dropped) = oneshot::channel::<()>();
        std::thread::Builder::new()
            .name("embedded-broker".to_owned())
            .spawn(move || {
                let _ = runtime.block_on(dropped);
                // A read that still runs must not hold up the end.
                runtime.shutdown_background();
            })
            .map_err(|error| Error::Thread(error.to_string()))?;
        Ok(Self { handle, _running: running })
    }

    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
        self.handle.spawn(task)
    }
}
