//! [`Connection`]: what a rank and rank 0 say to each other, directly or by a relay. Whoever waits for an answer reads it; between calls
//! [`Connection::failure`] looks whether rank 0 has said why the world ended.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use super::frame::{Answer, LENGTH, LONG, Request, frame, length, open};
use crate::CommError;
use crate::control::Launch;
use crate::error::Departure;

/// How much longer than the limit a rank waits for rank 0, which knows more about the cause.
pub(super) const GRACE: Duration = Duration::from_secs(5);

/// How long the news of a failure may take to reach the other ranks.
pub(super) const FAREWELL: Duration = Duration::from_secs(5);

/// An answer, and the bytes after it.
pub(super) type Answered = (Answer, Vec<u8>);

/// What is read, and the part of a frame that was.
#[derive(Debug)]
struct Incoming {
    stream: TcpStream,
    begun: Vec<u8>,
}

/// The connection to rank 0 or to a relay, shared by all groups of the rank.
#[derive(Debug)]
pub(super) struct Connection {
    /// With the address that it leads to.
    pub(super) launch: Launch,
    /// The rank that it leads to.
    to: usize,
    /// Locked by who reads: a call, for as long as it waits.
    incoming: Mutex<Incoming>,
    stream: Mutex<TcpStream>,
    failure: Mutex<Option<CommError>>,
    /// Locked for the length of a call.
    pub(super) turn: Mutex<()>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Incoming {
    /// The next answer, if it is whole.
    fn whole(&mut self) -> io::Result<Option<Answered>> {
        let Some(&len) = self.begun.first_chunk::<LENGTH>() else {
            return Ok(None);
        };
        let end = LENGTH + length(len, LONG)?;
        let Some(body) = self.begun.get(LENGTH..end) else {
            return Ok(None);
        };
        let (answer, rest) = open(body)?;
        let rest = rest.to_vec();
        self.begun.drain(..end);
        Ok(Some((answer, rest)))
    }

    /// Reads something of the next answer.
    fn read(&mut self) -> io::Result<()> {
        let mut some = [0; 1 << 12];
        let read = match self.begun.first_chunk::<LENGTH>() {
            // A length alone takes no memory: it grows with what arrives.
            Some(&len) if length(len, LONG)? > some.len() => {
                let left = (LENGTH + length(len, LONG)?).saturating_sub(self.begun.len());
                let mut part = (&mut self.stream).take(left as u64);
                part.read_to_end(&mut self.begun)?
            }
            _ => {
                let read = self.stream.read(&mut some)?;
                self.begun.extend_from_slice(&some[..read]);
                read
            }
        };
        if read == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        Ok(())
    }

    /// The next answer, once it is there.
    fn next(&mut self) -> io::Result<Answered> {
        loop {
            if let Some(answer) = self.whole()? {
                return Ok(answer);
            }
            match self.read() {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                read => read?,
            }
        }
    }
}

impl Connection {
    /// The connection over `stream`, whose reads end with the limit.
    pub(super) fn new(launch: &Launch, to: usize, stream: TcpStream) -> io::Result<Self> {
        let limit = launch.limit.saturating_add(GRACE);
        stream.set_read_timeout(Some(limit))?;
        let incoming = Incoming {
            stream: stream.try_clone()?,
            begun: Vec::new(),
        };
        Ok(Self {
            launch: launch.clone(),
            to,
            incoming: Mutex::new(incoming),
            stream: Mutex::new(stream),
            failure: Mutex::default(),
            turn: Mutex::default(),
        })
    }

    /// The stream, and what of it was read and not understood yet.
    pub(super) fn into_parts(self) -> (TcpStream, Vec<u8>) {
        let incoming = self.incoming.into_inner();
        let incoming = incoming.unwrap_or_else(PoisonError::into_inner);
        (incoming.stream, incoming.begun)
    }

    /// Makes `cause` what the world ended with, unless it has ended.
    fn end(&self, cause: CommError) -> CommError {
        lock(&self.failure).get_or_insert(cause).clone()
    }

