//! The connection to the server: made when it is first needed, kept by the client library, watched by us.
//!
//! The library connects again by itself, for ever. What it does not say in time is that it is not connected: a message
//! that is given to it meanwhile waits in its queue and is sent when nobody counts on it any more. So it is asked first,
//! and whoever waits for an answer is told when the connection that would bring it is gone.

use std::sync::atomic::Ordering;
use std::time::Duration;

use async_nats::connection::State;
use async_nats::jetstream::context::{Context, ContextBuilder};
use async_nats::{Client, ClientError, ConnectErrorKind, ConnectOptions, Event};
use tokio::sync::{OnceCell, watch};
use tokio::time::Instant;

use super::config::{Config, Login};
use super::error::Trouble;

/// How long a connection is waited for before the server counts as away.
const PATIENCE: Duration = Duration::from_secs(2);

/// The library's news may be lost when there are many; then its state is looked at this often.
const LOOK: Duration = Duration::from_millis(100);

/// Messages that wait for confirmation, of all calls together.
const IN_FLIGHT: usize = 200_000;

#[derive(Debug)]
pub(super) struct Link {
    context: OnceCell<Context>,
    /// Why the last attempt to connect failed.
    news: watch::Sender<Option<String>>,
}

impl Link {
    pub(super) fn new() -> Self {
        Self { context: OnceCell::new(), news: watch::Sender::new(None) }
    }

    /// The server, once there is a connection to it.
    pub(super) async fn connected(&self, config: &Config) -> Result<&Context, Trouble> {
        let context = self.context.get_or_try_init(|| self.connect(config)).await?;
        let client = context.client();
        let mut news = self.news.subscribe();
        let until = Instant::now() + PATIENCE.min(config.timeout / 2);
        loop {
            let error = news.borrow_and_update().clone();
            if client.connection_state() == State::Connected {
                return Ok(context);
            }
            let denied = ConnectErrorKind::AuthorizationViolation.to_string();
            match error {
                Some(error) if error.contains(&denied) => {
                    return Err(Trouble::Refused(format!("{error}: look at user and password in the URL")));
                }
                Some(error) if Instant::now() >= until => return Err(Trouble::Away(error)),
                None if Instant::now() >= until => {
                    return Err(Trouble::Away("there is no connection".to_owned()));
                }
                _ => {
                    let _ = tokio::time::timeout(LOOK, news.changed()).await;
                }
            }
        }
    }

    /// Ends when the connection that is there now, the `number`th, is gone.
    pub(super) async fn gone(&self, client: &Client, number: u64) {
        let mut news = self.news.subscribe();
        while client.connection_state() == State::Connected && number == connections(client) {
            let _ = tokio::time::timeout(LOOK, news.changed()).await;
        }
    }

    /// Answers at once: the connection is made in the background, however long that takes.
    async fn connect(&self, config: &Config) -> Result<Context, Trouble> {
        let refused = |error: std::io::Error| Trouble::Refused(error.to_string());
        let news = self.news.clone();
        let mut options = ConnectOptions::new()
            .name("postrider")
            .retry_on_initial_connect()
            .connection_timeout(PATIENCE)
            .require_tls(config.tls)
            .event_callback(move |event| {
                note(&news, &event);
                async {}
            });
        if let Some(ca) = &config.ca {
            options = options.add_root_certificates(ca.clone());
        }
        options = match &config.login {
            Login::Nobody => options,
            Login::Token(token) => options.token(token.reveal().to_owned()),
            Login::Password(user, password) => {
                options.user_and_password(user.clone(), password.reveal().to_owned())
            }
            Login::Credentials(file) => options.credentials_file(file).await.map_err(refused)?,
        };
        let scheme = if config.tls { "tls" } else { "nats" };
        let servers: Vec<String> = config.servers.iter().map(|host| format!("{scheme}://{host}")).collect();
        let client = options.connect(servers).await.map_err(|error| Trouble::Refused(error.to_string()))?;
        Ok(ContextBuilder::new().timeout(config.timeout).max_ack_inflight(IN_FLIGHT).build(client))
    }
}

/// How many connections there have been: another number is another connection.
pub(super) fn connections(client: &Client) -> u64 {
    client.statistics().connects.load(Ordering::Relaxed)
}

fn note(news: &watch::Sender<Option<String>>, event: &Event) {
    match event {
        Event::Connected => drop(news.send_replace(None)),
        Event::Disconnected => news.send_modify(|_| {}),
        Event::ServerError(error) => drop(news.send_replace(Some(error.to_string()))),
        Event::ClientError(ClientError::Other(error)) => drop(news.send_replace(Some(error.clone()))),
        Event::ClientError(error) => drop(news.send_replace(Some(error.to_string()))),
        Event::SlowConsumer(_) => tracing::warn!("the NATS client threw messages away: they come again"),
        Event::LameDuckMode | Event::Draining | Event::Closed => {}
    }
}
