//! What all clients of librdkafka have in common: they are heard, and they are closed aside.

use std::ops::Deref;
use std::sync::{Mutex, PoisonError};

use rdkafka::ClientContext;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::error::KafkaError;

/// Remembers what librdkafka complained of last: its own answers say no more than "timed out".
#[derive(Debug, Default)]
pub(super) struct Ear {
    last: Mutex<String>,
}

impl Ear {
    /// What was wrong last, to be put after a sentence.
    pub(super) fn said(&self) -> String {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.is_empty() { String::new() } else { format!(" ({last})") }
    }

    pub(super) fn hear(&self, error: &KafkaError, reason: &str) {
        tracing::debug!(%error, reason, "librdkafka");
        reason.clone_into(&mut self.last.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

impl ClientContext for Ear {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, text: &str) {
        log(level, facility, text);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        self.hear(&error, reason);
    }
}

/// What librdkafka logs is for those who look for a fault: outcomes say what everybody should know.
pub(super) fn log(level: RDKafkaLogLevel, facility: &str, text: &str) {
    tracing::debug!(target: "librdkafka", ?level, facility, "{text}");
}

/// A client that is closed on a thread of its own: closing waits for its threads and for the network, and whoever
/// lets it go may be serving others.
pub(super) struct Aside<T: Send + 'static>(Option<T>);

impl<T: Send + 'static> Aside<T> {
    pub(super) fn new(client: T) -> Self {
        Self(Some(client))
    }
}

impl<T: Send + 'static> Deref for Aside<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().expect("it is there until it is dropped")
    }
}

impl<T: Send + 'static> Drop for Aside<T> {
    fn drop(&mut self) {
        let client = self.0.take();
        let aside = std::thread::Builder::new().name("kafka-closing".to_owned());
        // Where no thread can be had, the closure is dropped here and the client with it.
        drop(aside.spawn(move || drop(client)));
    }
}
