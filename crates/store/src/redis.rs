//! Redis as store.
