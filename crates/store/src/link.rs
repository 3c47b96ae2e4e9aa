//! A link to a Redis that may be away: connected on first use, and anew after anything went wrong.
//!
//! For those who use Redis beside a store (claims, the seen ids of a hybrid inbox). They must hear soon that it does
//! not answer, and go on by themselves when it is back: so a call is never queued behind attempts to connect.

use std::fmt;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, FromRedisValue, Pipeline, RedisError, ScriptInvocation};

use crate::Error;

/// A way to one Redis. Calls share a connection.
pub struct Link {
    client: Client,
    patience: Duration,
    connection: Mutex<Option<MultiplexedConnection>>,
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The address alone: the URL may hold a password.
        f.debug_tuple("Link").field(&self.client.get_connection_info().addr().to_string()).finish()
    }
}

impl Link {
    /// A link to the Redis at `url`; no call on it takes longer than `patience`. Nothing is connected yet.
    ///
    /// # Errors
    /// When it is no URL of a Redis.
    pub fn new(url: &str, patience: Duration) -> Result<Self, Error> {
        if url.starts_with("rediss:") {
            // Another library of this process may have chosen one already: then that one serves.
            let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        }
        let client = Client::open(url).map_err(|error| {
            // Not the URL itself: it may hold a password.
            let why = error.detail().map(|detail| format!(" ({detail})")).unwrap_or_default();
            Error::Refused(format!(
                "this is not the URL of a Redis{why}: write redis://host:6379/0, rediss:// for TLS, and \
                 redis://user:password@host where a password is needed"
            ))
        })?;
        Ok(Self { client, patience, connection: Mutex::default() })
    }

    /// Runs a script.
    ///
    /// # Errors
    /// [`Error::Unavailable`] whenever there was no answer, or none that was expected; the script may have run.
    ///
    /// # Cancel safety
    /// A call that is dropped may have run.
    pub async fn invoke<T: FromRedisValue>(&self, call: &ScriptInvocation<'_>) -> Result<T, Error> {
        self.within_patience(async |connection| call.invoke_async(connection).await).await
    }

    /// Runs commands, one after the other and in one trip.
    ///
    /// # Errors
    /// As [`invoke`](Self::invoke): any of them may have run.
    ///
    /// # Cancel safety
    /// A call that is dropped may have run.
    pub async fn ask<T: FromRedisValue>(&self, commands: &Pipeline) -> Result<T, Error> {
        self.within_patience(async |connection| commands.query_async(connection).await).await
    }

    async fn within_patience<T>(
        &self,
        call: impl AsyncFnOnce(&mut MultiplexedConnection) -> Result<T, RedisError>,
    ) -> Result<T, Error> {
        let answer = async {
            let mut connection = self.connect().await?;
            call(&mut connection).await
        };
        let reason = match tokio::time::timeout(self.patience, answer).await {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(error)) => said(&error),
            Err(_) => format!("no answer within {:?}", self.patience),
        };
        // Even where Redis answered: a primary that became a replica goes on refusing on this connection.
        *self.connection() = None;
        let reason = format!("Redis at {}: {reason}", self.client.get_connection_info().addr());
        Err(Error::Unavailable { reason, retry_after: self.patience })
    }

    async fn connect(&self) -> Result<MultiplexedConnection, RedisError> {
        if let Some(connection) = self.connection().clone() {
            return Ok(connection);
        }
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.patience))
            .set_response_timeout(Some(self.patience));
        let connection = self.client.get_multiplexed_async_connection_with_config(&config).await?;
        *self.connection() = Some(connection.clone());
        Ok(connection)
    }

    fn connection(&self) -> MutexGuard<'_, Option<MultiplexedConnection>> {
        self.connection.lock().expect("nothing panics while it holds the connection")
    }
}

/// An error in the words of Redis, without the driver's decoration.
fn said(error: &RedisError) -> String {
    match (error.code(), error.detail()) {
        (Some(code), Some(detail)) => format!("{code} {detail}"),
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bad_url_is_refused_without_telling_its_password() {
        for url in ["http://me:secret@h", "redis://:secret@h:notaport", "redis://me:secret@h/x", "secret"] {
            let error = Link::new(url, Duration::from_secs(1)).expect_err(url).to_string();
            assert!(!error.contains("secret"), "{error}");
            assert!(error.contains("redis://host:6379/0"), "{error}");
        }
    }

    #[tokio::test]
    async fn a_redis_that_is_not_there_is_unavailable_and_its_password_untold() {
        let link = Link::new("redis://me:secret@127.0.0.1:1/0", Duration::from_secs(5)).expect("a URL");
        let script = redis::Script::new("return 1");
        let error = link.invoke::<i64>(&script.prepare_invoke()).await.expect_err("nobody is there");
        assert!(error.is_transient());
        for text in [error.to_string(), format!("{error:?}"), format!("{link:?}")] {
            assert!(!text.contains("secret"), "{text}");
            assert!(text.contains("127.0.0.1:1"), "{text}");
        }
    }
}
