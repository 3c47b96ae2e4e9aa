//! HTTP destinations that lie, stall, flood or lead astray: what they cost is limited, nobody else notices, and nothing
//! is ever connected to that is not allowed.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

mod http_server;

use std::collections::VecDeque;
use std::io;
use std::net::IpAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use broker::http::{Broker, Config, Lookup};
use broker::{Examine, Health, Outcome, Plan, Publisher};
use futures::future::join_all;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::aws_lc_rs;
use tokio_rustls::rustls::pki_types::PrivateKeyDer;

use http_server::{Answer, Server, answer, batch, open, status};

/// Answers with one list of addresses after another, and with the last one for ever.
struct Dns {
    answers: Mutex<VecDeque<Vec<IpAddr>>>,
    asked: AtomicUsize,
}

impl Dns {
    fn new(answers: &[&[&str]]) -> Arc<Self> {
        let parsed = |answer: &&[&str]| answer.iter().map(|address| address.parse().unwrap()).collect();
        Arc::new(Self {
            answers: Mutex::new(answers.iter().map(parsed).collect()),
            asked: AtomicUsize::new(0),
        })
    }
}

#[async_trait]
impl Lookup for Dns {
    async fn lookup(&self, _: &str) -> io::Result<Vec<IpAddr>> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        let mut answers = self.answers.lock().unwrap();
        Ok(if answers.len() > 1 { answers.pop_front().unwrap() } else { answers[0].clone() })
    }
}

/// The destination `shop.example`, whose addresses are what `dns` says.
fn named(server: &Server, parameters: &str, dns: &Arc<Dns>) -> Broker {
    let url = format!("http://shop.example:{}/hook?{parameters}", server.address.port());
    Broker::open_with(Config::from_url(&url).unwrap(), Arc::<Dns>::clone(dns)).unwrap()
}

fn refused(outcomes: &[Outcome]) -> bool {
    outcomes.iter().all(|outcome| {
        matches!(outcome, Outcome::Misconfigured { error } if error.contains("is refused"))
            || *outcome == Outcome::Held
    })
}

#[tokio::test]
async fn a_name_that_leads_to_us_is_connected_to_by_nobody() {
    let server = Server::start(|_| status(200)).await;
    let inside = "
        127.0.0.1 127.9.9.9 ::1 10.0.0.1 172.16.0.1 192.168.0.1 169.254.169.254 100.64.0.1 0.0.0.0 ::
        ::ffff:127.0.0.1 64:ff9b::7f00:1 2002:7f00:1:: fd00::1 fe80::1 224.0.0.1 255.255.255.255
        fd00:ec2::254 168.63.129.16 192.0.2.1 2001:db8::1 ::7f00:1
    ";
    let inside: Vec<&str> = inside.split_whitespace().collect();
    for address in inside.iter().copied() {
        let broker = named(&server, "timeout=10s", &Dns::new(&[&[address]]));
        let outcomes = broker.publish(batch(0..10)).await;
        assert!(refused(&outcomes), "{address}: {outcomes:?}");
        let findings = broker.examine(&Plan::default()).await;
        assert!(findings.iter().any(|it| it.health == Health::Broken), "{address}: {findings:?}");
    }
    let broker = named(&server, "timeout=10s", &Dns::new(&[inside.as_slice()]));
    assert!(refused(&broker.publish(batch(0..10)).await), "all of them at once");
    let broker = named(&server, "timeout=10s", &Dns::new(&[&[]]));
    let outcomes = broker.publish(batch(0..1)).await;
    assert!(matches!(outcomes[0], Outcome::Unreachable { .. }), "no address is no offence: {outcomes:?}");
    assert_eq!(server.connections(), 0);
}

/// What resolves to something fine now and to something else a moment later.
#[tokio::test]
async fn a_name_that_changes_its_address_is_judged_each_time() {
    let server = Server::start(|_| answer_and_close()).await;
    let secret = TcpListener::bind(("127.0.0.2", server.address.port())).await.unwrap();
    let dns = Dns::new(&[
        &["127.0.0.1"],
        &["169.254.169.254"],
        &["127.0.0.1", "10.0.0.1"],
        &["10.0.0.1", "fd00::1", "127.0.0.1"],
        &["10.0.0.1"],
    ]);
    let broker = named(&server, "allow_loopback=true&timeout=10s", &dns);
    let mut outcomes = Vec::new();
    for number in 0..5 {
        outcomes.extend(broker.publish(batch(number..number + 1)).await);
        assert_eq!(dns.asked.load(Ordering::SeqCst), number as usize + 1, "one attempt asks once");
    }
    let fine = [true, false, true, true, false];
    for (outcome, fine) in outcomes.iter().zip(fine) {
        assert_eq!(*outcome == Outcome::Confirmed, fine, "{outcomes:?}");
        assert!(fine || refused(std::slice::from_ref(outcome)), "{outcomes:?}");
    }
    assert_eq!(server.connections(), 3, "only what was judged is connected to");
    let knocked = tokio::time::timeout(Duration::from_millis(50), secret.accept()).await;
    assert!(knocked.is_err(), "nobody came to the other address");
}

