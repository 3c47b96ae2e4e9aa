//! Topics and subscriptions: made where they are missing and may be made.

use std::time::Duration;

use google_cloud_pubsub::Error;
use google_cloud_pubsub::model::{ExpirationPolicy, Subscription, Topic};

use super::config::Endpoint;
use super::error::{self, Failure};
use super::{Clients, Inner, NoClient, misnamed};
use crate::{Outcome, ReceiveError};

/// The longest that the service keeps what a group has not acknowledged.
const KEPT: Duration = Duration::from_secs(7 * 24 * 60 * 60);

/// Why a topic or subscription is not as it must be.
#[derive(Debug)]
pub(super) enum Unfit {
    /// A call failed; the text names what it was about.
    Call(Error, String),
    /// Somebody has to change something.
    Wrong(String),
    /// There are no credentials.
    Client(NoClient),
    /// Nothing came back in time.
    Late,
}

impl Unfit {
    pub(super) fn outcome(&self, topic: &str) -> Outcome {
        match self {
            // What is not acceptable here is a setting of ours, and no message is to blame.
            Self::Call(error, about) if error::failure(error) == Failure::Invalid => {
                Outcome::Misconfigured { error: format!("{about}: {}", error::explain(error)) }
            }
            Self::Call(error, _) => error::outcome(error, topic),
            Self::Wrong(error) => Outcome::Misconfigured { error: error.clone() },
            Self::Client(error) => Outcome::Misconfigured { error: error.to_string() },
            Self::Late => {
                Outcome::Unreachable { error: format!("Pub/Sub says nothing about the topic {topic}") }
            }
        }
    }

    pub(super) fn receive(self) -> ReceiveError {
        match self {
            Self::Call(error, about) => error::receive(&error, &about),
            Self::Wrong(error) => ReceiveError::Misconfigured(error),
            Self::Client(error) => ReceiveError::Misconfigured(error.to_string()),
            Self::Late => ReceiveError::Unreachable("Pub/Sub says nothing".to_owned()),
        }
    }
}

impl Inner {
    /// Makes `topic` and the subscriptions of the groups that were declared, or leaves that to others.
    pub(super) async fn prepare_topic(&self, topic: &str) -> Result<(), Unfit> {
        let path = self.topic_path(topic);
        if let Some(wrong) = misnamed(&path) {
            return Err(Unfit::Wrong(wrong));
        }
        if !self.config.create {
            return Ok(());
        }
        let clients = self.clients().await.map_err(Unfit::Client)?;
        self.make_topic(clients, topic).await?;
        let groups = self.config.groups.iter().map(|group| self.prepare_subscription(group, topic));
        futures::future::try_join_all(groups).await.map(drop)
    }

    /// Finds or makes the subscription of `group` to `topic`, and refuses one that keeps no order.
    pub(super) async fn prepare_subscription(&self, group: &str, topic: &str) -> Result<(), Unfit> {
        let path = self.subscription_path(group, topic);
        if let Some(wrong) = misnamed(&path) {
            return Err(Unfit::Wrong(wrong));
        }
        let clients = self.clients().await.map_err(Unfit::Client)?;
        let about = || format!("subscription {path}");
        let found = match clients.subscriptions.get_subscription().set_subscription(&path).send().await {
            Ok(found) => found,
            Err(error) if self.config.create && error::failure(&error) == Failure::Missing => {
                self.make_topic(clients, topic).await?;
                match self.make_subscription(clients, group, topic).await? {
                    Some(made) => return self.start_at_the_oldest(clients, &made).await,
                    // Somebody else made it in the same moment.
                    None => return Ok(()),
                }
            }
            Err(error) => return Err(Unfit::Call(error, about())),
        };
        if !found.enable_message_ordering {
            let wrong =
                format!("the {} was made without message ordering: delete it and make it anew", about());
            return Err(Unfit::Wrong(wrong));
        }
        if found.topic != self.topic_path(topic) {
            let wrong = format!("the {} is of {}: delete it and make it anew", about(), found.topic);
            return Err(Unfit::Wrong(wrong));
        }
        Ok(())
    }

    async fn make_topic(&self, clients: &Clients, topic: &str) -> Result<(), Unfit> {
        let path = self.topic_path(topic);
        let request = clients.topics.create_topic().set_name(&path);
        let request = request.set_or_clear_message_retention_duration(self.config.retain.map(span));
        match request.send().await {
            Ok(Topic { .. }) => Ok(()),
            Err(error) if error::failure(&error) == Failure::There => Ok(()),
            Err(error) => Err(Unfit::Call(error, format!("topic {path}"))),
        }
    }

    /// The subscription, if nobody else made it first.
    async fn make_subscription(
        &self,
        clients: &Clients,
        group: &str,
        topic: &str,
    ) -> Result<Option<Subscription>, Unfit> {
        let path = self.subscription_path(group, topic);
        let deadline = i32::try_from(self.config.ack_deadline.as_secs()).unwrap_or(600);
        let request = clients.subscriptions.create_subscription();
        let request = request.set_name(&path).set_topic(self.topic_path(topic));
        let request = request.set_enable_message_ordering(true).set_ack_deadline_seconds(deadline);
        let request = request.set_enable_exactly_once_delivery(self.config.exactly_once);
        // The service's own default forgets a group, and with it its messages, that was away for a month.
        let request = request.set_expiration_policy(ExpirationPolicy::new());
        let request = request.set_message_retention_duration(span(KEPT));
        match request.send().await {
            Ok(made) => Ok(Some(made)),
            Err(error) if error::failure(&error) == Failure::There => Ok(None),
            Err(error) => Err(Unfit::Call(error, format!("subscription {path}"))),
        }
    }

    /// A topic that retains its messages has some that are older than the subscription.
    async fn start_at_the_oldest(&self, clients: &Clients, made: &Subscription) -> Result<(), Unfit> {
        let Some(retained) = &made.topic_message_retention_duration else { return Ok(()) };
        let oldest = chrono::Utc::now() - chrono::TimeDelta::seconds(retained.seconds());
        let time = google_cloud_wkt::Timestamp::clamp(oldest.timestamp(), 0);
        let request = clients.subscriptions.seek().set_subscription(&made.name).set_time(time);
        match request.send().await {
            Ok(_) => Ok(()),
            // Emulators cannot seek; Google's begins with what is retained by itself.
            Err(_) if matches!(self.endpoint, Endpoint::Emulator(_)) => Ok(()),
            Err(error) => Err(Unfit::Call(error, format!("subscription {}", made.name))),
        }
    }
}

fn span(duration: Duration) -> google_cloud_wkt::Duration {
    google_cloud_wkt::Duration::clamp(i64::try_from(duration.as_secs()).unwrap_or(i64::MAX), 0)
}
