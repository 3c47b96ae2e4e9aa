//! Waking the relay when something was written.
//!
//! In one process a bell is rung. Other programs ring the doorbell: a trigger notifies, but only while a relay sleeps,
//! and one writer at a time, because commits that notify wait for each other. While messages are being claimed the relay
//! does not sleep and nobody rings.
//!
//! A relay that sleeps holds an advisory lock, shared with others that do; a writer tries it and lets it go at once. That
//! costs a writer less than a look into a table would, and a relay that dies lets go by itself. Whoever inserted before
//! the relay had the lock, and commits after it, rings nothing: so the relay looks again at once, after 5 and after 50
//! milliseconds. A bell is a hint and nothing depends on it; a relay that hears nothing polls.

use std::fmt;
use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::{Mutex, mpsc};
use tokio::time::{sleep, timeout};
use tokio_postgres::{AsyncMessage, Client};

use super::PostgresStore;
use super::connection::Connections;
use super::error::Trouble;

/// How long a relay must have claimed nothing before it sleeps: while traffic flows nobody needs a bell.
const CALM: Duration = Duration::from_millis(50);

/// When a relay that has gone to sleep looks again, each counted from the one before.
const LOOKS: [Duration; 3] = [Duration::ZERO, Duration::from_millis(5), Duration::from_millis(45)];

/// The wait before a doorbell that is out of order is tried again; the relay polls meanwhile.
const BROKEN: Duration = Duration::from_secs(1);

/// The number of the lock that sleeping relays share: a macro, because statements are made of it.
macro_rules! lock {
    () => {
        "hashtextextended('postrider doorbell', 0)"
    };
}

/// The trigger that rings, if the lock cannot be had because somebody sleeps (or because another writer has just tried
/// it, which costs a ring too many).
pub(super) const TRIGGER: &str = concat!(
    "CREATE OR REPLACE TRIGGER outbox_doorbell AFTER INSERT ON outbox_events FOR EACH STATEMENT WHEN \
     (CASE WHEN pg_try_advisory_lock(",
    lock!(),
    ") THEN NOT pg_advisory_unlock(",
    lock!(),
    ") ELSE true END) EXECUTE FUNCTION postrider_doorbell()"
);

const FALL_ASLEEP: &str = concat!("SELECT pg_advisory_lock_shared(", lock!(), ")");

/// All, because a wait that was dropped may have taken it without noting that.
const RISE: &str = "SELECT pg_advisory_unlock_all()";

impl PostgresStore {
    /// Wakes a relay of this process that waits for work. Call it after committing a transaction in
    /// which messages were appended; a relay that hears nothing finds them by polling.
    pub fn ring(&self) {
        self.bell.notify_one();
    }

    pub(super) async fn wake(&self) {
        let Some(doorbell) = &self.doorbell else { return self.bell.notified().await };
        tokio::select! {
            () = self.bell.notified() => {}
            () = doorbell.wait(&self.connections) => {}
        }
    }
}

/// The bell that other programs ring, heard on a connection of its own: a pooler would drop it.
#[derive(Default)]
pub(super) struct Doorbell {
    listener: Mutex<Option<Listener>>,
    /// Messages were claimed since the relay last thought of sleeping.
    busy: AtomicBool,
}

impl fmt::Debug for Doorbell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Doorbell").finish_non_exhaustive()
    }
}

struct Listener {
    client: Client,
    rings: mpsc::Receiver<()>,
    /// How many of [`LOOKS`] were taken since the relay fell asleep; nothing while it is awake.
    asleep: Option<usize>,
}

impl Doorbell {
    /// Messages were claimed.
    pub(super) fn keep_awake(&self) {
        self.busy.store(true, Ordering::Relaxed);
    }

    /// Waits until the relay should look. Dropping it is safe: what was said stays said.
    async fn wait(&self, connections: &Connections) {
        let mut listener = self.listener.lock().await;
        if listener.as_ref().is_none_or(|listener| listener.client.is_closed()) {
            *listener = None;
            match Listener::connect(connections).await {
                Ok(connected) => *listener = Some(connected),
                Err(trouble) => {
                    let error = crate::Error::from(trouble);
                    tracing::debug!(%error, "nobody can hear the doorbell; the relay polls");
                    return sleep(BROKEN).await;
                }
            }
        }
        let Some(listening) = listener.as_mut() else { return };
        if listening.wait(&self.busy).await.is_err() {
            *listener = None;
        }
    }
}

impl Listener {
    async fn connect(connections: &Connections) -> Result<Self, Trouble> {
        let (client, mut connection) = connections.listening().await?;
        // One ring is as good as many.
        let (ring, rings) = mpsc::channel(1);
        tokio::spawn(async move {
            while let Some(Ok(message)) = poll_fn(|context| connection.poll_message(context)).await {
                if matches!(message, AsyncMessage::Notification(_)) {
                    let _ = ring.try_send(());
                }
            }
        });
        client.batch_execute("LISTEN postrider").await?;
        Ok(Self { client, rings, asleep: None })
    }

    async fn wait(&mut self, busy: &AtomicBool) -> Result<(), Trouble> {
        let looked = match self.asleep {
            Some(looked) => looked,
            None => {
                sleep(CALM).await;
                while busy.swap(false, Ordering::Relaxed) {
                    sleep(CALM).await;
                }
                self.client.batch_execute(FALL_ASLEEP).await?;
                self.asleep = Some(0);
                0
            }
        };
        if let Some(pause) = LOOKS.get(looked) {
            let rang = timeout(*pause, self.rings.recv()).await;
            self.asleep = Some(looked + 1);
            return if rang.is_ok() { self.rise().await } else { Ok(()) };
        }
        self.rings.recv().await;
        self.rise().await
    }

    /// Somebody rang: others need not.
    async fn rise(&mut self) -> Result<(), Trouble> {
        self.asleep = None;
        if self.client.is_closed() {
            return Err(Trouble::Pool("the doorbell's connection is gone".to_owned()));
        }
        self.client.batch_execute(RISE).await?;
        Ok(())
    }
}