    fn lost(&self) -> CommError {
        self.end(CommError::Departed {
            op: format!("the connection to rank {}", self.to).into(),
            rank: self.to,
            how: Departure::Lost,
        })
    }

    /// What the world ended with, as far as it was told.
    pub(super) fn failure(&self) -> Option<CommError> {
        if let Some(cause) = &*lock(&self.failure) {
            return Some(cause.clone());
        }
        // A call hears of it, and what comes may be its answer.
        let turn = self.turn.try_lock();
        if matches!(turn, Err(TryLockError::WouldBlock)) {
            return None;
        }
        // Whoever reads now hears of it.
        let mut incoming = self.incoming.try_lock().ok()?;
        let stream = lock(&self.stream);
        if stream.set_nonblocking(true).is_err() {
            return Some(self.lost());
        }
        let next = incoming.next();
        let restored = stream.set_nonblocking(false);
        match next {
            Ok((Answer::Failed(cause), _)) => Some(self.end(cause)),
            Err(error) if error.kind() == ErrorKind::WouldBlock && restored.is_ok() => None,
            Ok(_) | Err(_) => Some(self.lost()),
        }
    }

    /// Ends the world with `cause`, unless it has ended: tells rank 0, and whoever waits here.
    pub(super) fn fail(&self, cause: CommError, rank: usize) -> CommError {
        let first = self.failure().unwrap_or_else(|| self.end(cause));
        let _gone = self.send(&Request::Fail(first.clone().told(rank)), &[]);
        if self.incoming.try_lock().is_err() {
            let _gone = lock(&self.stream).shutdown(Shutdown::Read);
        }
        first
    }

    pub(super) fn send(&self, request: &Request, bytes: &[u8]) -> Result<(), CommError> {
        let sent = frame(request, [bytes].into_iter());
        let sent = sent.and_then(|bytes| lock(&self.stream).write_all(&bytes));
        sent.map_err(|error| {
            if matches!(
                error.kind(),
                ErrorKind::BrokenPipe | ErrorKind::ConnectionReset | ErrorKind::ConnectionAborted
            ) && let Ok(mut incoming) = self.incoming.try_lock()
            {
                self.last_words(&mut incoming);
            }
            let lost = format!("cannot send to rank {}: {error}", self.to);
            let lost = self.launch.error(lost);
            self.end(lost)
        })
    }

    /// What rank 0 said before it ended the connection.
    fn last_words(&self, incoming: &mut Incoming) {
        if incoming.stream.set_read_timeout(Some(GRACE)).is_err() {
            return;
        }
        while let Ok((answer, _)) = incoming.next() {
            if let Answer::Failed(cause) = answer {
                self.end(cause);
                return;
            }
        }
        self.lost();
    }

    /// What rank 0 answers.
    pub(super) fn answer(&self, op: &str) -> Result<Answered, CommError> {
        let begun = Instant::now();
        let next = lock(&self.incoming).next();
        match next {
            Ok((Answer::Failed(cause), _)) => Err(self.end(cause)),
            // An answer counts, even if something failed right after it.
            Ok(answered) => Ok(answered),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                let (to, rank) = (self.to, self.launch.rank);
                let relay = (to > 0).then(|| format!("rank {to} brings the calls of rank {rank}"));
                Err(self.end(CommError::Timeout {
                    op: op.into(),
                    waited_s: begun.elapsed().as_secs_f64(),
                    missing: vec![self.to],
                    elsewhere: relay.into_iter().collect(),
                }))
            }
            Err(_) => Err(self.lost()),
        }
    }

    pub(super) fn ask(
        &self,
        op: &str,
        request: &Request,
        bytes: &[u8],
    ) -> Result<Answered, CommError> {
        if let Some(cause) = &*lock(&self.failure) {
            return Err(cause.clone());
        }
        self.send(request, bytes)?;
        self.answer(op)
    }

    /// Says goodbye.
    pub(super) fn leave(&self, how: Departure) {
        let _gone = self.send(&Request::Leave(self.launch.rank, how), &[]);
        let _closed = lock(&self.stream).shutdown(Shutdown::Both);
    }
}
