//! Every rank but 0: a connection to rank 0, whose hub the calls meet in, or to the relay that brings them there.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::{Arc, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::connection::{Answered, Connection, GRACE};
use super::frame::{Answer, GREETING, Hello, Request, to_frame};
use super::relay::Serving;
use crate::CommError;
use crate::control::call::{Call, Kind};
use crate::control::outcome::request;
use crate::control::{Control, Launch, digests, from_bytes, sum_tag, to_bytes};
use crate::error::Departure;

/// Time between two tries to find rank 0.
const NAP: Duration = Duration::from_millis(20);

/// Connects to rank 0, and waits until all ranks have.
pub(super) fn connect(launch: &Launch) -> Result<Arc<dyn Control>, CommError> {
    let begun = Instant::now();
    let op = format!("rendezvous at {}", launch.address());
    // The first rank of a machine may become the relay of the others.
    let listener = (launch.local_rank == 0)
        .then(|| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)))
        .and_then(Result::ok);
    let own = listener.as_ref().and_then(|of| of.local_addr().ok());
    let port = own.map_or(0, |own| own.port());
    loop {
        let stream = reach(launch, begun)?;
        let Some(connection) = greet(launch, 0, port, stream)? else {
            if begun.elapsed() >= launch.limit {
                return Err(launch.error(format!(
                    "what listens there did not greet for {:.1} s; if another program has the port, choose another one with MASTER_PORT, or LOWP_MASTER_PORT, on every rank; if it is rank 0, see its own error, and whether it can hold a connection to each rank (ulimit -n)",
                    begun.elapsed().as_secs_f64()
                )));
            }
            thread::sleep(NAP);
            continue;
        };
        return match connection.answer(&op)? {
            (Answer::Ready, _) => Ok(member(Link {
                connection,
                relay: None,
            })),
            (Answer::Relay(relay, port), _) => {
                by_relay(launch, connection, listener, relay, port, &op)
            }
            // The rank 0 of an earlier start ends.
            (Answer::Later, _) if begun.elapsed() < launch.limit => {
                thread::sleep(10 * NAP);
                continue;
            }
            (Answer::Later, _) => Err(launch
                .error("rank 0 there is of an earlier start and did not end; end its process")),
            _ => Err(unasked(launch)),
        };
    }
}

/// The rank in the world, once rank 0 says that all are where they belong; `None` where a relay is not that of the rank.
fn ready(
    connection: Connection,
    relay: Option<Serving>,
    op: &str,
) -> Result<Option<Arc<dyn Control>>, CommError> {
    let link = Link { connection, relay };
    match link.connection.answer(op)? {
        (Answer::Ready, _) => Ok(Some(member(link))),
        (Answer::NotHere, _) => Ok(None),
        _ => Err(unasked(&link.connection.launch)),
    }
}

fn member(link: Link) -> Arc<dyn Control> {
    let Launch { rank, world, .. } = link.connection.launch;
    Arc::new(Member {
        link: Arc::new(link),
        group: 0,
        rank,
        members: (0..world).collect(),
    })
}

fn unasked(launch: &Launch) -> CommError {
    launch.error("rank 0 answers what was not asked; install one build everywhere")
}

/// Connects to the relay `to`, a rank and its port on this machine, which may be this rank itself, and waits until all ranks are where they belong.
fn by_relay(
    launch: &Launch,
    to_first: Connection,
    listener: Option<TcpListener>,
    to: usize,
    port: u16,
    op: &str,
) -> Result<Arc<dyn Control>, CommError> {
    let near = Launch {
        host: Ipv4Addr::LOCALHOST.to_string(),
        port,
        ..launch.clone()
    };
    let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port));
    if let Some(listener) = listener.filter(|_| to == launch.rank) {
        let relay = Serving::start(launch, listener, to_first)?;
        let cannot = |why: String| near.error(format!("it does not reach itself: {why}"));
        let stream = stream.map_err(|e| cannot(e.to_string()));
        let greeted = stream.and_then(|stream| greet(&near, to, 0, stream));
        let limit = GRACE.min(launch.limit).as_secs_f64();
        let silent = || cannot(format!("no greeting within {limit} s"));
        return match greeted.and_then(|connection| connection.ok_or_else(silent)) {
            Ok(connection) => ready(connection, Some(relay), op)?.ok_or_else(|| unasked(&near)),
            Err(cause) => Err(relay.fail(cause)),
        };
    }
    // A machine of the same address may be another one, and have a relay of another run.
    let connection = stream.ok().map(|stream| greet(&near, to, 0, stream));
    if let Some(Ok(Some(connection))) = connection
        && let Some(rank) = ready(connection, None, op)?
    {
        return Ok(rank);
    }
    to_first.send(&Request::Stays, &[])?;
    ready(to_first, None, op)?.ok_or_else(|| unasked(launch))
}

