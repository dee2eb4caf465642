//! One thread of rank 0: listens, and takes the other ranks' posts to the hub.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, ErrorKind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use mio::net::TcpListener;
use mio::{Events, Interest, Poll, Token, Waker};

use super::answers::{Bytes, answers};
use super::conn::{Conn, Peer, next_frame};
use super::frame::{Answer, GREETING, LENGTH, Request, open, to_frame};
use crate::CommError;
use crate::control::hub::{EVERY, Hub, Listener, Round};
use crate::control::post::Post;
use crate::control::{Launch, MAX_ALL_GATHER};
use crate::error::Departure;

/// How long somebody who connects may take to say who it is, and who was sent away to go.
const HELLO: Duration = Duration::from_secs(5);

const LISTENER: Token = Token(0);
pub(super) const WAKER: Token = Token(1);

/// What rank 0 has its server do.
pub(super) enum Order {
    /// To tell what came of a round.
    Tell(Arc<[usize]>, Round<Bytes>),
    Stop,
}

/// Which ranks have connected.
#[derive(Debug)]
pub(super) struct Joined {
    pub(super) ranks: Vec<bool>,
    /// How many have not, nor were told why they cannot.
    pub(super) missing: usize,
    /// Whether all were told so.
    pub(super) ready: bool,
}

/// What rank 0 shares with its server.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) launch: Launch,
    pub(super) hub: Arc<Hub<Bytes>>,
    joined: Mutex<Joined>,
    pub(super) changed: Condvar,
    orders: Sender<Order>,
    waker: Arc<Waker>,
}

impl Shared {
    pub(super) fn joined(&self) -> MutexGuard<'_, Joined> {
        self.joined.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the server look at what changed.
    pub(super) fn wake(&self) {
        // Else it looks soon by itself.
        let _woken = self.waker.wake();
    }

    pub(super) fn order(&self, order: Order) {
        // A server that is gone has nobody to tell.
        let _gone = self.orders.send(order);
        self.wake();
    }
}

/// Hears of rounds.
#[derive(Debug)]
struct Rounds {
    orders: Sender<Order>,
    waker: Arc<Waker>,
}

impl Listener<Bytes> for Rounds {
    fn met(&self, members: &Arc<[usize]>, round: &Round<Bytes>) {
        let order = Order::Tell(Arc::clone(members), Arc::clone(round));
        let _gone = self.orders.send(order);
        let _woken = self.waker.wake();
    }
}

/// The connections.
pub(super) struct Server {
    pub(super) shared: Arc<Shared>,
    orders: Receiver<Order>,
    poll: Poll,
    listener: TcpListener,
    pub(super) conns: BTreeMap<Token, Conn>,
    /// That of each rank.
    pub(super) tokens: Vec<Option<Token>>,
    /// The number of the next connection.
    next: usize,
    begun: Instant,
    looked: Instant,
    /// Whether the listener had more than the system had room for.
    full: bool,
    /// Connections that may have more to read.
    unread: BTreeSet<Token>,
    /// Whether the ranks were told of the failure.
    told: bool,
}

impl Server {
    /// A server of the ranks that come to `listener`, and what it shares with rank 0.
    pub(super) fn new(
        launch: &Launch,
        mut listener: TcpListener,
    ) -> io::Result<(Self, Arc<Shared>)> {
        let poll = Poll::new()?;
        let waker = Arc::new(Waker::new(poll.registry(), WAKER)?);
        poll.registry()
            .register(&mut listener, LISTENER, Interest::READABLE)?;
        let hub = Arc::new(Hub::new(launch.world, launch.limit, MAX_ALL_GATHER));
        let (orders, received) = channel();
        hub.listen(Arc::new(Rounds {
            orders: orders.clone(),
            waker: Arc::clone(&waker),
        }));
        let mut ranks = vec![false; launch.world];
        ranks[0] = true;
        let shared = Arc::new(Shared {
            launch: launch.clone(),
            hub,
            joined: Mutex::new(Joined {
                missing: launch.world - 1,
                ranks,
                ready: false,
            }),
            changed: Condvar::new(),
            orders,
            waker,
        });
        let server = Self {
            shared: Arc::clone(&shared),
            orders: received,
            poll,
            listener,
            conns: BTreeMap::new(),
            tokens: vec![None; launch.world],
            next: WAKER.0 + 1,
            begun: Instant::now(),
            looked: Instant::now(),
            full: false,
            unread: BTreeSet::new(),
            told: false,
        };
        Ok((server, shared))
    }

