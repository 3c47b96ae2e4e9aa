//! Waking the relay of this process when something was written.

use super::RedisStore;

impl RedisStore {
    /// Wakes a relay of this process that waits for work. Call it after a transaction or script of the application
    /// in which messages were appended; a relay that hears nothing finds them by polling.
    pub fn ring(&self) {
        self.bell.notify_one();
    }
}
