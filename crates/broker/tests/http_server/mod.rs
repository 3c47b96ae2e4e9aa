//! An HTTP server that writes down what it is asked and answers whatever a test wants, byte by byte if need be. No
//! framework would send what a hostile server sends.

#![allow(dead_code, reason = "no test uses all of it")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may panic")]

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use broker::Outgoing;
use bytes::Bytes;
use hyper::HeaderMap;
use hyper::header::{HeaderName, HeaderValue};
use message::Message;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::Notify;
use tokio::task::{JoinHandle, JoinSet};
use tokio_rustls::TlsAcceptor;

/// What was asked.
#[derive(Clone, Debug)]
pub(crate) struct Asked {
    pub(crate) target: String,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    pub(crate) at: Instant,
}

impl Asked {
    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }

    pub(crate) fn number(&self) -> i64 {
        std::str::from_utf8(&self.body).unwrap().parse().unwrap()
    }
}

/// What is answered.
#[derive(Clone)]
pub(crate) enum Answer {
    /// These bytes; then the next request on the same connection.
    Bytes(Vec<u8>),
    /// The same when somebody gives the word.
    When(Arc<Notify>, Vec<u8>),
    /// These bytes; then the connection is closed.
    Last(Vec<u8>),
    /// Nothing, ever.
    Silence,
    /// A beginning, and then the same bytes again and again with a pause between them.
    Endless(Vec<u8>, Vec<u8>, Duration),
}

/// An answer without a body.
pub(crate) fn status(code: u16) -> Answer {
    answer(code, "", "")
}

/// An answer with headers (each ended by a line break) and a body.
pub(crate) fn answer(code: u16, headers: &str, body: &str) -> Answer {
    let length = body.len();
    Answer::Bytes(
        format!("HTTP/1.1 {code} Whatever\r\n{headers}content-length: {length}\r\n\r\n{body}").into_bytes(),
    )
}

type Script = dyn Fn(&Asked) -> Answer + Send + Sync;

/// The books of a server.
#[derive(Default)]
struct Books {
    asked: Mutex<Vec<Asked>>,
    connections: AtomicUsize,
    busy: AtomicUsize,
    busiest: AtomicUsize,
}

/// A server on loopback; gone, with all its connections, when dropped.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    books: Arc<Books>,
    accepting: JoinHandle<()>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

impl Server {
    pub(crate) async fn start(script: impl Fn(&Asked) -> Answer + Send + Sync + 'static) -> Self {
        Self::at(TcpListener::bind("127.0.0.1:0").await.unwrap(), None, script)
    }

    pub(crate) async fn tls(acceptor: TlsAcceptor) -> Self {
        Self::at(TcpListener::bind("127.0.0.1:0").await.unwrap(), Some(acceptor), |_| status(200))
    }

    pub(crate) fn at(
        listener: TcpListener,
        tls: Option<TlsAcceptor>,
        script: impl Fn(&Asked) -> Answer + Send + Sync + 'static,
    ) -> Self {
        let address = listener.local_addr().unwrap();
        let books = Arc::<Books>::default();
        let (kept, script): (_, Arc<Script>) = (Arc::clone(&books), Arc::new(script));
        let accepting = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                kept.connections.fetch_add(1, Ordering::SeqCst);
                let (books, script, tls) = (Arc::clone(&kept), Arc::clone(&script), tls.clone());
                connections.spawn(async move {
                    // A client that hangs up is no concern of the server's.
                    let _ = match tls {
                        None => serve(stream, &books, &*script).await,
                        Some(tls) => match tls.accept(stream).await {
                            Ok(stream) => serve(stream, &books, &*script).await,
                            Err(error) => Err(error),
                        },
                    };
                });
                while connections.try_join_next().is_some() {}
            }
        });
        Self { address, books, accepting }
    }

    /// Its URL, with loopback allowed.
    pub(crate) fn url(&self, parameters: &str) -> String {
        format!("http://{}/hook?allow_loopback=true&{parameters}", self.address)
    }

    pub(crate) fn asked(&self) -> Vec<Asked> {
        self.books.asked.lock().unwrap().clone()
    }

    pub(crate) fn connections(&self) -> usize {
        self.books.connections.load(Ordering::SeqCst)
    }

    /// The most requests that were under way at once.
    pub(crate) fn busiest(&self) -> usize {
        self.books.busiest.load(Ordering::SeqCst)
    }

    /// How often each id was seen.
    pub(crate) fn ids(&self) -> HashMap<String, usize> {
        let mut ids = HashMap::new();
        for asked in self.asked() {
            *ids.entry(asked.header("webhook-id").to_owned()).or_default() += 1;
        }
        ids
    }
}

