//! [`Conn`]: a connection that nobody waits for, with what came of a frame and what is still to be sent.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

use mio::net::TcpStream;

use super::frame::{GREETING, LENGTH, LONG, SHORT, length};

/// Most reads of one connection before the others have their turn.
const READS: usize = 16;

/// Who is at the other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Peer {
    /// Something that has not greeted.
    Stranger,
    /// Something that greeted, and has not said which rank it is.
    Lowp,
    Rank(usize),
    /// The relay that this rank has: it speaks for the ranks of its node, and for itself.
    Relay(usize),
    /// What a relay takes the calls of its node to.
    Parent,
    /// What is no rank of this world, or speaks to another connection; it has been told.
    Away,
}

/// Where a rank is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Seat {
    /// The address of its machine, as rank 0 sees it.
    pub(super) machine: IpAddr,
    /// Its number on the machine.
    pub(super) local_rank: usize,
    /// The port that it listens on for others of its machine; 0 if it does not.
    pub(super) port: u16,
}

/// One connection.
#[derive(Debug)]
pub(super) struct Conn {
    pub(super) stream: TcpStream,
    pub(super) from: SocketAddr,
    pub(super) since: Instant,
    pub(super) peer: Peer,
    /// The restart count that it said, and where it is.
    pub(super) restart: u64,
    pub(super) seat: Option<Seat>,
    inbox: Vec<u8>,
    /// How much of it was taken out.
    taken: usize,
    /// Frames to be sent, and how much of the first one was.
    outbox: VecDeque<Arc<[u8]>>,
    sent: usize,
    /// Whether there is nothing to read any more.
    ended: bool,
}

impl Conn {
    pub(super) fn new(stream: TcpStream, from: SocketAddr, peer: Peer) -> Self {
        Self {
            stream,
            from,
            since: Instant::now(),
            peer,
            restart: 0,
            seat: None,
            inbox: Vec::new(),
            taken: 0,
            outbox: VecDeque::new(),
            sent: 0,
            ended: false,
        }
    }

    /// Reads what is there, to the end if the other side has `closed`; not all of it at once, so that no connection keeps the others
    /// waiting, nor more than a frame. Whether there may be more.
    pub(super) fn receive(&mut self, scratch: &mut [u8], closed: bool) -> bool {
        self.inbox.drain(..std::mem::take(&mut self.taken));
        for _ in 0..READS {
            match self.stream.read(scratch) {
                Ok(0) => self.ended = true,
                Ok(n) => {
                    self.inbox.extend_from_slice(&scratch[..n]);
                    // What comes after a read that was not filled is another event.
                    if n == scratch.len() || closed {
                        continue;
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(_) => self.ended = true,
            }
            return false;
        }
        true
    }

    /// These bytes of it were read before.
    pub(super) fn was_read(&mut self, bytes: Vec<u8>) {
        self.inbox = bytes;
    }

    /// Whether nothing more will come.
    pub(super) fn ended(&self) -> bool {
        self.ended
    }

    /// Ends what is to be read.
    pub(super) fn end(&mut self) {
        self.ended = true;
        self.inbox.clear();
        self.taken = 0;
    }

    /// The greeting, once it is there.
    pub(super) fn greeting(&mut self) -> Option<[u8; GREETING.len()]> {
        let greeting = *self.inbox.first_chunk()?;
        self.taken = GREETING.len();
        Some(greeting)
    }

    /// Takes out the body of the next frame, if it is whole.
    pub(super) fn frame(&mut self) -> io::Result<Option<Vec<u8>>> {
        let rest = &self.inbox[self.taken..];
        let Some(&len) = rest.first_chunk::<LENGTH>() else {
            return Ok(None);
        };
        let len = length(len, self.longest())?;
        let body = rest[LENGTH..].get(..len).map(<[u8]>::to_vec);
        if body.is_some() {
            self.taken += LENGTH + len;
        }
        if self.taken == self.inbox.len() {
            self.taken = 0;
            self.inbox.clear();
            self.inbox.shrink_to(1 << 16);
        }
        Ok(body)
    }

    fn longest(&self) -> usize {
        match self.peer {
            Peer::Rank(_) | Peer::Relay(_) | Peer::Parent => LONG,
            Peer::Stranger | Peer::Lowp | Peer::Away => SHORT,
        }
    }

    /// Sends `parts`, after what was given before.
    pub(super) fn send<const N: usize>(&mut self, parts: [Arc<[u8]>; N]) {
        self.outbox.extend(parts);
        self.flush();
    }

    /// Whether all is sent.
    pub(super) fn is_flushed(&self) -> bool {
        self.outbox.is_empty()
    }

    /// Sends as much as there is room for. What cannot be told is found when its connection is read.
    pub(super) fn flush(&mut self) {
        /// Most parts that are sent at once.
        const PARTS: usize = 16;
        while !self.outbox.is_empty() {
            let mut slices = [IoSlice::new(&[]); PARTS];
            for (slice, part) in slices.iter_mut().zip(&self.outbox) {
                *slice = IoSlice::new(part);
            }
            slices[0] = IoSlice::new(&self.outbox[0][self.sent..]);
            let parts = self.outbox.len().min(PARTS);
            match self.stream.write_vectored(&slices[..parts]) {
                Ok(n) => {
                    self.sent += n;
                    while let Some(part) = self.outbox.front()
                        && self.sent >= part.len()
                    {
                        self.sent -= part.len();
                        self.outbox.pop_front();
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(_) => {
                    self.outbox.clear();
                    self.sent = 0;
                    return;
                }
            }
        }
        if self.peer == Peer::Away {
            let _closed = self.stream.shutdown(Shutdown::Write);
        }
    }
}