fn answer_and_close() -> Answer {
    Answer::Last(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n".to_vec())
}

#[tokio::test]
async fn a_redirect_to_loopback_is_not_followed() {
    let inside = Server::start(|_| status(200)).await;
    let location = format!("location: http://{}/admin\r\n", inside.address);
    let server = Server::start(move |_| answer(307, &location, "")).await;
    let outcomes = open(&server.url("")).publish(batch(0..50)).await;
    assert!(outcomes.iter().all(|it| matches!(it, Outcome::Rejected { .. })), "{outcomes:?}");
    assert_eq!(inside.connections(), 0);
}

/// Everything that a hostile server may do, and what becomes of its message.
fn hostile() -> Vec<(&'static str, Answer, &'static str)> {
    let bytes = |text: &str| text.as_bytes().to_vec();
    let often = |text: &str, times: usize| text.repeat(times).into_bytes();
    let (slowly, at_once) = (Duration::from_millis(20), Duration::ZERO);
    let fine = bytes("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n");
    let broken = bytes("HTTP/1.1 500 Oh\r\ntransfer-encoding: chunked\r\n\r\n");
    let chunk = [bytes("8000\r\n"), vec![b'x'; 0x8000], bytes("\r\n")].concat();
    let head = bytes("HTTP/1.1 200 OK\r\n");
    vec![
        ("silence", Answer::Silence, "Unconfirmed"),
        (
            "a status line, letter by letter",
            Answer::Endless(bytes("HTTP/1.1 "), bytes(" "), slowly),
            "Unconfirmed",
        ),
        (
            "headers without end, slowly",
            Answer::Endless(head.clone(), bytes("a: b\r\n"), slowly),
            "Unconfirmed",
        ),
        (
            "headers without end",
            Answer::Endless(head.clone(), often("a: b\r\n", 500), at_once),
            "Unconfirmed",
        ),
        (
            "one header without end",
            Answer::Endless(bytes("HTTP/1.1 200 OK\r\na: "), often("b", 8192), at_once),
            "Unconfirmed",
        ),
        (
            "too many headers",
            Answer::Bytes([head, often("a: b\r\n", 1000), bytes("\r\n")].concat()),
            "Unconfirmed",
        ),
        (
            "100 without end",
            Answer::Endless(Vec::new(), often("HTTP/1.1 100 Continue\r\n\r\n", 100), at_once),
            "Unconfirmed",
        ),
        (
            "103 without end, slowly",
            Answer::Endless(Vec::new(), bytes("HTTP/1.1 103 Hints\r\na: b\r\n\r\n"), slowly),
            "Unconfirmed",
        ),
        ("a body without end", Answer::Endless(fine.clone(), chunk.clone(), at_once), "Confirmed"),
        ("a body without end, slowly", Answer::Endless(fine, bytes("1\r\nx\r\n"), slowly), "Confirmed"),
        ("an error without end", Answer::Endless(broken.clone(), chunk, at_once), "Deferred"),
        ("an error without end, slowly", Answer::Endless(broken, bytes("1\r\nx\r\n"), slowly), "Deferred"),
        (
            "a length that is a lie",
            Answer::Last(bytes("HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\nx")),
            "Confirmed",
        ),
        (
            "two lengths",
            Answer::Last(bytes("HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nxx")),
            "Unconfirmed",
        ),
        ("no HTTP at all", Answer::Last(bytes("220 mail.example ESMTP\r\n")), "Unconfirmed"),
        ("HTTP/0.9", Answer::Last(bytes("<html>hello</html>")), "Unconfirmed"),
        ("a closed door", Answer::Last(Vec::new()), "Unconfirmed"),
        ("half a status line", Answer::Last(bytes("HTTP/1.1 20")), "Unconfirmed"),
        ("zeros", Answer::Endless(Vec::new(), vec![0; 8192], at_once), "Unconfirmed"),
        (
            "a second answer",
            Answer::Bytes(bytes("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\nHTTP/1.1 500 X\r\n\r\n")),
            "Confirmed",
        ),
    ]
}

/// Many hostile servers at once, and one good one in their midst.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn hostile_destinations_cost_a_limited_time_and_no_room_and_others_do_not_notice() {
    const MESSAGES: i64 = 25;
    let limit = Duration::from_secs(4);
    let kinds = hostile();
    let mut servers = Vec::new();
    for (_, answer, _) in &kinds {
        let answer = answer.clone();
        servers.push(Server::start(move |_| answer.clone()).await);
    }
    let good = Server::start(|_| status(200)).await;
    let friendly = open(&good.url("timeout=60s"));
    assert_eq!(friendly.publish(batch(0..1)).await, [Outcome::Confirmed]);
    let before = memory();

    let begun = Instant::now();
    let attacks = join_all(servers.iter().map(|server| {
        let broker = open(&server.url("timeout=4s&concurrency=25"));
        async move { broker.publish(batch(0..MESSAGES)).await }
    }));
    let attacks = tokio::spawn(attacks);
    let mut slowest = Duration::ZERO;
    while !attacks.is_finished() {
        let begun = Instant::now();
        assert_eq!(friendly.publish(batch(0..1)).await, [Outcome::Confirmed]);
        slowest = slowest.max(begun.elapsed());
    }
    let outcomes = attacks.await.unwrap();
    let took = begun.elapsed();
    let grown = memory().saturating_sub(before);

    for ((name, _, expected), outcomes) in kinds.iter().zip(&outcomes) {
        for outcome in outcomes {
            let found = match outcome {
                Outcome::Confirmed => "Confirmed",
                Outcome::Deferred { after: None, .. } => "Deferred",
                Outcome::Unconfirmed { .. } => "Unconfirmed",
                other => panic!("{name}: {other:?}"),
            };
            assert_eq!(found, *expected, "{name}: {outcome:?}");
            assert!(
                format!("{outcome:?}").len() < 600,
                "{name}: what people are shown is short: {outcome:?}"
            );
        }
    }
    // Each has its time, and the machine may be busy.
    assert!(took < 5 * limit, "{took:?}");
    assert!(slowest < limit, "the good one answered within {slowest:?}");
    assert!(grown < 256 << 20, "{} MiB more", grown >> 20);
}

