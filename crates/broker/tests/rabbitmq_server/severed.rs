//! A line to a server that can be cut on the server's side alone: it takes the clients for dead, and they do not hear of
//! it.

use std::net::SocketAddr;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// Listens for clients and passes them on.
pub(crate) struct Severed {
    address: SocketAddr,
    cut: watch::Sender<u32>,
}

impl Severed {
    /// One before the server at `place`.
    pub(crate) async fn before(place: String) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a port is free");
        let address = listener.local_addr().expect("it listens");
        let (cut, cuts) = watch::channel(0);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(pass(client, place.clone(), cuts.clone()));
            }
        });
        Self { address, cut }
    }

    /// Where clients connect.
    pub(crate) fn address(&self) -> String {
        self.address.to_string()
    }

    /// Ends the server's side of all lines.
    pub(crate) fn sever(&self) {
        self.cut.send_modify(|cuts| *cuts += 1);
    }
}

async fn pass(mut client: TcpStream, place: String, mut cuts: watch::Receiver<u32>) {
    cuts.borrow_and_update();
    let mut server = TcpStream::connect(place).await.expect("the server is there");
    tokio::select! {
        _ = tokio::io::copy_bidirectional(&mut client, &mut server) => return,
        _ = cuts.changed() => drop(server),
    }
    // The client's side stays open, and nothing comes any more.
    let mut unheard = tokio::io::sink();
    drop(tokio::io::copy(&mut client, &mut unheard).await);
}
