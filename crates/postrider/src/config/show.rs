//! The settings in force, written as a file that could be loaded again, without its secrets.

use std::fmt::Write as _;

use broker::Format;
use message::{OnDead, Order, RetryPolicy};
use store::Sent;

use super::units::{duration_text, size_text};
use super::{
    ACCEPT_LOSS, Acknowledge, AcknowledgeTo, Acknowledgements, Config, Handler, LogFormat, Place, Watch,
};

impl Config {
    /// The whole as TOML, every default spelled out.
    pub(crate) fn to_toml(&self) -> String {
        let mut out = String::new();
        self.write(&mut out).expect("writing to a String cannot fail");
        out
    }

    fn write(&self, out: &mut String) -> std::fmt::Result {
        self.write_store(out)?;
        writeln!(
            out,
            "\n[producer]\nlisten = \"{}\"\nbody_limit = \"{}\"",
            self.producer.listen,
            size_text(self.producer.body_limit)
        )?;
        if let Some(secrets) = &self.producer.acknowledge_secrets {
            writeln!(out, "# acknowledge_secrets: {}, not shown", secrets.count())?;
        }
        if let Some(Acknowledgements { topic, broker, group }) = &self.producer.acknowledgements {
            writeln!(
                out,
                "acknowledgements = {{ topic = {}, broker = {}, group = {} }}",
                quoted(topic),
                quoted(broker),
                quoted(group)
            )?;
        }
        writeln!(out, "\n[consumer]\nlisten = \"{}\"", self.consumer.listen)?;
        match &self.consumer.acknowledge_to {
            Some(AcknowledgeTo::Http(url)) => writeln!(out, "acknowledge_to = {}", quoted(&of_others(url)))?,
            Some(AcknowledgeTo::Topic { topic, broker }) => {
                let (topic, broker) = (quoted(topic), quoted(broker));
                writeln!(out, "acknowledge_to = {{ topic = {topic}, broker = {broker} }}")?;
            }
            None => {}
        }
        if let Some(url) = &self.consumer.redis {
            writeln!(out, "redis = {}", quoted(&redacted(url)))?;
        }
        let relay = &self.relay;
        writeln!(
            out,
            "\n[relay]\nlease = \"{}\"\nbatch = {}\nbytes = \"{}\"\npoll = \"{}\"",
            duration_text(relay.lease),
            relay.batch,
            size_text(relay.bytes),
            duration_text(relay.poll)
        )?;
        if let Some(claims) = &relay.claims {
            writeln!(
                out,
                "claims = {}\nclaims_ttl = \"{}\"\nclaims_prefix = {}\nclaims_keep = \"{}\"",
                quoted(&redacted(&claims.url)),
                duration_text(claims.ttl),
                quoted(&claims.prefix),
                duration_text(claims.keep)
            )?;
        }
        let format = match self.log.format {
            LogFormat::Text => "text",
            LogFormat::Json => "json",
        };
        writeln!(out, "\n[log]\nformat = \"{format}\"\nlevel = {}", quoted(&self.log.level))?;
        for (name, broker) in &self.brokers {
            writeln!(out, "\n[brokers.{}]\nurl = {}", key(name), quoted(&redacted(&broker.url)))?;
        }
        self.write_routes(out)?;
        self.write_consumers(out)
    }

    fn write_store(&self, out: &mut String) -> std::fmt::Result {
        let store = &self.store;
        writeln!(out, "[store]\nurl = {}", quoted(&redacted(&store.url)))?;
        if matches!(store.place, Place::Postgres | Place::Mysql) {
            let sent = match store.sent {
                Sent::Keep => "keep",
                Sent::Delete => "delete",
                Sent::Partition => "partition",
            };
            writeln!(out, "sent = \"{sent}\"\nconnections = {}", store.connections)?;
        }
        if store.place == Place::Postgres {
            writeln!(out, "doorbell = {}", store.doorbell)?;
        }
        if store.place == Place::Redis {
            writeln!(out, "prefix = {}\nreplicas = {}", quoted(&store.prefix), store.replicas)?;
            if store.accept_loss {
                writeln!(out, "accept_loss = \"{ACCEPT_LOSS}\"")?;
            }
        }
        let kept = &store.retention;
        writeln!(
            out,
            "retention = {{ sent = \"{}\", dead = \"{}\", keys = \"{}\", audit = \"{}\" }}",
            duration_text(kept.sent),
            duration_text(kept.dead),
            duration_text(kept.keys),
            duration_text(kept.audit)
        )
    }

    fn write_routes(&self, out: &mut String) -> std::fmt::Result {
        for (name, route) in &self.routes {
            writeln!(out, "\n[routes.{}]", key(name))?;
            writeln!(out, "topics = {}", list(route.topics.iter().map(|pattern| pattern.as_str())))?;
            writeln!(out, "broker = {}\nsemantics = \"{}\"", quoted(&route.broker), route.semantics)?;
            if let Some(why) = &route.why {
                writeln!(out, "why = {}", quoted(why))?;
            }
            if route.idempotent {
                writeln!(out, "idempotent = true")?;
            }
            writeln!(out, "order = \"{}\"\non_dead = \"{}\"", order(route.order), on_dead(route.on_dead))?;
            writeln!(out, "retry = {}", retry(&route.retry))?;
            if let Some(topic) = &route.copy_to {
                writeln!(out, "copy_to = {}", quoted(topic))?;
            }
            if let Some(Watch { window, drop }) = route.watch {
                writeln!(out, "watch = {{ window = \"{}\", drop = {drop:?} }}", duration_text(window))?;
            }
            let (mode, source) = match &route.format {
                Format::Native => continue,
                Format::CloudEvents { source } => ("binary", source),
                Format::CloudEventsStructured { source } => ("structured", source),
            };
            writeln!(out, "cloudevents = \"{mode}\"\nsource = {}", quoted(source))?;
        }
        Ok(())
    }

