//! One suite for every broker.
