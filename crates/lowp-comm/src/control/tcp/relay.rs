//! [`Relay`]: one thread of the first rank of a node, which the ranks of the node connect to. It takes their posts to rank 0 in one message, and
//! hands out what rank 0 answers.
//!
//! It decides nothing: rank 0 hears of every post, departure and failure, as if each rank had a connection of its own. Posts wait here for those
//! of the other ranks of the node, but only for so long that rank 0 still knows who waits for whom.

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use mio::{Events, Token};

use super::conn::Peer;
use super::connection::{Connection, FAREWELL, GRACE};
use super::connections::Connections;
use super::frame::{Answer, GREETING, Hello, Request, frame, nonsense, open, to_frame};
use crate::CommError;
use crate::control::Launch;
use crate::control::hub::EVERY;
use crate::control::post::Post;
use crate::error::Departure;

/// What ranks of the node brought to the next round of a group.
#[derive(Debug, Default)]
struct Held {
    /// How many of them are in the group, and hold it.
    members: usize,
    holders: usize,
    /// By the place in the group; and how many of the round rank 0 has.
    posts: Vec<(usize, Post<Vec<u8>>)>,
    brought: usize,
    /// When the first of them came.
    since: Option<Instant>,
}

/// The connections of a node.
#[derive(Debug)]
struct Relay {
    launch: Launch,
    net: Connections,
    /// The connection to rank 0.
    parent: Token,
    /// That of each rank of the node which is there, the relay's own among them.
    tokens: BTreeMap<usize, Token>,
    /// Whether one of them came.
    served: bool,
    /// What each of them waits in for rank 0, and since when.
    waits: BTreeMap<usize, (String, Instant)>,
    groups: BTreeMap<usize, Held>,
    /// What kept its own rank from coming.
    own_failure: Arc<OnceLock<CommError>>,
    /// What the world ended with.
    failure: Option<CommError>,
    /// When it ends, whoever is there.
    deadline: Option<Instant>,
    looked: Instant,
}

/// The thread of a relay, as its own rank holds it.
#[derive(Debug)]
pub(super) struct Serving {
    thread: JoinHandle<()>,
    own_failure: Arc<OnceLock<CommError>>,
}

impl Serving {
    /// Serves those that come to `listener`, with the connection to rank 0 of the relay's own rank.
    pub(super) fn start(
        launch: &Launch,
        listener: TcpListener,
        to_first: Connection,
    ) -> Result<Self, CommError> {
        let cannot = |e| launch.error(format!("it cannot be the relay of its node: {e}"));
        listener.set_nonblocking(true).map_err(cannot)?;
        let listener = mio::net::TcpListener::from_std(listener);
        let (net, _) = Connections::new(listener).map_err(cannot)?;
        let (stream, begun) = to_first.into_parts();
        stream.set_nonblocking(true).map_err(cannot)?;
        let from = stream.peer_addr().map_err(cannot)?;
        let own_failure = Arc::default();
        let mut relay = Relay {
            launch: launch.clone(),
            net,
            parent: Token(0),
            tokens: BTreeMap::new(),
            served: false,
            waits: BTreeMap::new(),
            groups: BTreeMap::new(),
            own_failure: Arc::clone(&own_failure),
            failure: None,
            deadline: None,
            looked: Instant::now(),
        };
        let stream = mio::net::TcpStream::from_std(stream);
        relay.parent = relay.net.add(stream, from, Peer::Parent).map_err(cannot)?;
        if let Some(conn) = relay.net.get_mut(relay.parent) {
            conn.was_read(begun);
        }
        let builder = thread::Builder::new().name("lowp-relay".to_owned());
        let thread = builder.spawn(move || relay.run()).map_err(cannot)?;
        Ok(Self {
            thread,
            own_failure,
        })
    }

    /// The relay's own rank cannot come to it: the relay reports `cause` and ends. Returns the cause.
    pub(super) fn fail(self, cause: CommError) -> CommError {
        let cause = self.own_failure.get_or_init(|| cause).clone();
        self.join();
        cause
    }

    /// Waits until all ranks of the node are gone.
    pub(super) fn join(self) {
        // A relay that panicked has closed its connections: rank 0 and the ranks of the node see that.
        drop(self.thread.join());
    }
}

impl Relay {
    /// Serves until all ranks of the node are gone.
    fn run(mut self) {
        let hold = EVERY.min(self.launch.limit / 8);
        let mut events = Events::with_capacity(64);
        self.hear(self.parent);
        while !self.is_over() {
            let holds = self.groups.values().any(|held| held.since.is_some());
            let patience = if holds { hold } else { EVERY };
            // Without connections all ranks of the node find that the relay is gone, and so does rank 0.
            let Ok(read) = self.net.wait(&mut events, patience) else {
                return;
            };
            read.into_iter().for_each(|token| self.hear(token));
            self.bring_all(hold);
            if self.looked.elapsed() >= EVERY {
                self.looked = Instant::now();
                self.look();
            }
        }
    }

