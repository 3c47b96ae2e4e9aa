//! A line between clients and a server that can be cut, or made deaf in one direction: where answers get lost, a client
//! that tries again by itself sends twice.

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// How the line is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct State {
    /// What the server says is thrown away.
    deaf: bool,
    /// What the client says is thrown away.
    mute: bool,
    /// Connections of an earlier number are cut.
    cuts: u64,
}

/// The line. Gone when dropped.
#[derive(Debug)]
pub struct Line {
    state: Arc<watch::Sender<State>>,
    address: SocketAddr,
}

impl Line {
    /// A line to the server at this host and port, which may come later.
    ///
    /// # Panics
    /// When no port is free.
    pub async fn to(place: impl Into<String>) -> Self {
        let server = place.into();
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let address = listener.local_addr().expect("it listens");
        let state = Arc::new(watch::Sender::new(State { deaf: false, mute: false, cuts: 0 }));
        let watched = Arc::downgrade(&state);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let Some(state) = watched.upgrade() else { return };
                let Ok(server) = TcpStream::connect(&server).await else { continue };
                tokio::spawn(carry(client, server, state.subscribe()));
            }
        });
        Self { state, address }
    }

    /// Host and port that clients connect to.
    pub fn place(&self) -> String {
        self.address.to_string()
    }

    /// From now on what the server says is lost.
    pub fn deafen(&self) {
        self.state.send_modify(|state| state.deaf = true);
    }

    /// From now on what the client says is lost.
    pub fn silence(&self) {
        self.state.send_modify(|state| state.mute = true);
    }

    /// Cuts every connection; new ones are carried faithfully.
    pub fn cut(&self) {
        self.state.send_modify(|state| *state = State { deaf: false, mute: false, cuts: state.cuts + 1 });
    }
}

async fn cut(state: &mut watch::Receiver<State>, number: u64) {
    let _ = state.wait_for(|state| state.cuts > number).await;
}

async fn carry(client: TcpStream, server: TcpStream, mut state: watch::Receiver<State>) {
    let (number, faults) = (state.borrow().cuts, state.clone());
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let (mut up, mut down) = (vec![0; 64 << 10], vec![0; 64 << 10]);
    loop {
        tokio::select! {
            () = cut(&mut state, number) => return,
            read = from_client.read(&mut up) => {
                let Ok(count @ 1..) = read else { return };
                let mute = faults.borrow().mute;
                if !mute && to_server.write_all(&up[..count]).await.is_err() {
                    return;
                }
            }
            read = from_server.read(&mut down) => {
                let Ok(count @ 1..) = read else { return };
                let deaf = faults.borrow().deaf;
                if !deaf && to_client.write_all(&down[..count]).await.is_err() {
                    return;
                }
            }
        }
    }
}
