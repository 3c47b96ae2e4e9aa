//! The publisher's connection: made when it is needed, again when it is gone, and never twice at a time.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::FutureExt;
use futures::future::{BoxFuture, Shared};
use lapin::options::ConfirmSelectOptions;
use lapin::tcp::OwnedTLSConfig;
use lapin::uri::{AMQPAuthority, AMQPQueryString, AMQPScheme, AMQPUri, AMQPUserInfo};
use lapin::{Channel, Connection, ConnectionProperties};

use super::config::{Config, split};
use super::error::Fault;
use super::layout;

/// A server that has not let us in by then is taken for one that never will.
const PATIENCE: Duration = Duration::from_secs(30);

/// Seconds: a peer that is silent for twice as long is gone.
const HEARTBEAT: u16 = 10;

/// Connects to the first of the hosts that answers.
pub(super) async fn connect(config: &Config) -> Result<Connection, Fault> {
    let tls = trusted(config)?;
    let mut fault = Fault::Away("no host is named".to_owned());
    for host in &config.hosts {
        let runtime = lapin::runtime::default_runtime().map_err(Fault::from)?;
        let properties = ConnectionProperties::default().with_connection_name("postrider".into());
        let opening =
            Connection::connect_uri_with_config(uri(config, host), properties, tls.clone(), runtime);
        fault = match tokio::time::timeout(PATIENCE, opening).await {
            Ok(Ok(connection)) => return Ok(connection),
            Ok(Err(error)) => error.into(),
            Err(_) => Fault::Away(format!("{host} has not answered for {PATIENCE:?}")),
        };
    }
    Err(fault)
}

/// Built from its parts: a password would have to be escaped in a text.
fn uri(config: &Config, host: &str) -> AMQPUri {
    let (name, port) = split(host).unwrap_or((host, 0));
    AMQPUri {
        scheme: if config.tls { AMQPScheme::AMQPS } else { AMQPScheme::AMQP },
        authority: AMQPAuthority {
            userinfo: AMQPUserInfo {
                username: config.user.clone(),
                password: config.password.reveal().to_owned(),
            },
            host: name.to_owned(),
            port,
        },
        vhost: config.vhost.clone(),
        query: AMQPQueryString {
            heartbeat: Some(HEARTBEAT),
            connection_timeout: u64::try_from(PATIENCE.as_millis()).ok(),
            ..AMQPQueryString::default()
        },
    }
}

fn trusted(config: &Config) -> Result<OwnedTLSConfig, Fault> {
    let Some(file) = &config.ca else { return Ok(OwnedTLSConfig::default()) };
    let unread = |error| Fault::Refused(format!("{} cannot be read: {error}", file.display()));
    let certificates = std::fs::read_to_string(file).map_err(unread)?;
    Ok(OwnedTLSConfig { cert_chain: Some(certificates), ..OwnedTLSConfig::default() })
}

/// A connection that is publishing.
pub(super) struct Session {
    pub(super) connection: Connection,
    /// Channels with confirms that wait for nothing. Each is used by one call at a time: see `publish`.
    idle: Mutex<Vec<Channel>>,
    /// The topics whose queues were made since this connection began.
    made: Mutex<HashSet<String>>,
}

impl Session {
    /// A channel with confirms, for one call alone.
    pub(super) async fn channel(&self) -> Result<Channel, Fault> {
        while let Some(channel) = lock(&self.idle).pop() {
            if channel.status().connected() {
                return Ok(channel);
            }
        }
        let channel = self.connection.create_channel().await?;
        channel.confirm_select(ConfirmSelectOptions::default()).await?;
        Ok(channel)
    }

    /// Takes a channel back on which every message was confirmed.
    pub(super) fn keep(&self, channel: Channel) {
        lock(&self.idle).push(channel);
    }

    /// Makes what a topic needs, unless this connection has done so before.
    pub(super) async fn prepare(&self, config: &Config, topic: &str) -> Result<(), Fault> {
        if lock(&self.made).contains(topic) {
            return Ok(());
        }
        // A channel of its own: a refusal ends it.
        let channel = self.connection.create_channel().await?;
        layout::exchange(&channel, config).await?;
        if config.create {
            for group in config.groups_of(topic) {
                layout::queues(&channel, config, group, topic).await?;
            }
        }
        lock(&self.made).insert(topic.to_owned());
        Ok(())
    }

    /// Somebody removed what was made: the next message makes it again.
    pub(super) fn forget(&self, topic: &str) {
        lock(&self.made).remove(topic);
    }

    /// Somebody may have removed anything.
    pub(super) fn forget_all(&self) {
        lock(&self.made).clear();
    }
}

type Opening = Shared<BoxFuture<'static, Result<Arc<Session>, Fault>>>;

/// The one connection of a publisher.
pub(super) struct Link {
    config: Arc<Config>,
    /// The newest attempt: still on its way, failed, or what it opened.
    newest: Mutex<Option<Opening>>,
}

impl Link {
    pub(super) fn new(config: Arc<Config>) -> Self {
        Self { config, newest: Mutex::new(None) }
    }

    /// The connection, once it is there. Who stops waiting does not stop the attempt: the next call goes on with it,
    /// so that a server that hangs is not asked by more and more connections.
    pub(super) async fn session(&self) -> Result<Arc<Session>, Fault> {
        let opening = {
            let mut newest = lock(&self.newest);
            let usable = newest.as_ref().filter(|opening| match opening.peek() {
                None => true,
                Some(Ok(session)) => session.connection.status().connected(),
                Some(Err(_)) => false,
            });
            match usable {
                Some(opening) => opening.clone(),
                None => newest.insert(self.begin()).clone(),
            }
        };
        opening.await
    }

    fn begin(&self) -> Opening {
        let config = Arc::clone(&self.config);
        let attempt = tokio::spawn(async move {
            let connection = connect(&config).await?;
            Ok(Arc::new(Session { connection, idle: Mutex::default(), made: Mutex::default() }))
        });
        let ended = |_| Err(Fault::Away("the program is ending".to_owned()));
        attempt.map(move |attempt| attempt.unwrap_or_else(ended)).boxed().shared()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
