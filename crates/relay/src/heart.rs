//! The heartbeat: on a thread of its own, so that no busy runtime can make a relay lose its lanes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use store::{Beat, Beaten, TopicRule};
use tokio::sync::{Notify, oneshot};

use crate::leases::Complainant;
use crate::{Route, Shared};

/// While lanes are missing or being given up, the store is asked this often at least.
const EAGER: Duration = Duration::from_secs(1);

pub(crate) struct Heart {
    done: oneshot::Receiver<()>,
    stop: Arc<Notify>,
}

impl Heart {
    pub(crate) fn start(shared: Arc<Shared>) -> Self {
        let (finished, done) = oneshot::channel();
        let stop = Arc::new(Notify::new());
        let stopped = stop.clone();
        std::thread::Builder::new()
            .name("relay-heartbeat".to_owned())
            .spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread()
                    .enable_all()
                    .build()
                    .expect("a runtime of one thread needs no more than the thread it is on");
                runtime.block_on(run(&shared, &stopped));
                let _ = finished.send(());
            })
            .expect("the system can start one more thread");
        Self { done, stop }
    }

    /// Ends the heartbeat without waiting for its last beat.
    pub(crate) fn abandon(&self) {
        self.stop.notify_one();
    }

    pub(crate) async fn stop(self) {
        self.abandon();
        let _ = self.done.await;
    }
}

async fn run(shared: &Arc<Shared>, stop: &Notify) {
    loop {
        let pause = match beat(shared).await {
            Some(beaten) if beaten.wanting > 0 || beaten.surplus > 0 => EAGER.min(shared.settings.lease / 3),
            Some(_) => shared.settings.lease / 3,
            None => EAGER.min(shared.settings.lease / 10),
        };
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = shared.pulse.notified() => {}
            () = stop.notified() => return,
        }
    }
}

async fn beat(shared: &Arc<Shared>) -> Option<Beaten> {
    fail::fail_point!("relay::renewing", |_| None);
    let asked = Instant::now();
    let beat = Beat {
        instance: shared.instance.clone(),
        lease: shared.settings.lease,
        held: shared.leases.held(),
        take: !*shared.stopping.borrow(),
        rule: rule(shared.clone()),
    };
    match shared.store.beat(&beat).await {
        Ok(beaten) => {
            shared.leases.well(Complainant::Heart);
            let lost = shared.leases.update(&beaten, asked, shared.settings.lease);
            if !lost.is_empty() {
                tracing::warn!(lanes = ?lost, "lost lanes to another relay: their lease ran out");
            }
            if beaten.orphans > 0 {
                tracing::warn!(
                    messages = beaten.orphans,
                    dead = beaten.dead,
                    "took over messages that a dead relay left in flight: they are sent again"
                );
            }
            if beaten.held != beat.held || beaten.surplus > 0 {
                tracing::debug!(lanes = beaten.held.len(), instances = beaten.instances, "holds lanes");
                shared.wake.send_modify(|count| *count += 1);
            }
            Some(beaten)
        }
        Err(error) => {
            tracing::warn!(%error, "could not renew the leases; trying again");
            shared.leases.complain(Complainant::Heart, error.to_string());
            None
        }
    }
}

/// How the routes hold keys: what an orphan that becomes Dead needs to know.
fn rule(shared: Arc<Shared>) -> Arc<dyn Fn(&str) -> TopicRule + Send + Sync> {
    Arc::new(move |topic| {
        let route = shared.routes.of(topic).map(|way| &way.route);
        TopicRule {
            channel: 0,
            take: 0,
            hold_failed: route.is_some_and(Route::holds_failed),
            hold_dead: route.is_some_and(Route::holds_dead),
        }
    })
}