    /// What is due without anybody saying something. Where rank 0 is stuck, the ranks of the node must not take it for the relay.
    fn look(&mut self) {
        self.net.tidy();
        if self.failure.is_none()
            && let Some(cause) = self.own_failure.get().cloned()
        {
            self.up(&Request::Fail(cause.clone()), &[]);
            self.fail(cause);
        }
        let limit = self.launch.limit.saturating_add(GRACE / 2);
        let mut waits = self.waits.values();
        if let Some((op, since)) = waits.find(|(_, since)| since.elapsed() >= limit) {
            let cause = CommError::Timeout {
                op: op.as_str().into(),
                waited_s: since.elapsed().as_secs_f64(),
                missing: vec![0],
                elsewhere: Vec::new(),
            };
            self.fail(cause);
        }
    }

    /// Whether nobody is left, and rank 0 has heard everything.
    fn is_over(&self) -> bool {
        let parent = self.net.get(self.parent);
        let heard = parent.is_none_or(|conn| conn.is_flushed());
        let late = self
            .deadline
            .is_some_and(|deadline| deadline <= Instant::now());
        let failed = self.own_failure.get().is_some() && self.failure.is_some();
        late || heard && (self.served || failed) && self.tokens.is_empty()
    }

    fn ends_within(&mut self, time: Duration) {
        // A time limit may be longer than clocks go.
        let deadline = Instant::now().checked_add(time);
        self.deadline = self.deadline.into_iter().chain(deadline).min();
    }

    /// Does what a connection has to say.
    fn hear(&mut self, token: Token) {
        while let Some(conn) = self.net.get_mut(token) {
            if conn.peer == Peer::Stranger {
                match conn.greeting() {
                    Some(GREETING) => conn.peer = Peer::Lowp,
                    Some(_) => conn.end(),
                    // It may come in parts.
                    None if !conn.ended() => return,
                    None => {}
                }
            }
            let peer = conn.peer;
            let body = match conn.frame() {
                Ok(Some(body)) => body,
                Ok(None) => break,
                Err(error) => {
                    self.end(token, &error.to_string());
                    break;
                }
            };
            let valid = match peer {
                Peer::Parent => self.answer(&body),
                Peer::Lowp => open(&body)
                    .map(|(hello, _)| self.register(token, &hello))
                    .is_ok(),
                Peer::Rank(rank) => self.request(token, rank, &body),
                Peer::Stranger | Peer::Relay(_) | Peer::Away => true,
            };
            if !valid {
                self.end(token, "what no rank says");
            }
        }
        let Some(conn) = self.net.get(token).filter(|conn| conn.ended()) else {
            return;
        };
        let peer = conn.peer;
        self.net.remove(token);
        match peer {
            Peer::Parent => self.fail(CommError::Departed {
                op: "the connection to rank 0".into(),
                rank: 0,
                how: Departure::Lost,
            }),
            Peer::Rank(rank) => self.leave(rank, Departure::Lost),
            _ => {}
        }
    }

    /// Ends a connection that sent what cannot be understood.
    fn end(&mut self, token: Token, what: &str) {
        let Some(conn) = self.net.get_mut(token) else {
            return;
        };
        conn.end();
        match conn.peer {
            Peer::Rank(rank) => {
                let cause = nonsense(self.launch.rank, rank, what);
                self.up(&Request::Fail(cause), &[]);
            }
            Peer::Parent => self.fail(nonsense(self.launch.rank, 0, what)),
            _ => {}
        }
    }

    /// Takes a rank of the node, which rank 0 knows already, or says why not.
    fn register(&mut self, token: Token, hello: &Hello) {
        let Launch {
            run, build, world, ..
        } = &self.launch;
        // Rank 0 has found each rank fit that it sends to its relay.
        let refusal = if (run, build, world) != (&hello.run, &hello.build, &hello.world) {
            Some(Answer::NotHere)
        } else if self.tokens.contains_key(&hello.rank) {
            Some(Answer::Failed(CommError::Rendezvous {
                rank: hello.rank,
                world: hello.world,
                address: self.launch.address(),
                why: format!(
                    "two processes say they are rank {} to rank {}, the relay of their node; end the process of an earlier start, or give each run a name of its own with LOWP_RUN_ID",
                    hello.rank, self.launch.rank
                ),
            }))
        } else {
            None
        };
        if let Some(conn) = self.net.get_mut(token) {
            conn.peer = match &refusal {
                Some(_) => Peer::Away,
                None => Peer::Rank(hello.rank),
            };
        }
        if let Some(refusal) = refusal {
            return self.tell(token, &refusal);
        }
        self.served = true;
        self.tokens.insert(hello.rank, token);
        self.waits_in(hello.rank, "the rendezvous");
        self.up(&Request::Serves(hello.rank), &[]);
        if let Some(cause) = self.failure.clone() {
            self.tell(token, &Answer::Failed(cause));
        }
    }

    fn waits_in(&mut self, rank: usize, op: &str) {
        let since = Instant::now();
        self.waits.insert(rank, (op.to_owned(), since));
    }

