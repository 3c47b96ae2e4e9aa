//! PostgreSQL as store.
