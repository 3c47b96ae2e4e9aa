//! Reliable message delivery: a transactional outbox, a relay, brokers and an inbox.
