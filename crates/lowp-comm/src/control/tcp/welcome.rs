//! Who may be a rank of a world: the identity of those that connect.
//!
//! Ranks of this run that cannot work together fail the world. A process of another run, or one that comes when all ranks are there, gets an error,
//! is disconnected, and does no harm. A rank of the run that was started later than one of a world that is complete, or has failed, ends that world, and
//! comes again when the rank 0 of its own start listens.

use mio::Token;

use super::conn::{Conn, Peer, Seat};
use super::frame::{Answer, GREETING, Hello};
use super::server::Server;
use crate::CommError;
use crate::control::Launch;
use crate::error::Departure;

impl Server {
    /// Something that speaks another version of the protocol, or none at all.
    pub(super) fn another_protocol(&mut self, token: Token, other: [u8; GREETING.len()]) {
        // Whoever does not speak the protocol is no rank and does no harm.
        if other[..5] != GREETING[..5] || self.moving.is_some() {
            return;
        }
        let from = self.net.get(token).map(|conn| conn.from.to_string());
        let [theirs, own] = [other, GREETING].map(|greeting| greeting[5]);
        self.shared.hub.fail(self.shared.launch.error(format!(
            "a rank at {} speaks protocol {theirs} and rank 0 {own}; install one build everywhere",
            from.unwrap_or_default()
        )));
        self.heard();
    }

    /// One more has joined, or knows why not.
    fn heard(&self) {
        let mut joined = self.shared.joined();
        joined.missing = joined.missing.saturating_sub(1);
        self.shared.changed.notify_all();
    }

    /// Gives the connection its rank, or says why it has none.
    pub(super) fn register(&mut self, token: Token, hello: &Hello) {
        let launch = &self.shared.launch;
        let rank = hello.rank;
        let known = self.tokens.get(rank).copied().flatten();
        let of = |token: Token| self.net.get(token);
        let others = known.and_then(of).zip(of(token));
        let ready = self.moving.is_some();
        let known_restart = others.map_or(launch.restart, |(known, _)| known.restart);
        let over = ready || self.shared.hub.failure().is_some();
        if over && launch.run == hello.run && hello.restart > known_restart {
            return self.come_later(token, rank);
        }
        if let Some(why) = another_run(launch, hello).or_else(|| {
            if ready {
                return Some(
                    "all ranks of the run are there already; a process of an earlier start should end"
                        .to_owned(),
                );
            }
            others.and_then(|(known, _)| earlier(hello.restart, known.restart))
        }) {
            self.send_away(token, hello, why);
            return;
        }
        let replaced = others.is_some_and(|(known, _)| known.restart < hello.restart);
        let same = others.filter(|_| !replaced);
        if let Some(why) = unfit(launch, hello).filter(|_| hello.restart < launch.restart) {
            self.send_away(token, hello, why);
            return;
        }
        if let Some(why) = unfit(launch, hello).or_else(|| same.map(two)) {
            let error = self.send_away(token, hello, why);
            self.shared.hub.fail(error);
            self.heard();
            return;
        }
        if let (true, Some(known), Some((conn, _))) = (replaced, known, others) {
            let why = earlier(conn.restart, hello.restart).unwrap_or_default();
            self.send_away(known, hello, why);
        }
        if let Some(conn) = self.net.get_mut(token) {
            conn.peer = Peer::Rank(rank);
            conn.restart = hello.restart;
            conn.seat = Some(Seat {
                machine: conn.from.ip().to_canonical(),
                local_rank: hello.local_rank,
                port: hello.port,
            });
        }
        self.tokens[rank] = Some(token);
        let first = !std::mem::replace(&mut self.shared.joined().ranks[rank], true);
        if first {
            self.heard();
        }
        // Those that were there have been told.
        if let Some(cause) = self.failed() {
            self.tell(token, &Answer::Failed(cause.told(0)));
        }
    }

    /// A rank of a later start than that of this world: its place in this one is lost, and it knocks again.
    fn come_later(&mut self, token: Token, rank: usize) {
        if let Some(conn) = self.net.get_mut(token) {
            conn.peer = Peer::Away;
        }
        self.tell(token, &Answer::Later);
        let (op, how) = ("the world".into(), Departure::Lost);
        let cause = CommError::Departed { op, rank, how };
        self.shared.hub.fail(cause);
    }

    /// Tells a connection why it is no rank of this world. Returns what it was told.
    fn send_away(&mut self, token: Token, hello: &Hello, why: String) -> CommError {
        let error = CommError::Rendezvous {
            rank: hello.rank,
            world: hello.world,
            address: self.shared.launch.address(),
            why,
        };
        if let Some(conn) = self.net.get_mut(token) {
            conn.peer = Peer::Away;
        }
        self.tell(token, &Answer::Failed(error.clone().told(0)));
        error
    }
}

/// Why a rank of another run is none of this one.
fn another_run(launch: &Launch, hello: &Hello) -> Option<String> {
    let of = |run: &str| match run {
        "" => "no run that has a name".to_owned(),
        run => format!("run '{run}'"),
    };
    (launch.run != hello.run).then(|| {
        format!(
            "rank 0 there is of {}, and this rank of {}; give each run a port of its own with MASTER_PORT, or LOWP_MASTER_PORT, or end the run before",
            of(&launch.run),
            of(&hello.run)
        )
    })
}

/// Why a rank that was started `restart` times is none, where one of `newer` restarts is.
fn earlier(restart: u64, newer: u64) -> Option<String> {
    (restart < newer).then(|| {
        format!(
            "this rank is of restart {restart}, and one of restart {newer} has its place; a process of an earlier start should end"
        )
    })
}

/// Why a rank of this run cannot work with the others.
fn unfit(launch: &Launch, hello: &Hello) -> Option<String> {
    let Launch { world, build, .. } = launch;
    if hello.world != *world {
        Some(format!(
            "it was started for a world of {} ranks, and rank 0 for {world}; start all with one number",
            hello.world
        ))
    } else if hello.rank == 0 || hello.rank >= *world {
        Some(format!(
            "rank {} connects, and ranks 1 to {} are expected",
            hello.rank,
            world - 1
        ))
    } else if hello.build != *build {
        Some(format!(
            "it runs build {}, and rank 0 {build}; install one build everywhere",
            hello.build
        ))
    } else {
        None
    }
}

fn two((known, conn): (&Conn, &Conn)) -> String {
    let rank = match known.peer {
        Peer::Rank(rank) => rank,
        _ => 0,
    };
    format!(
        "two processes say they are rank {rank}, at {} and {}",
        known.from, conn.from
    )
}
