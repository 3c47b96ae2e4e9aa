//! MySQL and MariaDB as store.
