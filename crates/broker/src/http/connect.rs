//! Connections to a destination: found, judged and pinned in one step, and kept for the next request.

use std::future::{Future, poll_fn};
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use std::{fs, io};

use async_trait::async_trait;
use hyper::body::Incoming;
use hyper::{Request, Response, Uri};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::connect::dns::Name;
use hyper_util::client::legacy::{Client as Pool, Error};
use hyper_util::rt::{TokioExecutor, TokioTimer};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};
use tower_service::Service;

use super::Config;
use super::error::Forbidden;
use super::guard::Allow;
use super::write::Payload;
use crate::Unopened;

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Headers of an answer, and bytes that are kept of it before it is understood.
const HEADERS: usize = 64;
const BUFFER: usize = 64 << 10;

/// How long an unused connection is kept. Shorter than what common servers do, so that they are not the ones who
/// close it just when a request is on its way.
const IDLE: Duration = Duration::from_secs(4);

/// Finds the addresses of a name. What it finds is judged before anything is connected to.
#[async_trait]
pub trait Lookup: Send + Sync {
    /// All addresses of `host`, the best first.
    async fn lookup(&self, host: &str) -> io::Result<Vec<IpAddr>>;
}

/// What the system knows: its hosts file, its DNS servers.
#[derive(Clone, Copy, Debug)]
pub struct SystemDns;

#[async_trait]
impl Lookup for SystemDns {
    async fn lookup(&self, host: &str) -> io::Result<Vec<IpAddr>> {
        let found = tokio::net::lookup_host((host, 0)).await?;
        Ok(found.map(|address| address.ip()).collect())
    }
}

/// Looks names up and lets only addresses through that are allowed.
#[derive(Clone)]
pub(super) struct Guard {
    allow: Allow,
    lookup: Arc<dyn Lookup>,
}

impl Guard {
    /// The addresses of `host` that may be connected to. One that is refused does not spoil the others: networks that
    /// translate IPv4 add such addresses to every name.
    pub(super) async fn addresses(&self, host: &str) -> Result<Vec<IpAddr>, BoxError> {
        let found = self.lookup.lookup(host).await?;
        let (fine, refused): (Vec<IpAddr>, Vec<IpAddr>) =
            found.iter().partition(|address| self.allow.check(**address).is_ok());
        if !fine.is_empty() {
            return Ok(fine);
        }
        let refused =
            refused.into_iter().find_map(|address| Some((address, self.allow.check(address).err()?)));
        Err(match refused {
            Some((address, refused)) => Box::new(Forbidden { host: host.to_owned(), address, refused }),
            None => format!("{host} has no address").into(),
        })
    }
}

impl Service<Name> for Guard {
    type Response = std::vec::IntoIter<SocketAddr>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, BoxError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, name: Name) -> Self::Future {
        let guard = self.clone();
        Box::pin(async move {
            let addresses = guard.addresses(name.as_str()).await?;
            // The connector puts the port of the URL in.
            let sockets: Vec<_> = addresses.into_iter().map(|address| SocketAddr::new(address, 0)).collect();
            Ok(sockets.into_iter())
        })
    }
}

/// Sends requests to one destination.
pub(super) struct Client {
    pub(super) destination: Uri,
    pub(super) guard: Guard,
    connector: HttpsConnector<HttpConnector<Guard>>,
    pool: Pool<HttpsConnector<HttpConnector<Guard>>, Payload>,
}

impl Client {
    pub(super) fn new(config: &Config, lookup: Arc<dyn Lookup>) -> Result<Self, Unopened> {
        let guard = Guard { allow: config.allow, lookup };
        let mut tcp = HttpConnector::new_with_resolver(guard.clone());
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        // Shared among the addresses of a name: the first may be dead and the second alive.
        tcp.set_connect_timeout(Some(config.timeout / 2));
        let connector = HttpsConnectorBuilder::new()
            .with_tls_config(tls(config)?)
            .https_or_http()
            .enable_http1()
            .wrap_connector(tcp);
        let pool = Pool::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE)
            .pool_max_idle_per_host(config.concurrency)
            .http1_max_headers(HEADERS)
            .http1_max_buf_size(BUFFER)
            .build(connector.clone());
        let destination = config.destination.as_str().parse();
        let destination = destination.map_err(|error| Unopened::Broken(format!("the URL: {error}")))?;
        Ok(Self { destination, guard, connector, pool })
    }

    pub(super) async fn send(&self, request: Request<Payload>) -> Result<Response<Incoming>, Error> {
        self.pool.request(request).await
    }

    /// Connects, and greets by TLS where that is spoken, and hangs up.
    pub(super) async fn knock(&self) -> Result<(), BoxError> {
        let mut connector = self.connector.clone();
        poll_fn(|context| connector.poll_ready(context)).await?;
        connector.call(self.destination.clone()).await.map(drop)
    }
}

/// Whose certificates are believed.
fn tls(config: &Config) -> Result<ClientConfig, Unopened> {
    let mut roots = RootCertStore::empty();
    if config.destination.scheme() == "https" {
        let certificates = match &config.tls_ca {
            Some(file) => authorities(file)?,
            None => rustls_native_certs::load_native_certs().certs,
        };
        roots.add_parsable_certificates(certificates);
        if roots.is_empty() {
            let text = "no certificate authority is known: install the package `ca-certificates`, or name a file of \
                        them with `tls_ca=` in the URL";
            return Err(Unopened::Broken(text.to_owned()));
        }
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let versions = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let config = versions.map_err(|error| Unopened::Broken(error.to_string()))?;
    Ok(config.with_root_certificates(roots).with_no_client_auth())
}

fn authorities(file: &Path) -> Result<Vec<CertificateDer<'static>>, Unopened> {
    let broken = |error: String| Unopened::Broken(format!("tls_ca {}: {error}", file.display()));
    let text = fs::read(file).map_err(|error| broken(error.to_string()))?;
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    certificates.map_err(|error| broken(error.to_string()))
}