async fn serve<S: AsyncRead + AsyncWrite + Unpin>(
    mut stream: S,
    books: &Books,
    script: &Script,
) -> std::io::Result<()> {
    let mut buffer = Vec::new();
    while let Some(asked) = read(&mut stream, &mut buffer).await? {
        books.asked.lock().unwrap().push(asked.clone());
        let busy = books.busy.fetch_add(1, Ordering::SeqCst) + 1;
        books.busiest.fetch_max(busy, Ordering::SeqCst);
        let answer = script(&asked);
        let bytes = match &answer {
            Answer::When(word, bytes) => {
                word.notified().await;
                bytes
            }
            Answer::Silence => {
                // Until the client has had enough of it.
                let _ = stream.read(&mut [0]).await?;
                return Ok(());
            }
            Answer::Bytes(bytes) | Answer::Last(bytes) | Answer::Endless(bytes, ..) => bytes,
        };
        books.busy.fetch_sub(1, Ordering::SeqCst);
        stream.write_all(bytes).await?;
        stream.flush().await?;
        match answer {
            Answer::Endless(_, again, pause) => loop {
                stream.write_all(&again).await?;
                stream.flush().await?;
                tokio::time::sleep(pause).await;
            },
            Answer::Last(_) => return stream.shutdown().await,
            _ => {}
        }
    }
    Ok(())
}

/// The next request, or nothing when the client has gone.
async fn read<S: AsyncRead + Unpin>(stream: &mut S, buffer: &mut Vec<u8>) -> std::io::Result<Option<Asked>> {
    let end = loop {
        if let Some(end) = buffer.windows(4).position(|four| four == b"\r\n\r\n") {
            break end;
        }
        if stream.read_buf(buffer).await? == 0 {
            return Ok(None);
        }
    };
    let head = String::from_utf8(buffer.drain(..end + 4).collect()).unwrap();
    let mut lines = head.split("\r\n");
    let first = lines.next().unwrap().to_owned();
    let mut headers = HeaderMap::new();
    for (name, value) in lines.filter_map(|line| line.split_once(": ")) {
        headers.append(HeaderName::try_from(name).unwrap(), HeaderValue::try_from(value).unwrap());
    }
    let length = headers.get("content-length").map_or(0, |length| length.to_str().unwrap().parse().unwrap());
    while buffer.len() < length {
        if stream.read_buf(buffer).await? == 0 {
            return Ok(None);
        }
    }
    let body = Bytes::from_iter(buffer.drain(..length));
    let target = first.strip_prefix("POST ").unwrap().strip_suffix(" HTTP/1.1").unwrap().to_owned();
    Ok(Some(Asked { target, headers, body, at: Instant::now() }))
}

/// A destination with these settings.
pub(crate) fn open(url: &str) -> broker::http::Broker {
    broker::http::Broker::open(broker::http::Config::from_url(url).unwrap()).unwrap()
}

pub(crate) fn outgoing(number: i64) -> Outgoing {
    Outgoing::new(Message::new("orders", format!("{number}")).key(format!("key-{number}")), number)
}

pub(crate) fn batch(numbers: std::ops::Range<i64>) -> Vec<Outgoing> {
    numbers.map(outgoing).collect()
}
