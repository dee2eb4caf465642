//! [`Conn`]: a connection that nobody waits for, with what came of a frame and what is still to be sent.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr};
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
    /// What is no rank of this world; it has been told.
    Away,
}

/// One connection.
#[derive(Debug)]
pub(super) struct Conn {
    pub(super) stream: TcpStream,
    pub(super) from: SocketAddr,
    pub(super) since: Instant,
    pub(super) peer: Peer,
    /// The restart count that it said.
    pub(super) restart: u64,
    inbox: Vec<u8>,
    /// Frames to be sent, and how much of the first one was.
    outbox: VecDeque<Arc<[u8]>>,
    sent: usize,
    /// Whether there is nothing to read any more.
    ended: bool,
}

impl Conn {
    pub(super) fn new(stream: TcpStream, from: SocketAddr) -> Self {
        Self {
            stream,
            from,
            since: Instant::now(),
            peer: Peer::Stranger,
            restart: 0,
            inbox: Vec::new(),
            outbox: VecDeque::new(),
            sent: 0,
            ended: false,
        }
    }

    /// Reads what is there, to the end if the other side has `closed`; not all of it at once, so that no connection keeps the others
    /// waiting, nor more than a frame. Whether there may be more.
    pub(super) fn receive(&mut self, scratch: &mut [u8], closed: bool) -> bool {
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

    /// Whether nothing more will come.
    pub(super) fn ended(&self) -> bool {
        self.ended
    }

    /// Ends what is to be read.
    pub(super) fn end(&mut self) {
        self.ended = true;
        self.inbox.clear();
    }

    /// The greeting, once it is there.
    pub(super) fn greeting(&mut self) -> Option<[u8; GREETING.len()]> {
        let greeting = *self.inbox.first_chunk()?;
        self.inbox.drain(..GREETING.len());
        Some(greeting)
    }

    /// What was read, for [`next_frame`].
    pub(super) fn take_inbox(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.inbox)
    }

    /// Gives back what [`Conn::take_inbox`] took, but for its first `used` bytes.
    pub(super) fn put_back(&mut self, mut inbox: Vec<u8>, used: usize) {
        if used < inbox.len() {
            inbox.drain(..used);
            self.inbox = inbox;
        } else if inbox.capacity() <= 1 << 16 {
            inbox.clear();
            self.inbox = inbox;
        }
    }

    pub(super) fn longest(&self) -> usize {
        match self.peer {
            Peer::Rank(_) => LONG,
            _ => SHORT,
        }
    }

    /// Sends `frame` behind what is to be sent before.
    pub(super) fn send(&mut self, frame: Arc<[u8]>) {
        self.outbox.push_back(frame);
        self.flush();
    }

    /// Sends as much as there is room for. What cannot be told is found when its connection is read.
    pub(super) fn flush(&mut self) {
        while let Some(frame) = self.outbox.front() {
            match self.stream.write(&frame[self.sent..]) {
                Ok(n) => {
                    self.sent += n;
                    if self.sent == frame.len() {
                        self.outbox.pop_front();
                        self.sent = 0;
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

/// The body of the frame that `inbox` begins with, if it is whole.
pub(super) fn next_frame(inbox: &[u8], longest: usize) -> io::Result<Option<&[u8]>> {
    let Some(&len) = inbox.first_chunk::<LENGTH>() else {
        return Ok(None);
    };
    let len = length(len, longest)?;
    Ok(inbox[LENGTH..].get(..len))
}
