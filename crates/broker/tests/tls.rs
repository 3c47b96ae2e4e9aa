//! Brokers that listen with TLS and ask for a password: messages pass, and a stranger's certificate or a wrong password is
//! refused with a reason that does not tell the password.

use std::net::TcpListener;
use std::path::{Path, PathBuf};

use broker::{Connected, Health, Outcome, Outgoing, Plan, Surroundings};
use message::Message;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use tempfile::TempDir;
use testkit::broker::cases::drain;
use testkit::servers::Own;

/// The password of everybody here.
const PASSWORD: &str = "of-the-tests";

/// A server whose certificate is signed by an authority of its own.
struct Secure {
    server: Own,
    /// Where it listens with TLS.
    port: u16,
    folder: TempDir,
}

/// The files of a server.
struct Files {
    certificate: PathBuf,
    key: PathBuf,
    /// Both in one.
    both: PathBuf,
    ca: PathBuf,
}

impl Secure {
    /// Starts a server; `settings` makes it listen with TLS at a port.
    async fn start(name: &'static str, settings: fn(&Files, u16) -> String) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let ca = folder.path().join("ca.pem");
        let start = move || {
            let mut port = 0;
            let server = Own::start_with(name, |home| {
                port = free_port();
                settings(&certify(home, &ca), port)
            });
            (server, port)
        };
        let (server, port) = tokio::task::spawn_blocking(start).await.expect("it starts");
        Self { server, port, folder }
    }

    /// A URL with the authority of this server, and another with the authority of somebody else.
    fn urls(&self, before: &str, parameters: &str) -> [String; 2] {
        let stranger = self.folder.path().join("stranger.pem");
        authority(&stranger);
        [self.folder.path().join("ca.pem"), stranger].map(|ca| {
            let joint = if parameters.is_empty() { "" } else { "&" };
            format!("{before}127.0.0.1:{}?ca={}{joint}{parameters}", self.port, ca.display())
        })
    }
}

/// Below those that the kernel gives to clients.
fn free_port() -> u16 {
    let free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
    (0..100).map(|_| 10_000 + rand::random::<u16>() % 9_000).find(free).expect("a free port")
}

/// An authority, whose certificate is written to `file`.
fn authority(file: &Path) -> CertifiedIssuer<'static, KeyPair> {
    let mut authority = CertificateParams::default();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    // A certificate whose issuer has its own name would pass for one that vouches for itself.
    authority.distinguished_name.push(DnType::CommonName, "authority of the tests");
    let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate().expect("a key"));
    let authority = authority.expect("an authority");
    std::fs::write(file, authority.pem()).expect("a file can be written");
    authority
}

/// Puts a certificate for 127.0.0.1 into the folder of a server.
fn certify(folder: &Path, ca: &Path) -> Files {
    let authority = authority(ca);
    let key = KeyPair::generate().expect("a key");
    let server = CertificateParams::new(["127.0.0.1".to_owned()]).expect("a name");
    let certificate = server.signed_by(&key, &authority).expect("a certificate").pem();
    let write = |name: &str, text: &str| {
        let file = folder.join(name);
        std::fs::write(&file, text).expect("a file can be written");
        file
    };
    Files {
        certificate: write("server.pem", &certificate),
        key: write("server.key", &key.serialize_pem()),
        both: write("both.pem", &format!("{}{certificate}", key.serialize_pem())),
        ca: write("ca.pem", &authority.pem()),
    }
}

fn open(url: &str) -> Connected {
    let nowhere = Surroundings { file: "none.db".into(), max_payload: 1 << 20 };
    broker::open(url, &nowhere).expect("the URL is right")
}

fn outgoing(number: i64) -> Outgoing {
    Outgoing::new(Message::new("orders", number.to_string()).key("k"), number)
}

/// Ten messages pass and come back.
async fn messages_pass(url: &str) {
    let broker = open(url);
    let outcomes = broker.publisher.publish((0..10).map(outgoing).collect()).await;
    assert!(outcomes.iter().all(|outcome| *outcome == Outcome::Confirmed), "{outcomes:?}");
    let subscriber = broker.subscriber.expect("it can be listened to");
    let mut subscription = subscriber.subscribe("billing", &["orders".to_owned()]).await.expect("joined");
    let came = drain(&mut subscription, 10).await;
    assert_eq!(came.len(), 10);
    subscription.close().await;
}

