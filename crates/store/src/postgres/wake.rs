//! Waking the relay when something was written.
//!
//! In one process a bell is rung. Other programs ring the doorbell: a trigger notifies, but only while a relay has said
//! that it sleeps, because a notification in every commit would make writers wait for each other. Whoever inserted before
//! the relay's word could be seen, and commits after it, rings nothing: so the relay looks again at once, after 5 and
//! after 50 milliseconds. A bell is a hint and nothing depends on it; a relay that hears nothing polls.

use std::fmt;
use std::future::poll_fn;
use std::time::Duration;

use tokio::sync::{Mutex, mpsc};
use tokio::time::{sleep, timeout};
use tokio_postgres::types::Type;
use tokio_postgres::{AsyncMessage, Client};
use uuid::Uuid;

use super::PostgresStore;
use super::connection::Connections;
use super::error::Trouble;

/// How long a relay that was woken goes on polling before it sleeps again: while traffic flows nobody needs a bell.
const CALM: Duration = Duration::from_millis(50);

/// When a relay that has gone to sleep looks again, each counted from the one before.
const LOOKS: [Duration; 3] = [Duration::ZERO, Duration::from_millis(5), Duration::from_millis(45)];

/// How long a sleeper's word holds: one that died must not cost the writers a notification for long.
const WORD: &str = "10 s";

/// How often it is given again.
const AGAIN: Duration = Duration::from_secs(5);

/// The wait before a doorbell that is out of order is tried again; the relay polls meanwhile.
const BROKEN: Duration = Duration::from_secs(1);

/// The trigger that rings.
pub(super) const TRIGGER: &str = "CREATE OR REPLACE TRIGGER outbox_doorbell AFTER INSERT ON outbox_events \
    FOR EACH STATEMENT EXECUTE FUNCTION postrider_doorbell()";

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
pub(super) struct Doorbell(Mutex<Option<Listener>>);

impl fmt::Debug for Doorbell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Doorbell").finish_non_exhaustive()
    }
}

struct Listener {
    client: Client,
    rings: mpsc::Receiver<()>,
    id: Uuid,
    /// How many of [`LOOKS`] were taken since the relay said that it sleeps; nothing while it is awake.
    asleep: Option<usize>,
}

impl Doorbell {
    /// Waits until the relay should look. Dropping it is safe: what was said stays said.
    async fn wait(&self, connections: &Connections) {
        let mut listener = self.0.lock().await;
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
        if listening.wait().await.is_err() {
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
        Ok(Self { client, rings, id: Uuid::new_v4(), asleep: None })
    }

    async fn wait(&mut self) -> Result<(), Trouble> {
        let looked = match self.asleep {
            Some(looked) => looked,
            None => {
                sleep(CALM).await;
                self.say_asleep().await?;
                self.asleep = Some(0);
                0
            }
        };
        if let Some(pause) = LOOKS.get(looked) {
            let rang = timeout(*pause, self.rings.recv()).await;
            self.asleep = Some(looked + 1);
            return if rang.is_ok() { self.rise().await } else { Ok(()) };
        }
        loop {
            match timeout(AGAIN, self.rings.recv()).await {
                Ok(_) => return self.rise().await,
                Err(_) => self.say_asleep().await?,
            }
        }
    }

    async fn say_asleep(&self) -> Result<(), Trouble> {
        self.client
            .execute_typed(
                "INSERT INTO sleepers (id, until) VALUES ($1, clock_timestamp() + $2::text::interval)
                 ON CONFLICT (id) DO UPDATE SET until = excluded.until",
                &[(&self.id, Type::UUID), (&WORD, Type::TEXT)],
            )
            .await?;
        Ok(())
    }

    /// Somebody rang: others need not.
    async fn rise(&mut self) -> Result<(), Trouble> {
        self.asleep = None;
        if self.client.is_closed() {
            return Err(Trouble::Pool("the doorbell's connection is gone".to_owned()));
        }
        self.client
            .execute_typed(
                "DELETE FROM sleepers WHERE id = $1 OR until < clock_timestamp()",
                &[(&self.id, Type::UUID)],
            )
            .await?;
        Ok(())
    }
}
