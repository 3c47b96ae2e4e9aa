//! A group that promises none or best-effort: it does not try again what failed, and remembers nothing.

use message::{RetryPolicy, Semantics};

use super::super::{Consumer, Handler, OnDead};
use super::Checker;

impl Checker<'_> {
    /// Refuses what needs a memory; says what has no effect.
    pub(super) fn fleeting(&mut self, section: &str, consumer: &Consumer) {
        let semantics = consumer.semantics;
        if matches!(consumer.handler, Handler::Sql(_) | Handler::Script(_)) {
            let kind = consumer.handler.kind();
            self.refuse(&format!("{section}.semantics"), format!(
                "{semantics} cannot be had here: {kind} works in a transaction of the store, and the mark that recognises a \
                 duplicate is in it; the nearest that can is \"at-most-once\""
            ));
        }
        if consumer.acknowledge.is_some() {
            self.refuse(&format!("{section}.acknowledge"), format!(
                "a group that promises {semantics} acknowledges to nobody, and what is sent again it would do twice: leave \
                 `acknowledge` out, or promise at-least-once"
            ));
        }
        let why = format!(
            "a group that promises {semantics} keeps no ids, so it recognises no duplicate: leave it out, or promise \
             at-least-once"
        );
        self.no_ids(section, consumer, &why);
        // For so long a message holds its partition that always finds the handler down.
        let give_up_after = match semantics {
            Semantics::BestEffort => consumer.retry.give_up_after,
            _ => RetryPolicy::default().give_up_after,
        };
        for (name, is_set) in [
            ("retry", consumer.retry != RetryPolicy { give_up_after, ..RetryPolicy::default() }),
            ("on_dead", consumer.on_dead != OnDead::Hold),
        ] {
            if is_set {
                self.warn(&format!("{section}.{name}"), format!(
                    "a group that promises {semantics} tries a message once and keeps none: this does nothing"
                ));
            }
        }
        for topic in &consumer.topics {
            if let Some(other) = self.config.asks_again(topic) {
                self.warn(&format!("{section}.topics"), format!(
                    "consumers.{other} has `{topic}` sent again when it does not acknowledge in time, and this group does again \
                     what comes again: leave `acknowledge` out there, or promise at-least-once here"
                ));
            }
            let Some((route_name, route)) = self.config.route_of(topic) else { continue };
            if (route.semantics, semantics) == (Semantics::AtMostOnce, Semantics::BestEffort) {
                self.warn(&format!("{section}.semantics"), format!(
                    "routes.{route_name} sends a message at most once, and after a crash this group may do one again: say \
                     semantics = \"at-most-once\" here too, or \"none\""
                ));
            }
        }
    }
}