/// Exchanges greetings with the rank `to`, and says who connects and where others of the machine reach it. `None` where the other side said nothing:
/// it may be a rank 0 that ends, or one that is busy.
fn greet(
    launch: &Launch,
    to: usize,
    port: u16,
    mut stream: TcpStream,
) -> Result<Option<Connection>, CommError> {
    let fail = |e: io::Error| launch.error(format!("the connection to rank {to} failed: {e}"));
    let mut greeting = [0; GREETING.len()];
    stream.set_nodelay(true).map_err(fail)?;
    let patience = launch.limit.max(Duration::from_millis(1));
    stream
        .set_read_timeout(Some(GRACE.min(patience)))
        .map_err(fail)?;
    stream.set_write_timeout(Some(patience)).map_err(fail)?;
    let spoken = stream
        .write_all(&GREETING)
        .and_then(|()| stream.read_exact(&mut greeting));
    if spoken.is_err() && greeting == [0; GREETING.len()] {
        return Ok(None);
    }
    if spoken.is_err() || greeting[..4] != GREETING[..4] {
        return Err(launch.error(format!(
            "what listens there is not rank {to} of lowp; if another program has the port, choose another one with MASTER_PORT, or LOWP_MASTER_PORT, on every rank",
        )));
    }
    if greeting != GREETING {
        return Err(launch.error(format!(
            "rank {to} speaks protocol {} and this rank {}; install one build everywhere",
            greeting[5], GREETING[5]
        )));
    }
    let hello = Hello {
        rank: launch.rank,
        world: launch.world,
        build: launch.build.clone(),
        run: launch.run.clone(),
        restart: launch.restart,
        local_rank: launch.local_rank,
        port,
    };
    let hello = to_frame(&hello).and_then(|frame| stream.write_all(&frame));
    hello.map_err(fail)?;
    Connection::new(launch, to, stream).map(Some).map_err(fail)
}

/// Connects, as often as it takes until rank 0 listens.
fn reach(launch: &Launch, begun: Instant) -> Result<TcpStream, CommError> {
    loop {
        let left = launch.limit.saturating_sub(begun.elapsed()).max(NAP);
        let found = (launch.host.as_str(), launch.port).to_socket_addrs();
        let tried = found.and_then(|addresses| {
            let mut last = std::io::Error::other("the name has no address");
            for address in addresses {
                match TcpStream::connect_timeout(&address, left) {
                    Ok(stream) => return Ok(stream),
                    Err(error) => last = error,
                }
            }
            Err(last)
        });
        match tried {
            Ok(stream) if !to_itself(&stream) => return Ok(stream),
            Ok(_) => thread::sleep(NAP),
            Err(error) if begun.elapsed() >= launch.limit => {
                return Err(launch.error(format!(
                    "rank 0 was not there for {:.1} s ({error}); see its own error, whether MASTER_ADDR and MASTER_PORT are the same on every rank, or raise the time limit (`timeout`)",
                    begun.elapsed().as_secs_f64()
                )));
            }
            Err(_) => thread::sleep(NAP),
        }
    }
}

/// Whether a port that nobody listens on was given to the connection itself.
fn to_itself(stream: &TcpStream) -> bool {
    matches!((stream.local_addr(), stream.peer_addr()), (Ok(own), Ok(peer)) if own == peer)
}

/// Says goodbye when the last handle of the rank is dropped. A relay waits for those that it serves.
#[derive(Debug)]
struct Link {
    connection: Connection,
    relay: Option<Serving>,
}

impl Drop for Link {
    fn drop(&mut self) {
        let how = if thread::panicking() {
            Departure::Panicked
        } else {
            Departure::Dropped
        };
        self.connection.leave(how);
        if let Some(relay) = self.relay.take() {
            relay.join();
        }
    }
}

/// One rank of a group whose hub is rank 0's.
#[derive(Debug)]
struct Member {
    link: Arc<Link>,
    group: usize,
    rank: usize,
    members: Arc<[usize]>,
}

impl Member {
    /// One call: what rank 0 answers.
    fn call(&self, kind: Kind, tag: &str, bytes: &[u8]) -> Result<Answered, CommError> {
        let turn = self.link.connection.turn.lock();
        let _turn = turn.unwrap_or_else(PoisonError::into_inner);
        let request = Request::Post {
            group: self.group,
            ranks: vec![self.rank],
            call: Call::of_kind(kind, tag),
            lens: vec![bytes.len()],
        };
        self.link.connection.ask(tag, &request, bytes)
    }

    /// What all ranks brought, of an answer that says the lengths.
    fn parts(&self, lens: &[usize], bytes: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        let mut rest = bytes;
        let part = |&len: &usize| {
            let (part, others) = rest.split_at_checked(len)?;
            rest = others;
            Some(part.to_vec())
        };
        let parts: Option<Vec<_>> = lens.iter().map(part).collect();
        let parts = parts.filter(|parts| parts.len() == self.members.len());
        parts.ok_or_else(|| self.unasked("other parts"))
    }

    fn unasked(&self, answer: impl std::fmt::Debug) -> CommError {
        let message = format!("rank 0 answered {answer:?} to another question");
        let rank = self.members[self.rank];
        self.fail(CommError::Failed { rank, message })
    }
}