    /// Serves until the world ends.
    pub(super) fn run(mut self) {
        let mut ending = Ending {
            shared: Arc::clone(&self.shared),
            told_to: false,
        };
        let mut events = Events::with_capacity(1024);
        let mut scratch = vec![0; 1 << 16];
        loop {
            let patience = if self.unread.is_empty() {
                EVERY
            } else {
                Duration::ZERO
            };
            match self.poll.poll(&mut events, Some(patience)) {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => {
                    self.shared.hub.fail(self.cannot_listen(&error));
                    return;
                }
            }
            for event in &events {
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
                            self.receive(token, &mut scratch, closed);
                        }
                    }
                }
            }
            for token in std::mem::take(&mut self.unread) {
                self.receive(token, &mut scratch, true);
            }
            while let Ok(order) = self.orders.try_recv() {
                match order {
                    Order::Tell(members, round) => self.tell_round(&members, &round),
                    Order::Stop => {
                        ending.told_to = true;
                        return;
                    }
                }
            }
            self.look();
        }
    }

    /// Takes the connections that are there.
    fn accept(&mut self) {
        self.full = false;
        loop {
            match self.listener.accept() {
                Ok((mut stream, from)) => {
                    let token = Token(self.next);
                    self.next += 1;
                    let interest = Interest::READABLE | Interest::WRITABLE;
                    let known = self.poll.registry().register(&mut stream, token, interest);
                    if known.is_err() || stream.set_nodelay(true).is_err() {
                        continue;
                    }
                    let mut conn = Conn::new(stream, from);
                    // Also what another version needs to tell that this is one of lowp.
                    conn.send(GREETING.as_slice().into());
                    self.conns.insert(token, conn);
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

    fn cannot_listen(&self, error: &io::Error) -> CommError {
        let launch = &self.shared.launch;
        launch.error(format!("cannot take connections: {error}"))
    }

    /// Reads what a connection has to say.
    fn receive(&mut self, token: Token, scratch: &mut [u8], closed: bool) {
        let Some(conn) = self.conns.get_mut(&token) else {
            return;
        };
        if conn.receive(scratch, closed) {
            self.unread.insert(token);
        }
        if conn.peer == Peer::Stranger {
            match conn.greeting() {
                Some(GREETING) => conn.peer = Peer::Lowp,
                Some(other) => {
                    conn.end();
                    self.another_protocol(token, other);
                }
                // It may come in parts.
                None if !conn.ended() => return,
                None => {}
            }
        }
        self.take_frames(token);
        let Some(conn) = self.conns.get(&token).filter(|conn| conn.ended()) else {
            return;
        };
        if let Peer::Rank(rank) = conn.peer {
            self.lose(rank);
        }
        self.conns.remove(&token);
    }

    /// Does what the frames say that are there.
    fn take_frames(&mut self, token: Token) {
        let Some(conn) = self.conns.get_mut(&token) else {
            return;
        };
        let inbox = conn.take_inbox();
        let mut used = 0;
        while let Some(conn) = self.conns.get(&token) {
            let body = match next_frame(&inbox[used..], conn.longest()) {
                Ok(Some(body)) => body,
                Ok(None) => break,
                Err(error) => return self.end(token, &error.to_string()),
            };
            used += LENGTH + body.len();
            let valid = match conn.peer {
                Peer::Lowp => open(body)
                    .map(|(hello, _)| self.register(token, &hello))
                    .is_ok(),
                Peer::Rank(rank) => self.request(token, rank, body),
                Peer::Stranger => break,
                Peer::Away => true,
            };
            if !valid {
                return self.end(token, "what no rank says");
            }
        }
        if let Some(conn) = self.conns.get_mut(&token) {
            conn.put_back(inbox, used);
        }
    }

    /// Ends a connection that sent what cannot be understood.
    fn end(&mut self, token: Token, what: &str) {
        let Some(conn) = self.conns.get_mut(&token) else {
            return;
        };
        conn.end();
        if let Peer::Rank(rank) = conn.peer {
            let message = format!("rank 0 heard {what} from it; install one build everywhere");
            let cause = self.shared.hub.fail(CommError::Failed { rank, message });
            self.tell(token, &Answer::Failed(cause.told(0)));
        }
    }

    /// Does what `rank` asks for; whether it can be.
    fn request(&mut self, token: Token, rank: usize, body: &[u8]) -> bool {
        let hub = Arc::clone(&self.shared.hub);
        match open(body) {
            Ok((
                Request::Post {
                    group,
                    rank: member,
                    call,
                },
                rest,
            )) => {
                if hub.members(group).get(member) != Some(&rank) {
                    return false;
                }
                let payload = Bytes::from(rest);
                // Everybody hears of failures, but for what came after.
                if let Err(cause) = hub.post(group, member, Post { call, payload }) {
                    self.tell(token, &Answer::Failed(cause.told(0)));
                }
            }
            Ok((Request::Close { group }, _)) => {
                let members = hub.members(group);
                let Some(member) = members.iter().position(|&known| known == rank) else {
                    return false;
                };
                hub.close(group, member);
            }
            Ok((Request::Fail(cause), _)) => {
                hub.fail(cause);
            }
            Ok((Request::Leave(how), _)) => {
                hub.depart(rank, how);
                self.tokens[rank] = None;
                self.conns.remove(&token);
            }
            Err(_) => return false,
        }
        true
    }

    /// The connection of `rank` is gone, without a word.
    fn lose(&mut self, rank: usize) {
        let how = Departure::Lost;
        self.tokens[rank] = None;
        self.shared.hub.depart(rank, how);
        // Whoever waits for its data on a device waits for nobody here.
        let op = "the world".into();
        self.shared.hub.fail(CommError::Departed { op, rank, how });
    }

    pub(super) fn tell(&mut self, token: Token, answer: &Answer) {
        if let (Some(conn), Ok(bytes)) = (self.conns.get_mut(&token), to_frame(answer)) {
            conn.send(bytes.into());
        }
    }

    fn tell_rank(&mut self, rank: usize, frame: &Arc<[u8]>) {
        let conn = self.tokens[rank].and_then(|token| self.conns.get_mut(&token));
        if let Some(conn) = conn {
            conn.send(Arc::clone(frame));
        }
    }

    fn tell_all(&mut self, answer: &Answer) {
        if let Ok(bytes) = to_frame(answer) {
            let bytes = bytes.into();
            (1..self.tokens.len()).for_each(|rank| self.tell_rank(rank, &bytes));
        }
    }

    fn tell_round(&mut self, members: &[usize], round: &Round<Bytes>) {
        let told = answers(members, round, &mut |ranks, frame| {
            ranks.iter().for_each(|&rank| self.tell_rank(rank, frame));
        });
        if let Err(error) = told {
            let message = error.to_string();
            self.shared.hub.fail(CommError::Failed { rank: 0, message });
        }
    }

    /// What is due without anybody saying something.
    fn look(&mut self) {
        let shared = Arc::clone(&self.shared);
        let Shared { hub, launch, .. } = &*shared;
        let mut joined = shared.joined();
        if !joined.ready && hub.failure().is_none() {
            if joined.missing == 0 {
                joined.ready = true;
                self.tell_all(&Answer::Ready);
                shared.changed.notify_all();
            } else if self.begun.elapsed() >= launch.limit {
                let missing = joined.ranks.iter().enumerate();
                let missing = missing.filter(|(_, joined)| !**joined);
                hub.fail(CommError::Timeout {
                    op: format!("rendezvous at {}", launch.address()).into(),
                    waited_s: launch.limit.as_secs_f64(),
                    missing: missing.map(|(rank, _)| rank).collect(),
                    elsewhere: Vec::new(),
                });
            }
        }
        drop(joined);
        let due = self.looked.elapsed() >= EVERY;
        let cause = if due { hub.look() } else { hub.failure() };
        if let Some(cause) = cause
            && !self.told
        {
            self.told = true;
            self.tell_all(&Answer::Failed(cause.clone().told(0)));
            shared.changed.notify_all();
            if let CommError::Timeout { missing, .. } = cause {
                // They were told. Nobody waits for them again, to see them go.
                for rank in missing {
                    hub.depart(rank, Departure::Lost);
                }
            }
        }
        if due {
            self.looked = Instant::now();
            self.conns.retain(|_, conn| {
                matches!(conn.peer, Peer::Rank(_)) || conn.since.elapsed() < HELLO
            });
            if self.full {
                self.accept();
            }
        }
    }

    pub(super) fn failed(&self) -> Option<CommError> {
        self.shared.hub.failure().filter(|_| self.told)
    }
}

/// Ends the world if the server ends without having been told to: nobody would hear of anything any more.
struct Ending {
    shared: Arc<Shared>,
    told_to: bool,
}

impl Drop for Ending {
    fn drop(&mut self) {
        if !self.told_to {
            let message = "its thread that serves the other ranks ended".to_owned();
            self.shared.hub.fail(CommError::Failed { rank: 0, message });
            self.shared.changed.notify_all();
        }
    }
}
