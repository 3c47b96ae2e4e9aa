//! A group that promises exactly-once: its work is messages, and everything that belongs to another kind of work is refused.

use message::Semantics;

use super::super::{Consumer, Handler};
use super::Checker;

impl Checker<'_> {
    /// What such a group can do is decided by its handler here, and by its broker when that is opened.
    pub(super) fn exact(&mut self, section: &str, consumer: &Consumer) {
        if !matches!(consumer.handler, Handler::Http { .. } | Handler::Command { .. }) {
            let kind = consumer.handler.kind();
            self.refuse(&format!("{section}.semantics"), format!(
                "exactly-once cannot be had here: it is for messages that a handler makes of messages, and {kind} makes \
                 none; the nearest that can is \"effectively-once\". For exactly-once, use an http or command handler \
                 that answers with messages"
            ));
            return;
        }
        if consumer.acknowledge.is_some() {
            self.refuse(
                &format!("{section}.acknowledge"),
                "a group that promises exactly-once acknowledges to nobody, for that is in no transaction of the \
                 broker: leave `acknowledge` out, or promise effectively-once"
                    .to_owned(),
            );
        }
        self.no_ids(
            section,
            consumer,
            "a group that promises exactly-once keeps no ids, its offsets are all that it remembers: leave it out, or \
             promise effectively-once",
        );
        for topic in &consumer.topics {
            let Some((route_name, route)) = self.config.route_of(topic) else { continue };
            if route.semantics != Semantics::ExactlyOnce {
                self.warn(&format!("{section}.semantics"), format!(
                    "routes.{route_name} promises {}: what it sends twice, this group transforms twice; promise \
                     exactly-once there too",
                    route.semantics
                ));
            }
            if let Some(other) = self.config.asks_again(topic).filter(|_| consumer.acknowledge.is_none()) {
                self.refuse(&format!("{section}.topics"), format!(
                    "consumers.{other} has `{topic}` sent again when it does not acknowledge in time, and this group would \
                     transform it twice: leave `acknowledge` out there, or promise effectively-once here"
                ));
            }
        }
    }
}