impl Drop for Member {
    /// Rank 0 forgets a group with its last member; the world goes with the connection.
    fn drop(&mut self) {
        let (group, rank) = (self.group, self.rank);
        if group != 0 && self.failure().is_none() {
            let close = Request::Close { group, rank };
            let _gone = self.link.connection.send(&close, &[]);
        }
    }
}

impl Control for Member {
    fn rank(&self) -> usize {
        self.rank
    }

    fn members(&self) -> &[usize] {
        &self.members
    }

    fn all_gather(&self, tag: &str, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>, CommError> {
        match self.call(Kind::AllGather, tag, &bytes)? {
            (Answer::All(lens), all) => self.parts(&lens, &all),
            (Answer::Same, each) => Ok(vec![each; self.members.len()]),
            (other, _) => Err(self.unasked(other)),
        }
    }

    fn broadcast(&self, tag: &str, bytes: Vec<u8>) -> Result<Vec<u8>, CommError> {
        let own = if self.rank == 0 { &*bytes } else { &[] };
        match self.call(Kind::Broadcast, tag, own)? {
            (Answer::Done, _) if self.rank == 0 => Ok(bytes),
            (Answer::Bytes, first) => Ok(first),
            (other, _) => Err(self.unasked(other)),
        }
    }

    fn gather(&self, tag: &str, bytes: Vec<u8>) -> Result<Option<Vec<Vec<u8>>>, CommError> {
        match self.call(Kind::Gather, tag, &bytes)? {
            (Answer::All(lens), all) if self.rank == 0 => self.parts(&lens, &all).map(Some),
            (Answer::Done, _) if self.rank > 0 => Ok(None),
            (other, _) => Err(self.unasked(other)),
        }
    }

    fn differing(
        &self,
        tag: &str,
        digest: u64,
        ranks: usize,
    ) -> Result<Option<Vec<u64>>, CommError> {
        match self.call(Kind::Equal { ranks }, tag, &digest.to_le_bytes())? {
            (Answer::Done, _) => Ok(None),
            (Answer::All(lens), all) => Ok(Some(digests(&self.parts(&lens, &all)?))),
            (other, _) => Err(self.unasked(other)),
        }
    }

    fn sum(&self, values: &mut [f64]) -> Result<(), CommError> {
        match self.call(Kind::Sum, &sum_tag(values), &to_bytes(values))? {
            (Answer::Bytes, sum) if sum.len() == 8 * values.len() => from_bytes(&sum, values),
            (other, _) => return Err(self.unasked(other)),
        }
        Ok(())
    }

    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Control>, CommError> {
        let (group, members) = match self.call(Kind::Split, "split", &request(color, key))? {
            (Answer::Group { group, members }, _) => (group, members),
            (other, _) => return Err(self.unasked(other)),
        };
        let members = members.map_or_else(|| Arc::clone(&self.members), Into::into);
        let own = self.members[self.rank];
        let rank = members.iter().position(|&rank| rank == own);
        let rank = rank.ok_or_else(|| self.unasked("a group of others"))?;
        Ok(Arc::new(Self {
            link: Arc::clone(&self.link),
            group,
            rank,
            members,
        }))
    }

    fn fail(&self, cause: CommError) -> CommError {
        self.link.connection.fail(cause, self.members[self.rank])
    }

    fn failure(&self) -> Option<CommError> {
        self.link.connection.failure()
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::super::frame::{LONG, read};
    use super::*;
    use crate::CommError;

    /// Rank 0 takes the first bytes of a call, says why it ends, and is gone.
    fn end_in_a_call(listener: &TcpListener) -> std::io::Result<()> {
        let (mut stream, _) = listener.accept()?;
        stream.read_exact(&mut [0; GREETING.len()])?;
        stream.write_all(&GREETING)?;
        let _who: (Hello, _) = read(&mut stream, LONG)?;
        stream.write_all(&to_frame(&Answer::Ready)?)?;
        stream.read_exact(&mut [0])?;
        let (rank, message) = (2, "planted".to_owned());
        stream.write_all(&to_frame(&Answer::Failed(CommError::Failed {
            rank,
            message,
        }))?)
    }

    /// A rank in the middle of a large send finds the connection closed before it hears the cause, one time in three.
    #[test]
    fn the_last_words_of_rank_0_are_the_cause() {
        for _ in 0..50 {
            let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
            let launch = Launch {
                rank: 1,
                world: 3,
                local_rank: 1,
                local_world: 3,
                host: "127.0.0.1".to_owned(),
                port: listener.local_addr().expect("its number").port(),
                limit: Duration::from_secs(20),
                build: "tests".to_owned(),
                run: String::new(),
                restart: 0,
            };
            let host = thread::spawn(move || end_in_a_call(&listener));
            let control = connect(&launch).expect("a world");
            let error = control.all_gather("it", vec![0; 8 << 20]);
            let text = error.expect_err("rank 0 is gone").to_string();
            assert!(text.contains("rank 2 failed: planted"), "{text}");
            let host = host.join().expect("no panic");
            assert!(host.is_ok(), "{host:?}");
        }
    }
}
