//! Waking the relay of this process when something was written. MySQL has nothing like NOTIFY: relays in other
//! processes find new messages by polling.

use super::MysqlStore;

impl MysqlStore {
    /// Wakes a relay of this process that waits for work. Call it after committing a transaction in
    /// which messages were appended; a relay that hears nothing finds them by polling.
    pub fn ring(&self) {
        self.bell.notify_one();
    }
}
