//! One thread of rank 0: listens, and takes the other ranks' posts to the hub.

use std::collections::BTreeSet;
use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use mio::net::TcpListener;
use mio::{Events, Token, Waker};

use super::answers::{Bytes, answers};
use super::conn::Peer;
use super::connections::Connections;
use super::frame::{Answer, GREETING, Request, before, nonsense, open, split_up, to_frame};
use crate::CommError;
use crate::control::hub::{EVERY, Hub, Listener, Round, WORLD};
use crate::control::post::Post;
use crate::control::{Launch, MAX_ALL_GATHER};
use crate::error::Departure;

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
    pub(super) net: Connections,
    /// That of each rank, or of its relay.
    pub(super) tokens: Vec<Option<Token>>,
    /// Once all ranks are there: those that have not come to their relays.
    pub(super) moving: Option<BTreeSet<usize>>,
    begun: Instant,
    looked: Instant,
    /// Whether the ranks were told of the failure.
    told: bool,
}

impl Server {
    /// A server of the ranks that come to `listener`, and what it shares with rank 0.
    pub(super) fn new(launch: &Launch, listener: TcpListener) -> io::Result<(Self, Arc<Shared>)> {
        let (net, waker) = Connections::new(listener)?;
        let waker = Arc::new(waker);
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
            net,
            tokens: vec![None; launch.world],
            moving: None,
            begun: Instant::now(),
            looked: Instant::now(),
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
        loop {
            let read = match self.net.wait(&mut events, EVERY) {
                Ok(read) => read,
                Err(error) => {
                    let why = format!("cannot take connections: {error}");
                    self.shared.hub.fail(self.shared.launch.error(why));
                    return;
                }
            };
            read.into_iter().for_each(|token| self.hear(token));
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

    /// Does what a connection has to say.
    fn hear(&mut self, token: Token) {
        let Some(conn) = self.net.get_mut(token) else {
            return;
        };
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
        let Some(conn) = self.net.get(token).filter(|conn| conn.ended()) else {
            return;
        };
        if let Peer::Rank(rank) | Peer::Relay(rank) = conn.peer {
            self.lose(token, rank);
        }
        self.net.remove(token);
    }

    /// Does what the frames say that are there.
    fn take_frames(&mut self, token: Token) {
        while let Some(conn) = self.net.get_mut(token) {
            let peer = conn.peer;
            let body = match conn.frame() {
                Ok(Some(body)) => body,
                Ok(None) => return,
                Err(error) => return self.end(token, &error.to_string()),
            };
            let valid = match peer {
                Peer::Lowp => open(&body)
                    .map(|(hello, _)| self.register(token, &hello))
                    .is_ok(),
                Peer::Rank(rank) | Peer::Relay(rank) => self.request(token, rank, &body),
                Peer::Stranger | Peer::Parent => return,
                Peer::Away => true,
            };
            if !valid {
                return self.end(token, "what no rank says");
            }
        }
    }

    /// Ends a connection that sent what cannot be understood.
    fn end(&mut self, token: Token, what: &str) {
        let Some(conn) = self.net.get_mut(token) else {
            return;
        };
        conn.end();
        if let Peer::Rank(rank) | Peer::Relay(rank) = conn.peer {
            let cause = self.shared.hub.fail(nonsense(0, rank, what));
            self.tell(token, &Answer::Failed(cause.told(0)));
        }
    }

    /// Does what `own` asks for, or what the relay that it is brings; whether it can be.
    fn request(&mut self, token: Token, own: usize, body: &[u8]) -> bool {
        let hub = Arc::clone(&self.shared.hub);
        let comes = |rank: usize| self.tokens.get(rank) == Some(&Some(token));
        match open(body) {
            Ok((
                Request::Post {
                    group,
                    ranks,
                    call,
                    lens,
                },
                rest,
            )) => {
                let members = hub.members(group);
                let known = |&rank: &usize| members.get(rank).is_some_and(|&rank| comes(rank));
                let Some(brought) = split_up(rest, &lens, ranks.len()) else {
                    return false;
                };
                if ranks.is_empty() || !ranks.iter().all(known) {
                    return false;
                }
                let post = |payload| {
                    let call = call.clone();
                    Post { call, payload }
                };
                let posts = ranks.into_iter().zip(brought.map(post));
                // Everybody hears of failures, but for what came after.
                if let Err(cause) = hub.post(group, posts) {
                    self.tell(token, &Answer::Failed(cause.told(0)));
                }
            }
            Ok((Request::Close { group, rank }, _)) => {
                let members = hub.members(group);
                if !members.get(rank).is_some_and(|&rank| comes(rank)) {
                    return false;
                }
                hub.close(group, rank);
            }
            Ok((Request::Fail(cause), _)) => {
                hub.fail(cause);
            }
            Ok((Request::Leave(rank, how), _)) => {
                // A relay may report a rank that stayed with rank 0, whose own connection says when it leaves.
                if comes(rank) {
                    self.leave(token, rank, how);
                }
            }
            Ok((Request::Serves(rank), _)) => self.relayed(token, own, rank),
            Ok((Request::Stays, _)) => drop(self.placed(own)),
            Err(_) => return false,
        }
        true
    }

    /// `rank` is gone, and said so, or its relay says how.
    fn leave(&mut self, token: Token, rank: usize, how: Departure) {
        self.tokens[rank] = None;
        if how == Departure::Lost {
            self.lost(rank);
        }
        self.shared.hub.depart(rank, how);
        if !self.is_relay(token) {
            self.net.remove(token);
        }
    }

    fn is_relay(&self, token: Token) -> bool {
        let conn = self.net.get(token);
        conn.is_some_and(|conn| matches!(conn.peer, Peer::Relay(_)))
    }

    /// The connection of `rank` closed although the rank did not say that it leaves. The ranks whose relay it is are lost, too.
    fn lose(&mut self, token: Token, rank: usize) {
        let of_it = |known: &Option<Token>| *known == Some(token);
        let ranks: Vec<usize> = (0..self.tokens.len())
            .filter(|&rank| of_it(&self.tokens[rank]))
            .collect();
        if !ranks.is_empty() {
            self.lost(rank);
        }
        for rank in ranks {
            self.tokens[rank] = None;
            self.shared.hub.depart(rank, Departure::Lost);
        }
    }

    /// Ends the world: whoever waits for the data of `rank` on a device waits for nobody here.
    fn lost(&self, rank: usize) {
        let (op, how) = ("the world".into(), Departure::Lost);
        self.shared.hub.fail(CommError::Departed { op, rank, how });
    }

    pub(super) fn tell(&mut self, token: Token, answer: &Answer) {
        if let Ok(bytes) = to_frame(answer) {
            self.net.send(token, [bytes.into()]);
        }
    }

    /// Gives `frame` to ranks, by their relays where they have such; it may be the first that they hear of the group `opens`.
    fn tell_ranks(&mut self, ranks: &[usize], opens: Option<usize>, frame: &Bytes) {
        let token = |&rank: &usize| Some((self.tokens[rank]?, rank));
        let mut told: Vec<(Token, usize)> = ranks.iter().filter_map(token).collect();
        told.sort_by_key(|&(token, _)| token);
        for of_one in told.chunk_by(|a, b| a.0 == b.0) {
            let token = of_one[0].0;
            if !self.is_relay(token) {
                self.net.send(token, [Arc::clone(frame)]);
                continue;
            }
            let ranks = of_one.iter().map(|&(_, rank)| rank).collect();
            if let Ok(to) = before(&Answer::Pass { ranks, opens }, frame.len()) {
                self.net.send(token, [to.into(), Arc::clone(frame)]);
            }
        }
    }

    /// Ends the world for all: a relay that hears of it tells its ranks.
    fn tell_failure(&mut self, cause: CommError) {
        let tokens: BTreeSet<Token> = self.tokens.iter().copied().flatten().collect();
        if let Ok(bytes) = to_frame(&Answer::Failed(cause)) {
            let bytes = Bytes::from(bytes);
            let mut send = |token| self.net.send(token, [Arc::clone(&bytes)]);
            tokens.into_iter().for_each(&mut send);
        }
    }

    fn tell_round(&mut self, members: &[usize], round: &Round<Bytes>) {
        let told = answers(members, round, |ranks, opens, frame| {
            self.tell_ranks(ranks, opens, frame);
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
        if !shared.joined().ready && hub.failure().is_none() {
            self.send_to_relays();
            let missing = self.missing();
            if missing.is_empty() {
                shared.joined().ready = true;
                let all: Vec<usize> = (1..launch.world).collect();
                if let Ok(ready) = to_frame(&Answer::Ready) {
                    self.tell_ranks(&all, Some(WORLD), &ready.into());
                }
                shared.changed.notify_all();
            } else if self.begun.elapsed() >= launch.limit {
                hub.fail(CommError::Timeout {
                    op: format!("rendezvous at {}", launch.address()).into(),
                    waited_s: launch.limit.as_secs_f64(),
                    missing,
                    elsewhere: Vec::new(),
                });
            }
        }
        let due = self.looked.elapsed() >= EVERY;
        let cause = if due { hub.look() } else { hub.failure() };
        if let Some(cause) = cause
            && !self.told
        {
            self.told = true;
            self.tell_failure(cause.clone().told(0));
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
            self.net.tidy();
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
