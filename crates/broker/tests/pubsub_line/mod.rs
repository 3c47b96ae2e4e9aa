//! The way to a Pub/Sub emulator, which can be cut and blocked.
//!
//! Emulators keep everything in memory: one that is stopped and started again is another broker. What a client sees of a
//! restart of the service is that its connections end, and that none can be made for a while; so that is what happens.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// What becomes of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Open,
    /// Connections are accepted, and nothing is carried.
    Blocked,
    /// Connections end.
    Cut,
}

/// A way to a server. Everything that uses it ends with it.
#[derive(Debug)]
pub(crate) struct Line {
    here: SocketAddr,
    way: watch::Sender<Way>,
}

/// Opens the way again when dropped.
#[derive(Debug)]
pub(crate) struct Closed(watch::Sender<Way>);

impl Drop for Closed {
    fn drop(&mut self) {
        self.0.send_replace(Way::Open);
    }
}

impl Line {
    /// A way to the server at `there`.
    pub(crate) async fn to(there: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let here = listener.local_addr().expect("it listens");
        let way = watch::Sender::new(Way::Open);
        let sender = way.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let watched = sender.subscribe();
                if *watched.borrow() == Way::Cut {
                    continue;
                }
                let Ok(server) = TcpStream::connect(&there).await else { continue };
                let ((client_in, client_out), (server_in, server_out)) =
                    (client.into_split(), server.into_split());
                tokio::spawn(carry(client_in, server_out, watched.clone()));
                tokio::spawn(carry(server_in, client_out, watched));
            }
        });
        Self { here, way }
    }

    /// Host and port of its near end.
    pub(crate) fn place(&self) -> String {
        self.here.to_string()
    }

    /// Carries nothing until the guard is dropped.
    pub(crate) fn block(&self) -> Closed {
        self.way.send_replace(Way::Blocked);
        Closed(self.way.clone())
    }

    /// Ends all connections, and every new one, until the guard is dropped.
    pub(crate) fn cut(&self) -> Closed {
        self.way.send_replace(Way::Cut);
        Closed(self.way.clone())
    }
}

async fn carry(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, mut way: watch::Receiver<Way>) {
    let mut bytes = vec![0; 64 << 10];
    loop {
        let read = tokio::select! {
            cut = way.wait_for(|way| *way == Way::Cut) => {
                drop(cut);
                return;
            }
            read = from.read(&mut bytes) => read,
        };
        let Ok(count @ 1..) = read else { return };
        match way.wait_for(|way| *way != Way::Blocked).await.map(|way| *way) {
            Ok(Way::Open) => {}
            Ok(Way::Blocked | Way::Cut) | Err(_) => return,
        }
        if to.write_all(&bytes[..count]).await.is_err() {
            return;
        }
    }
}