/// Bytes that this process has in memory.
fn memory() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() << 10
}

#[tokio::test]
async fn one_of_a_hundred_destinations_hangs_and_the_others_do_not() {
    let hanging = Server::start(|_| Answer::Silence).await;
    let stuck = open(&hanging.url("timeout=60s"));
    let stuck = tokio::spawn(async move { stuck.publish(batch(0..100)).await });
    let mut servers = Vec::new();
    for _ in 0..99 {
        servers.push(Server::start(|_| status(200)).await);
    }
    let brokers: Vec<Broker> = servers.iter().map(|server| open(&server.url("timeout=60s"))).collect();
    for _ in 0..3 {
        let outcomes = join_all(brokers.iter().map(|broker| broker.publish(batch(0..20)))).await;
        assert!(outcomes.iter().flatten().all(|outcome| *outcome == Outcome::Confirmed));
    }
    assert!(!stuck.is_finished(), "all others were done before its time was over");
    assert!(testkit::eventually(Duration::from_secs(10), async || hanging.asked().len() == 16).await);
    stuck.abort();
}

/// An authority, and a server with a certificate of it for `shop.example`.
async fn secured() -> (tempfile::TempDir, String, Server) {
    let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new(vec!["shop.example".to_owned()]).unwrap();
    let certificate = params.signed_by(&key, &authority).unwrap();
    let private = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
    let config = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate.der().clone()], private)
        .unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("ca.pem");
    std::fs::write(&file, authority.pem()).unwrap();
    (folder, file.display().to_string(), Server::tls(TlsAcceptor::from(Arc::new(config))).await)
}

#[tokio::test]
async fn a_certificate_must_be_of_the_name_and_of_an_authority_that_is_known() {
    let (folder, ca, server) = secured().await;
    let dns = Dns::new(&[&["127.0.0.1"]]);
    let port = server.address.port();
    let send = async |host: &str, parameters: &str| {
        let url = format!("https://{host}:{port}/?allow_loopback=true&timeout=20s&{parameters}");
        let broker = Broker::open_with(Config::from_url(&url).unwrap(), Arc::<Dns>::clone(&dns)).unwrap();
        (broker.publish(batch(0..1)).await.remove(0), broker.examine(&Plan::default()).await)
    };
    let (outcome, findings) = send("shop.example", &format!("tls_ca={ca}")).await;
    assert_eq!(outcome, Outcome::Confirmed);
    assert_eq!(findings[0].health, Health::Good, "{findings:?}");
    let (outcome, findings) = send("other.example", &format!("tls_ca={ca}")).await;
    assert!(
        matches!(&outcome, Outcome::Unreachable { error } if error.contains("certificate")),
        "{outcome:?}"
    );
    assert_eq!(findings[0].health, Health::Broken, "{findings:?}");
    let (_other_folder, other_ca, _other) = secured().await;
    let (outcome, _) = send("shop.example", &format!("tls_ca={other_ca}")).await;
    assert!(
        matches!(&outcome, Outcome::Unreachable { error } if error.contains("certificate")),
        "{outcome:?}"
    );
    assert_eq!(server.asked().len(), 1, "nothing was sent to one that was not believed");

    let missing = folder.path().join("none.pem");
    let url = format!("https://shop.example/?tls_ca={}", missing.display());
    let error = Broker::open(Config::from_url(&url).unwrap()).expect_err("it is not there").to_string();
    assert!(error.contains("none.pem"), "{error}");
}
