//! What a person sees first: what runs where, and one call to try.

use std::net::SocketAddr;

use serde_json::json;

use super::super::failure::Failure;
use super::super::output::Output;
use crate::config::{Config, redacted};

/// What runs.
pub(super) struct Running<'a> {
    pub(super) producer: Option<SocketAddr>,
    pub(super) consumer: Option<SocketAddr>,
    pub(super) relay: bool,
    pub(super) config: &'a Config,
}

/// Says what runs where. A script gets one line of JSON, with the ports that were chosen.
pub(super) fn print(running: &Running<'_>, output: &mut Output) -> Result<(), Failure> {
    let url = |address: &SocketAddr| format!("http://{address}");
    let config = running.config;
    if output.is_json() {
        let line = json!({
            "producer": running.producer.as_ref().map(url),
            "consumer": running.consumer.as_ref().map(url),
            "relay": running.relay,
            "store": redacted(&config.store.url),
            "pid": std::process::id(),
        });
        output.line(line.to_string())?;
        return output.flush();
    }
    output.line(format!("Postrider {}", env!("CARGO_PKG_VERSION")))?;
    if let Some(address) = &running.producer {
        output
            .line(format!("  producer  {}   send, status, dead letters; the page is at /", url(address)))?;
    }
    if running.relay {
        let routes: Vec<String> = config
            .routes
            .values()
            .flat_map(|route| route.topics.iter().map(move |topic| format!("{topic} → {}", route.broker)))
            .collect();
        output.line(format!("  relay     {}", routes.join(", ")))?;
    }
    if let Some(address) = &running.consumer {
        let groups: Vec<&str> = config.consumers.keys().map(String::as_str).collect();
        let groups = if groups.is_empty() { "no groups".to_owned() } else { groups.join(", ") };
        output.line(format!("  consumer  {}   {groups}", url(address)))?;
    }
    output.line(format!("  store     {}", redacted(&config.store.url)))?;
    output.line("            `postrider contract` says what is promised and what is not")?;
    if let Some(address) = &running.producer {
        let topic = config
            .consumers
            .values()
            .flat_map(|consumer| &consumer.topics)
            .find(|topic| *topic == "user-events")
            .or_else(|| config.consumers.values().flat_map(|consumer| &consumer.topics).next())
            .map_or("user-events", String::as_str);
        output.line("\nTry it:")?;
        output.line(format!(
            "  curl -X POST \"{}/api/messages/send\" -H \"Content-Type: application/json\" \\",
            url(address)
        ))?;
        output.line(format!(
            "    -d '{{ \"topic\": \"{topic}\", \"message\": \"A user created an account\" }}'"
        ))?;
    }
    output.line("")?;
    output.flush()
}
