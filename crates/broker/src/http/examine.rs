//! What `postrider doctor` says of a destination. It connects and hangs up; it sends no request, because every request
//! is a message to somebody.

use std::net::IpAddr;

use async_trait::async_trait;
use tokio::time::timeout;
use url::Host;

use super::config::PARAMETERS;
use super::error::reason;
use super::guard::{Allow, Refused};
use super::{Broker, Config};
use crate::address::nearest;
use crate::{Examine, Finding, Plan};

/// How alike a name must be to one of ours to be taken for a slip of the pen.
const ALIKE: f64 = 0.9;

#[async_trait]
impl Examine for Broker {
    async fn examine(&self, plan: &Plan) -> Vec<Finding> {
        let config = &self.inner.config;
        let about = format!("destination {}", config.origin());
        let mut findings = Vec::new();
        match self.addresses().await {
            Ok(addresses) => {
                findings.push(self.connection(&about).await);
                findings.extend(needless(config, &addresses));
                findings.extend(open_to_all(config, &addresses));
            }
            Err(error) => {
                let fix = "correct the host in the URL, or its entry in DNS";
                findings.push(Finding::broken(&about, error, fix));
            }
        }
        if let Some(error) = self.inner.gone.get() {
            let fix = "correct the URL or remove the route, and start the program again";
            findings.push(Finding::broken(&about, error.clone(), fix));
        }
        findings.extend(unsigned(config));
        findings.extend(mistaken(config));
        if let Some((group, _)) = plan.groups.first() {
            let text = format!("the group `{group}` would wait forever: nothing can be received from here");
            let fix = "let the group listen to a broker that keeps messages";
            findings.push(Finding::broken(&about, text, fix));
        }
        findings
    }
}

impl Broker {
    /// Where it is, as far as that is allowed.
    async fn addresses(&self) -> Result<Vec<IpAddr>, String> {
        let config = &self.inner.config;
        let name = match config.destination.host() {
            Some(Host::Ipv4(address)) => return Ok(vec![address.into()]),
            Some(Host::Ipv6(address)) => return Ok(vec![address.into()]),
            Some(Host::Domain(name)) => name,
            None => return Err("the URL has no host".to_owned()),
        };
        match timeout(config.timeout, self.inner.client.guard.addresses(name)).await {
            Ok(found) => found.map_err(|error| reason(&*error)),
            Err(_) => Err(format!("{name} is not found within {:?}", config.timeout)),
        }
    }

    async fn connection(&self, about: &str) -> Finding {
        let config = &self.inner.config;
        let error = match timeout(config.timeout, self.inner.client.knock()).await {
            Ok(Ok(())) => return Finding::good(about, "it accepts connections"),
            Ok(Err(error)) => reason(&*error),
            Err(_) => format!("no connection within {:?}", config.timeout),
        };
        let fix = "start it, correct the URL, or let this machine through to it; for a certificate of your own name its \
                   authority with `tls_ca=`";
        Finding::broken(about, error, fix)
    }
}

/// A permission that the destination has no need of is a door for whoever owns its DNS entry.
fn needless(config: &Config, addresses: &[IpAddr]) -> Option<Finding> {
    let found = |wanted: Refused| {
        let refused = |address: &IpAddr| Allow::default().check(*address) == Err(wanted);
        addresses.iter().any(refused)
    };
    let name = match config.allow {
        Allow { loopback: true, .. } if !found(Refused::Loopback) => "allow_loopback",
        Allow { private: true, .. } if !found(Refused::Private) => "allow_private",
        _ => return None,
    };
    let text =
        format!("`{name}` is set and not needed: whoever changes the DNS entry reaches our network by it");
    Some(Finding::doubtful("setting", text, format!("remove `{name}=true` from the URL")))
}

/// Messages that anybody on the way can read.
fn open_to_all(config: &Config, addresses: &[IpAddr]) -> Option<Finding> {
    let outside = addresses.iter().any(|address| !address.is_loopback());
    let text = "messages travel unencrypted, and can be read and dropped on the way";
    (config.destination.scheme() == "http" && outside)
        .then(|| Finding::doubtful("setting", text, "use https:// in the URL"))
}

fn unsigned(config: &Config) -> Option<Finding> {
    let text = "requests are not signed: the destination cannot know that they are ours";
    let fix = "give both sides a secret: `secret=whsec_…` in the URL; `echo whsec_$(openssl rand -base64 32)` makes one";
    config.secrets.is_empty().then(|| Finding::doubtful("setting", text, fix))
}

/// Parameters that are sent to the destination and look as if they were meant for us.
fn mistaken(config: &Config) -> Vec<Finding> {
    let names = config.destination.query_pairs().map(|(name, _)| name.into_owned());
    let slips = names.filter_map(|name| {
        let meant = nearest(&name, &PARAMETERS);
        (name != meant && strsim::jaro_winkler(&name, meant) >= ALIKE).then(|| {
            let text = format!("the parameter `{name}` is sent to the destination: it is none of ours");
            Finding::doubtful("setting", text, format!("write `{meant}` if that is what was meant"))
        })
    });
    slips.collect()
}
