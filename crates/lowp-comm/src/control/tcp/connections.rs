//! [`Connections`]: all connections of a thread that serves ranks, on rank 0 and on the relay of a node.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Token, Waker};

use super::conn::{Conn, Peer};
use super::frame::GREETING;

/// How long somebody who connects may take to say who it is, and who was sent away to go.
const HELLO: Duration = Duration::from_secs(5);

/// Bytes that are read at once.
const READ: usize = 1 << 16;

const LISTENER: Token = Token(0);
const WAKER: Token = Token(1);

/// The listener, and who came to it.
#[derive(Debug)]
pub(super) struct Connections {
    poll: Poll,
    listener: TcpListener,
    conns: BTreeMap<Token, Conn>,
    /// The number of the next connection.
    next: usize,
    /// Whether the listener had more than the system had room for.
    full: bool,
    /// Connections that may have more to read.
    unread: BTreeSet<Token>,
    scratch: Vec<u8>,
}

impl Connections {
    /// Those that come to `listener`, and what ends a wait for them.
    pub(super) fn new(mut listener: TcpListener) -> io::Result<(Self, Waker)> {
        let poll = Poll::new()?;
        let waker = Waker::new(poll.registry(), WAKER)?;
        poll.registry()
            .register(&mut listener, LISTENER, Interest::READABLE)?;
        let connections = Self {
            poll,
            listener,
            conns: BTreeMap::new(),
            next: WAKER.0 + 1,
            full: false,
            unread: BTreeSet::new(),
            scratch: vec![0; READ],
        };
        Ok((connections, waker))
    }

    /// Waits at most so long for something to read, and reads it: from which connections.
    pub(super) fn wait(
        &mut self,
        events: &mut Events,
        patience: Duration,
    ) -> io::Result<Vec<Token>> {
        let unread = std::mem::take(&mut self.unread);
        let patience = if unread.is_empty() {
            patience
        } else {
            Duration::ZERO
        };
        match self.poll.poll(events, Some(patience)) {
            Err(error) if error.kind() == ErrorKind::Interrupted => events.clear(),
            polled => polled?,
        }
        let mut read = Vec::new();
        for event in &*events {
            match event.token() {
                LISTENER => self.accept(),
                WAKER => {}
                token => {
                    if event.is_writable()
                        && let Some(conn) = self.conns.get_mut(&token)
                    {
                        conn.flush();
                    }
                    let closed = event.is_read_closed() || event.is_error();
                    if event.is_readable() || closed {
                        self.receive(token, closed, &mut read);
                    }
                }
            }
        }
        for token in unread {
            self.receive(token, true, &mut read);
        }
        Ok(read)
    }

    fn receive(&mut self, token: Token, closed: bool, read: &mut Vec<Token>) {
        if let Some(conn) = self.conns.get_mut(&token) {
            if conn.receive(&mut self.scratch, closed) {
                self.unread.insert(token);
            }
            read.push(token);
        }
    }

    /// Takes the connections that are there.
    fn accept(&mut self) {
        self.full = false;
        loop {
            match self.listener.accept() {
                Ok((stream, from)) => {
                    if let Ok(token) = self.add(stream, from, Peer::Stranger) {
                        // Also what another version needs to tell that this is one of lowp.
                        self.send(token, [GREETING.as_slice().into()]);
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // A connection that ended before it was taken.
                Err(error) if error.kind() == ErrorKind::ConnectionAborted => {}
                // Strangers that say nothing give their connections back soon, and other errors are of the connection that ended.
                Err(_) => {
                    self.full = true;
                    return;
                }
            }
        }
    }

    /// Has `stream` be one of them.
    pub(super) fn add(
        &mut self,
        mut stream: TcpStream,
        from: SocketAddr,
        peer: Peer,
    ) -> io::Result<Token> {
        let token = Token(self.next);
        self.next += 1;
        let interest = Interest::READABLE | Interest::WRITABLE;
        self.poll
            .registry()
            .register(&mut stream, token, interest)?;
        stream.set_nodelay(true)?;
        self.conns.insert(token, Conn::new(stream, from, peer));
        Ok(token)
    }

    pub(super) fn get(&self, token: Token) -> Option<&Conn> {
        self.conns.get(&token)
    }

    pub(super) fn get_mut(&mut self, token: Token) -> Option<&mut Conn> {
        self.conns.get_mut(&token)
    }

    pub(super) fn remove(&mut self, token: Token) {
        self.conns.remove(&token);
    }

    /// Sends `parts`, one after the other, to a connection that is still there.
    pub(super) fn send<const N: usize>(&mut self, token: Token, parts: [Arc<[u8]>; N]) {
        if let Some(conn) = self.conns.get_mut(&token) {
            conn.send(parts);
        }
    }

    /// What is due without anybody saying something: strangers that took too long go, and others find room.
    pub(super) fn tidy(&mut self) {
        let now = Instant::now();
        self.conns.retain(|_, conn| match conn.peer {
            Peer::Rank(_) | Peer::Relay(_) | Peer::Parent => true,
            Peer::Stranger | Peer::Lowp | Peer::Away => now - conn.since < HELLO,
        });
        if self.full {
            self.accept();
        }
    }
}
