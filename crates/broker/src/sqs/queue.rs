//! From a topic to its queue: the name, whether it is there, and making it.

use std::collections::HashMap;
use std::sync::{Arc, MutexGuard};

use aws_sdk_sqs::types::QueueAttributeName;

use super::error::{Trouble, trouble};
use super::{Broker, Config};

/// SQS takes no longer names.
const LONGEST_NAME: usize = 80;

/// As long as SQS keeps messages: two weeks. Four days, its default, is less than some holidays.
const RETENTION: &str = "1209600";

/// A queue that is there.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Queue {
    pub(super) topic: String,
    pub(super) name: String,
    /// By which SQS wants it to be named.
    pub(super) url: String,
}

/// What the queue of a topic is called.
pub(super) fn name(config: &Config, topic: &str) -> String {
    let end = if config.fifo { ".fifo" } else { "" };
    format!("{}{}{end}", config.prefix, topic.replace('.', "-"))
}

impl Broker {
    /// The queue of a topic; made where it is missing and may be made.
    ///
    /// # Errors
    /// Says what stands in the way. Nothing of it is remembered: the next call looks again.
    pub(super) async fn queue(&self, topic: &str) -> Result<Arc<Queue>, Trouble> {
        let config = &self.inner.config;
        let name = name(config, topic);
        {
            let queues = self.queues();
            if let Some(queue) = queues.get(topic) {
                return Ok(Arc::clone(queue));
            }
            if let Some(other) = queues.values().find(|queue| queue.name == name) {
                let text = format!("the topics `{topic}` and `{}` would share it: rename one", other.topic);
                return Err(Trouble::Setting(text));
            }
        }
        if name.len() > LONGEST_NAME {
            return Err(Trouble::Setting(format!("its name is longer than {LONGEST_NAME} characters")));
        }
        let url = match self.find(&name).await {
            Err(Trouble::Missing(_)) if config.create => self.make(&name).await?,
            Err(Trouble::Missing(text)) => {
                let text = format!("{text}: make the queue of the topic `{topic}`, or set create=true");
                return Err(Trouble::Missing(text));
            }
            found => found?,
        };
        let queue = Arc::new(Queue { topic: topic.to_owned(), name, url });
        self.queues().insert(topic.to_owned(), Arc::clone(&queue));
        Ok(queue)
    }

    /// The URL of a queue that is there.
    pub(super) async fn find(&self, name: &str) -> Result<String, Trouble> {
        let asked = self.client().await.get_queue_url().queue_name(name).send().await;
        let url = asked.map_err(|error| setting(trouble(&error)))?.queue_url;
        url.ok_or_else(|| Trouble::Unknown("SQS names no URL".to_owned()))
    }

    async fn make(&self, name: &str) -> Result<String, Trouble> {
        let mut attributes =
            HashMap::from([(QueueAttributeName::MessageRetentionPeriod, RETENTION.to_owned())]);
        if self.inner.config.fifo {
            attributes.extend([
                (QueueAttributeName::FifoQueue, "true".to_owned()),
                // Limits for each key instead of for the whole queue.
                (QueueAttributeName::DeduplicationScope, "messageGroup".to_owned()),
                (QueueAttributeName::FifoThroughputLimit, "perMessageGroupId".to_owned()),
            ]);
        }
        let made = self.client().await.create_queue().queue_name(name).set_attributes(Some(attributes));
        match made.send().await {
            Ok(made) => made.queue_url.ok_or_else(|| Trouble::Unknown("SQS names no URL".to_owned())),
            // Somebody made it in the meantime, with other settings.
            Err(error) if error.as_service_error().is_some_and(|error| error.is_queue_name_exists()) => {
                self.find(name).await
            }
            Err(error) => Err(setting(trouble(&error))),
        }
    }

    /// Looks for a queue again that was there once.
    pub(super) fn forget(&self, queue: &Queue) {
        self.queues().remove(&queue.topic);
    }

    fn queues(&self) -> MutexGuard<'_, HashMap<String, Arc<Queue>>> {
        self.inner.queues.lock().expect("nobody panics while holding the map")
    }
}

/// A request about a queue has nothing of a message in it, so no message is to blame.
fn setting(trouble: Trouble) -> Trouble {
    match trouble {
        Trouble::Refused(text) => Trouble::Setting(text),
        Trouble::Unknown(text) => Trouble::Away(text),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_queue_is_made_of_prefix_topic_and_kind() {
        let standard = Config { prefix: "shop-".to_owned(), ..Config::new("eu-central-1") };
        assert_eq!(name(&standard, "orders.eu"), "shop-orders-eu");
        assert_eq!(name(&Config { fifo: true, ..standard }, "orders"), "shop-orders.fifo");
    }
}