/// Nothing passes, nothing is called the message's own fault, and nobody reads the password.
async fn nothing_passes(url: &str) {
    let broker = open(url);
    let outcomes = broker.publisher.publish(vec![outgoing(1)]).await;
    let refused = matches!(
        &outcomes[..],
        [Outcome::Unreachable { .. } | Outcome::Unconfirmed { .. } | Outcome::Misconfigured { .. }]
    );
    assert!(refused, "{outcomes:?}");
    assert!(!format!("{outcomes:?}").contains(PASSWORD), "{outcomes:?}");
    let found = broker.doctor.examine(&Plan::default()).await;
    assert!(found.iter().any(|finding| finding.health == Health::Broken), "{found:?}");
    assert!(!format!("{found:?}").contains(PASSWORD), "{found:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn kafka_asks_for_a_password_over_tls() {
    let kafka = Secure::start("kafka", |files, port| {
        format!(
            "listeners={{listeners}},SECURE://127.0.0.1:{port}\n\
             advertised.listeners={{advertised}},SECURE://127.0.0.1:{port}\n\
             listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SECURE:SASL_SSL\n\
             ssl.keystore.type=PEM\nssl.keystore.location={}\n\
             listener.name.secure.sasl.enabled.mechanisms=PLAIN,SCRAM-SHA-512\n\
             listener.name.secure.plain.sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule \
             required user_ann=\"{PASSWORD}\";\n\
             listener.name.secure.scram-sha-512.sasl.jaas.config=\
             org.apache.kafka.common.security.scram.ScramLoginModule required;\n",
            files.both.display()
        )
    })
    .await;
    let plain = kafka.urls(&format!("kafkas://ann:{PASSWORD}@"), "prefix=a.&timeout=10s");
    messages_pass(&plain[0]).await;
    nothing_passes(&plain[1]).await;
    let scram = "prefix=b.&timeout=10s&sasl=SCRAM-SHA-512";
    messages_pass(&kafka.urls(&format!("kafkas://postrider:{PASSWORD}@"), scram)[0]).await;
    nothing_passes(&kafka.urls(&format!("kafkas://postrider:not-{PASSWORD}@"), scram)[0]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rabbitmq_is_reached_over_tls() {
    let rabbitmq = Secure::start("rabbitmq", |files, port| {
        format!(
            "listeners.ssl.1 = 127.0.0.1:{port}\nssl_options.cacertfile = {}\nssl_options.certfile = {}\n\
             ssl_options.keyfile = {}\nssl_options.verify = verify_none\n",
            files.ca.display(),
            files.certificate.display(),
            files.key.display()
        )
    })
    .await;
    let [ours, strangers] = rabbitmq.urls("amqps://guest:guest@", "timeout=10s&groups=billing");
    messages_pass(&ours).await;
    nothing_passes(&strangers).await;
    nothing_passes(&rabbitmq.urls(&format!("amqps://guest:{PASSWORD}@"), "timeout=10s&groups=billing")[0])
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nats_asks_for_a_password_over_tls() {
    let mut nats = Secure::start("nats", |files, _| {
        let (certificate, key) = (files.certificate.display(), files.key.display());
        format!("--tls\n--tlscert\n{certificate}\n--tlskey\n{key}\n--user\nann\n--pass\n{PASSWORD}\n")
    })
    .await;
    // With TLS it speaks nothing else, at its one port.
    let port = nats.server.url().rsplit(':').next().and_then(|port| port.parse().ok());
    nats.port = port.expect("its URL ends with a port");
    let [ours, strangers] = nats.urls(&format!("natss://ann:{PASSWORD}@"), "timeout=10s");
    messages_pass(&ours).await;
    nothing_passes(&strangers).await;
    nothing_passes(&nats.urls(&format!("natss://ann:not-{PASSWORD}@"), "timeout=10s")[0]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn redis_streams_ask_for_a_password_over_tls() {
    let redis = Secure::start("redis", |files, port| {
        format!(
            "--tls-port\n{port}\n--tls-cert-file\n{}\n--tls-key-file\n{}\n--tls-ca-cert-file\n{}\n\
             --tls-auth-clients\nno\n--user\nann\non\n>{PASSWORD}\n~*\n&*\n+@all\n",
            files.certificate.display(),
            files.key.display(),
            files.ca.display()
        )
    })
    .await;
    let [ours, strangers] = redis.urls(&format!("rediss://ann:{PASSWORD}@"), "timeout=10s");
    messages_pass(&ours).await;
    nothing_passes(&strangers).await;
    nothing_passes(&redis.urls(&format!("rediss://ann:not-{PASSWORD}@"), "timeout=10s")[0]).await;
}
