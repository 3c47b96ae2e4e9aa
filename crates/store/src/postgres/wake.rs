//! Waking the relay when something was written.

use super::PostgresStore;

impl PostgresStore {
    /// Wakes a relay of this process that waits for work. Call it after committing a transaction in
    /// which messages were appended; a relay that hears nothing finds them by polling.
    pub fn ring(&self) {
        self.bell.notify_one();
    }

    pub(super) async fn wake(&self) {
        self.bell.notified().await;
    }
}
