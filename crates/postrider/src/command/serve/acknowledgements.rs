//! The topic on which groups elsewhere acknowledge: what they would say by HTTP, heard when this producer is there to hear it.

use std::sync::Arc;
use std::time::Duration;

use admin::{AcknowledgeRequest, Desk, Problem};
use broker::{Delivery, Position, ReceiveError, Subscriber, Subscription};
use tokio::sync::watch;

use crate::config::Acknowledgements;

/// Acknowledgements that are written at once.
const BATCH: usize = 500;

/// The wait after the broker or the store failed; doubled each time, up to the second.
const FIRST_WAIT: Duration = Duration::from_millis(100);
const LAST_WAIT: Duration = Duration::from_secs(10);

/// Listens until the process stops.
pub(super) async fn listen(
    subscriber: Arc<dyn Subscriber>,
    heard: Acknowledgements,
    desk: Arc<Desk>,
    mut stopped: watch::Receiver<bool>,
) {
    let mut wait = FIRST_WAIT;
    while !*stopped.borrow() {
        match hear(&*subscriber, &heard, &desk, &mut stopped, &mut wait).await {
            Ok(()) => return,
            Err(error) => {
                tracing::warn!(%error, topic = heard.topic, "acknowledgements cannot be heard; trying again")
            }
        }
        pause(&mut wait, &mut stopped).await;
    }
}

/// Waits until the process stops.
async fn end(stopped: &mut watch::Receiver<bool>) {
    // An error means that the sender is gone: the process ends.
    let _ = stopped.wait_for(|stopped| *stopped).await;
}

async fn pause(wait: &mut Duration, stopped: &mut watch::Receiver<bool>) {
    let _ = tokio::time::timeout(*wait, end(stopped)).await;
    *wait = (*wait * 2).min(LAST_WAIT);
}

/// Hears and writes until the process stops or the broker fails.
async fn hear(
    subscriber: &dyn Subscriber,
    heard: &Acknowledgements,
    desk: &Desk,
    stopped: &mut watch::Receiver<bool>,
    wait: &mut Duration,
) -> Result<(), ReceiveError> {
    let mut subscription = subscriber.subscribe(&heard.group, std::slice::from_ref(&heard.topic)).await?;
    loop {
        let deliveries = tokio::select! {
            deliveries = subscription.receive(BATCH) => deliveries?,
            () = end(stopped) => {
                subscription.close().await;
                return Ok(());
            }
        };
        let positions: Vec<Position> = deliveries.iter().map(|delivery| delivery.position).collect();
        while let Err(problem) = write(desk, &deliveries).await {
            tracing::warn!(error = problem.detail, "acknowledgements cannot be written; trying again");
            pause(wait, stopped).await;
            if *stopped.borrow() {
                return give_back(subscription, &positions).await;
            }
        }
        *wait = FIRST_WAIT;
        subscription.acknowledge(&positions).await?;
    }
}

async fn give_back(
    mut subscription: Box<dyn Subscription>,
    positions: &[Position],
) -> Result<(), ReceiveError> {
    subscription.give_back(positions).await?;
    subscription.close().await;
    Ok(())
}

/// Writes what can be written. An error says that nothing was, for now.
async fn write(desk: &Desk, deliveries: &[Delivery]) -> Result<(), Problem> {
    let mut requests = Vec::with_capacity(deliveries.len());
    for delivery in deliveries {
        match AcknowledgeRequest::parse(&delivery.message.payload) {
            Ok(request) => requests.push(request),
            Err(problem) => {
                let message = &delivery.message;
                tracing::warn!(message_id = %message.id, topic = message.topic, error = problem.detail, "this is no acknowledgement; going on");
            }
        }
    }
    for answer in desk.acknowledge_all(requests).await? {
        match answer {
            Ok(done) => {
                tracing::debug!(message_id = %done.message_id, group = done.consumer_group, "acknowledged by the topic");
            }
            Err(problem) => {
                tracing::warn!(error = problem.detail, "this acknowledgement is not taken; going on")
            }
        }
    }
    Ok(())
}