    fn write_consumers(&self, out: &mut String) -> std::fmt::Result {
        if self.consumers.is_empty() {
            // Without the empty section the built-in groups would come back.
            writeln!(out, "\n[consumers]")?;
        }
        for (name, consumer) in &self.consumers {
            writeln!(out, "\n[consumers.{}]", key(name))?;
            writeln!(out, "topics = {}", list(consumer.topics.iter().map(String::as_str)))?;
            writeln!(out, "broker = {}\nsemantics = \"{}\"", quoted(&consumer.broker), consumer.semantics)?;
            writeln!(out, "dedup = \"{}\"", consumer.dedup.word())?;
            writeln!(out, "keep_ids = \"{}\"", duration_text(consumer.keep_ids))?;
            writeln!(out, "replay = \"{}\"", duration_text(consumer.replay))?;
            if let Some(Acknowledge { timeout, check_every, max_redeliveries }) = consumer.acknowledge {
                let (timeout, check_every) = (duration_text(timeout), duration_text(check_every));
                writeln!(
                    out,
                    "acknowledge = {{ timeout = \"{timeout}\", check_every = \"{check_every}\", \
                     max_redeliveries = {max_redeliveries} }}"
                )?;
            }
            writeln!(
                out,
                "order = \"{}\"\non_dead = \"{}\"",
                order(consumer.order),
                on_dead(consumer.on_dead)
            )?;
            writeln!(out, "retry = {}", retry(&consumer.retry))?;
            writeln!(out, "handler = {}", handler(&consumer.handler))?;
        }
        Ok(())
    }
}

/// The word for an order.
pub(crate) fn order(order: Order) -> &'static str {
    match order {
        Order::Key => "key",
        Order::None => "none",
    }
}

/// The word for what a Dead message does.
pub(crate) fn on_dead(on_dead: OnDead) -> &'static str {
    match on_dead {
        OnDead::Hold => "hold",
        OnDead::Skip => "skip",
    }
}

fn retry(retry: &RetryPolicy) -> String {
    format!(
        "{{ max_attempts = {}, first = \"{}\", cap = \"{}\", give_up_after = \"{}\", count_outages = {} }}",
        retry.max_attempts,
        duration_text(retry.first),
        duration_text(retry.cap),
        duration_text(retry.give_up_after),
        retry.count_outages
    )
}

fn handler(handler: &Handler) -> String {
    match handler {
        Handler::Log => "{ log = true }".to_owned(),
        Handler::Http { url, timeout } => {
            format!("{{ http = {}, timeout = \"{}\" }}", quoted(&of_others(url)), duration_text(*timeout))
        }
        Handler::Sql(statement) => format!("{{ sql = {} }}", quoted(statement)),
        Handler::Script(script) => format!("{{ script = {} }}", quoted(script)),
        Handler::Command { line, timeout } => {
            let line = list(line.iter().map(String::as_str));
            format!("{{ command = {line}, timeout = \"{}\" }}", duration_text(*timeout))
        }
    }
}

fn key(name: &str) -> String {
    let bare = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte));
    if bare && !name.is_empty() { name.to_owned() } else { quoted(name) }
}

fn list<'a>(items: impl Iterator<Item = &'a str>) -> String {
    format!("[{}]", items.map(quoted).collect::<Vec<_>>().join(", "))
}

fn quoted(text: &str) -> String {
    toml::Value::String(text.to_owned()).to_string()
}

/// A URL of somebody else's, without its password and parameters: nobody here knows which of them are secret.
fn of_others(url: &str) -> String {
    match redacted(url).split_once('?') {
        Some((place, _)) => format!("{place}?***"),
        None => redacted(url),
    }
}

/// A URL without its password, and without parameters that are named like secrets.
pub(crate) fn redacted(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else { return url.to_owned() };
    let (rest, query) = rest.split_once('?').map_or((rest, None), |(rest, query)| (rest, Some(query)));
    let (authority, path) = rest.find('/').map_or((rest, ""), |at| rest.split_at(at));
    let authority = match authority.rsplit_once('@') {
        Some((user, host)) => format!("{}:***@{host}", user.split(':').next().unwrap_or_default()),
        None => authority.to_owned(),
    };
    let mut text = format!("{scheme}://{authority}{path}");
    if let Some(query) = query {
        const SECRET: [&str; 5] = ["password", "token", "secret", "key", "signature"];
        let shown: Vec<String> = query
            .split('&')
            .map(|pair| match pair.split_once('=') {
                Some((name, _)) if SECRET.iter().any(|word| name.to_lowercase().contains(word)) => {
                    format!("{name}=***")
                }
                _ => pair.to_owned(),
            })
            .collect();
        text.push('?');
        text.push_str(&shown.join("&"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwords_and_tokens_are_not_shown() {
        let cases = [
            ("http://ann:hush@host:1/p?token=abc&a=b", "http://ann:***@host:1/p?token=***&a=b"),
            ("postgres://ann:p@ss@host/db", "postgres://ann:***@host/db"),
            ("https://onlytoken@host", "https://onlytoken:***@host"),
            ("sqlite://postrider-data/postrider.db", "sqlite://postrider-data/postrider.db"),
            ("embedded://", "embedded://"),
        ];
        for (url, shown) in cases {
            assert_eq!(redacted(url), shown);
        }
        assert_eq!(of_others("https://ann:hush@host/p?k=hush"), "https://ann:***@host/p?***");
        assert_eq!(of_others("https://host/p"), "https://host/p");
    }
}