    /// Takes on what `own` asks for; whether it can be.
    fn request(&mut self, token: Token, own: usize, body: &[u8]) -> bool {
        match open(body) {
            Ok((
                Request::Post {
                    group, ranks, call, ..
                },
                bytes,
            )) => {
                let (Some(held), [rank]) = (self.groups.get_mut(&group), &*ranks) else {
                    return false;
                };
                held.since.get_or_insert_with(Instant::now);
                let (op, payload) = (call.name.clone(), bytes.to_vec());
                held.posts.push((*rank, Post { call, payload }));
                if held.posts.len() + held.brought >= held.members {
                    self.bring(group);
                }
                self.waits_in(own, &op);
            }
            Ok((Request::Close { group, rank }, _)) => {
                let Some(held) = self.groups.get_mut(&group) else {
                    return false;
                };
                held.holders -= 1;
                if held.holders == 0 {
                    self.groups.remove(&group);
                }
                self.up(&Request::Close { group, rank }, &[]);
            }
            Ok((request @ Request::Fail(_), _)) => self.up(&request, &[]),
            Ok((Request::Leave(rank, how), _)) if rank == own => {
                self.net.remove(token);
                self.leave(rank, how);
            }
            Ok(_) | Err(_) => return false,
        }
        true
    }

    /// `rank` is gone. Rank 0 knows who waits for it by then.
    fn leave(&mut self, rank: usize, how: Departure) {
        self.bring_all(Duration::ZERO);
        self.tokens.remove(&rank);
        self.waits.remove(&rank);
        self.up(&Request::Leave(rank, how), &[]);
        if rank == self.launch.rank {
            self.ends_within(self.launch.limit);
        }
    }

    /// Brings what has waited for `time`.
    fn bring_all(&mut self, time: Duration) {
        let due = |(&group, held): (&usize, &Held)| {
            let since = held.since.filter(|since| since.elapsed() >= time);
            since.map(|_| group)
        };
        let due: Vec<usize> = self.groups.iter().filter_map(due).collect();
        due.into_iter().for_each(|group| self.bring(group));
    }

    /// Brings what ranks of the node posted in `group`: one message where they call the same.
    fn bring(&mut self, group: usize) {
        let Some(held) = self.groups.get_mut(&group) else {
            return;
        };
        let mut posts = std::mem::take(&mut held.posts);
        held.since = None;
        held.brought += posts.len();
        if held.brought >= held.members {
            held.brought = 0;
        }
        while let Some((_, first)) = posts.first() {
            let call = first.call.clone();
            let (same, others): (Vec<_>, _) =
                posts.into_iter().partition(|(_, post)| post.call == call);
            posts = others;
            let (ranks, same): (Vec<usize>, Vec<_>) = same.into_iter().unzip();
            let mut brought: Vec<&[u8]> = same.iter().map(|post| &*post.payload).collect();
            if brought.iter().all(|bytes| *bytes == brought[0]) {
                brought.truncate(1);
            }
            let request = Request::Post {
                group,
                ranks,
                call,
                lens: brought.iter().map(|bytes| bytes.len()).collect(),
            };
            self.up(&request, &brought);
        }
    }

    /// Tells rank 0.
    fn up(&mut self, request: &Request, parts: &[&[u8]]) {
        match frame(request, parts.iter().copied()) {
            Ok(bytes) => self.net.send(self.parent, [bytes.into()]),
            Err(error) => {
                let (rank, message) = (self.launch.rank, error.to_string());
                self.up(&Request::Fail(CommError::Failed { rank, message }), &[]);
            }
        }
    }

    fn tell(&mut self, token: Token, answer: &Answer) {
        if let Ok(bytes) = to_frame(answer) {
            self.net.send(token, [bytes.into()]);
        }
    }

    /// Hands out what rank 0 says; whether it can be.
    fn answer(&mut self, body: &[u8]) -> bool {
        match open(body) {
            Ok((Answer::Pass { ranks, opens }, rest)) => {
                if let Some(group) = opens {
                    let held = Held {
                        members: ranks.len(),
                        holders: ranks.len(),
                        ..Held::default()
                    };
                    self.groups.insert(group, held);
                }
                let bytes: Arc<[u8]> = rest.into();
                for rank in ranks {
                    self.waits.remove(&rank);
                    if let Some(&token) = self.tokens.get(&rank) {
                        self.net.send(token, [Arc::clone(&bytes)]);
                    }
                }
            }
            Ok((Answer::Failed(cause), _)) => self.fail(cause),
            Ok(_) | Err(_) => return false,
        }
        true
    }

    /// The world ended.
    fn fail(&mut self, cause: CommError) {
        if self.failure.is_some() {
            return;
        }
        self.failure = Some(cause.clone());
        let tokens: Vec<Token> = self.tokens.values().copied().collect();
        for token in tokens {
            self.tell(token, &Answer::Failed(cause.clone()));
        }
        self.ends_within(FAREWELL);
        if let CommError::Timeout { missing, .. } = cause {
            // They were told. Nobody waits for them again, to see them go.
            for rank in missing {
                self.tokens.remove(&rank);
            }
        }
    }
}
