//! The same fact on several stores, as a test for each of those that this build knows.

/// A file, which needs no server.
pub(crate) const SQLITE: &str = "sqlite:";

/// `on! { sqlite redis: async fn a_fact(store: &str) { … } }` makes the tests `a_fact::sqlite` and `a_fact::redis`.
macro_rules! on {
    ($($kind:ident)+: async fn $fact:ident($store:ident: &str) $shown:block) => {
        #[allow(dead_code, unused_imports, reason = "a build may know none of these stores")]
        mod $fact {
            use super::*;

            async fn shown($store: &str) $shown

            $(crate::stores::on! { @$kind })+
        }
    };
    (@sqlite) => {
        #[tokio::test]
        async fn sqlite() {
            shown(SQLITE).await;
        }
    };
    (@postgres) => {
        #[cfg(feature = "postgres")]
        #[tokio::test]
        async fn postgres() {
            shown(&testkit::servers::url("postgres")).await;
        }
    };
    (@mariadb) => {
        #[cfg(feature = "mysql")]
        #[tokio::test]
        async fn mariadb() {
            shown(&testkit::servers::url("mariadb")).await;
        }
    };
    (@redis) => {
        #[cfg(feature = "redis")]
        #[tokio::test]
        async fn redis() {
            shown(&testkit::servers::url("redis")).await;
        }
    };
}

pub(crate) use on;
