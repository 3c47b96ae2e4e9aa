//! The thread on which leases are renewed and old messages removed.
//!
//! A thread of its own, because a handler that blocks the caller's runtime must not cost a member its partitions, and
//! because a broker may be opened before there is any runtime.

use std::future::Future;

use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// Runs tasks until it is dropped.
pub(super) struct Keeper {
    handle: Handle,
    /// Dropping it ends the thread.
    _running: oneshot::Sender<()>,
}

impl Keeper {
    pub(super) fn start() -> std::io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let (running, dropped) = oneshot::channel::<()>();
        std::thread::Builder::new().name("redis-streams".to_owned()).spawn(move || {
            let _ = runtime.block_on(dropped);
            runtime.shutdown_background();
        })?;
        Ok(Self { handle, _running: running })
    }

    pub(super) fn spawn<T: Send + 'static>(
        &self,
        task: impl Future<Output = T> + Send + 'static,
    ) -> JoinHandle<T> {
        self.handle.spawn(task)
    }
}
