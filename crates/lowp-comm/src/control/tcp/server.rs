//! Rank 0: listens, and takes the other ranks' posts to its hub.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use super::frame::{Answer, GREETING, Hello, LONG, Request, SHORT, frame, read};
use crate::CommError;
use crate::control::hub::{Hub, Listener, Post, Round};
use crate::control::local::LocalControl;
use crate::control::{Control, Launch};
use crate::error::Departure;

/// What travels in rounds.
type Bytes = Arc<[u8]>;

/// How long somebody who connects may take to say who it is.
const HELLO: Duration = Duration::from_secs(5);

/// How long the news of a failure may take to reach the other ranks.
const FAREWELL: Duration = Duration::from_secs(5);

/// The connection to another rank.
#[derive(Debug)]
struct Peer {
    stream: Mutex<TcpStream>,
    /// The same connection, for a shorter time limit while the lock is held.
    last_words: TcpStream,
    from: SocketAddr,
}

/// Rank 0's side of all connections.
#[derive(Debug)]
struct Server {
    launch: Launch,
    hub: Arc<Hub<Bytes>>,
    /// By rank; that of rank 0 stays empty.
    peers: Vec<OnceLock<Peer>>,
    joined: Mutex<usize>,
    changed: Condvar,
}

/// Waits for all ranks to connect.
pub(super) fn listen(launch: &Launch) -> Result<Host, CommError> {
    let listener = bind(launch)?;
    let hub = Arc::new(Hub::new(launch.world, launch.limit));
    let server = Arc::new(Server {
        launch: launch.clone(),
        hub: Arc::clone(&hub),
        peers: (0..launch.world).map(|_| OnceLock::new()).collect(),
        joined: Mutex::new(0),
        changed: Condvar::new(),
    });
    hub.listen(Arc::new(Deliverer(Arc::downgrade(&server))));
    let control = LocalControl::of_hub(&hub, 0);
    let watcher = Arc::clone(&server);
    spawn(launch, "lowp-watch", move || watcher.watch())?;
    let world = Arc::new(World(Arc::clone(&server)));
    let host = Host { control, world };
    let begun = Instant::now();
    let done = listener
        .set_nonblocking(true)
        .map_err(|e| server.cannot_listen(&e))
        .and_then(|()| server.rendezvous(&listener, begun));
    match done {
        Ok(()) => Ok(host),
        Err(error) => {
            let cause = host.fail(error);
            // Ranks that start a little later hear of it, too, but for those that all have waited for already.
            let patience = FAREWELL.min(launch.limit.saturating_sub(begun.elapsed()));
            let failed = Instant::now();
            while failed.elapsed() < patience
                && !server.all_joined()
                && server.accept(&listener).is_ok()
            {}
            Err(cause)
        }
    }
}

fn spawn(
    launch: &Launch,
    name: &str,
    work: impl FnOnce() + Send + 'static,
) -> Result<(), CommError> {
    // What they hold is on the heap.
    const STACK: usize = 256 << 10;
    let builder = thread::Builder::new().name(name.to_owned());
    let spawned = builder.stack_size(STACK).spawn(work).map(drop);
    spawned.map_err(|e| launch.error(format!("no thread can be started: {e}")))
}

/// Listens on the port of `launch`.
fn bind(launch: &Launch) -> Result<TcpListener, CommError> {
    let host = launch.host.as_str();
    let local = host == "localhost" || host.parse().is_ok_and(|ip: IpAddr| ip.is_loopback());
    let tried: Vec<SocketAddr> = if local {
        let found = (host, launch.port).to_socket_addrs();
        found.map(Iterator::collect).unwrap_or_default()
    } else {
        // The name may mean another address on other machines.
        let any: [IpAddr; 2] = [[0u16; 8].into(), [0u8; 4].into()];
        any.map(|ip| SocketAddr::new(ip, launch.port)).into()
    };
    let mut why = format!("{host} is no address");
    for address in tried {
        match TcpListener::bind(address) {
            Ok(listener) => return Ok(listener),
            Err(error) if error.kind() == ErrorKind::AddrInUse => {
                why = format!(
                    "port {} is in use by another process; choose another one with MASTER_PORT, or LOWP_MASTER_PORT, on every rank",
                    launch.port
                );
            }
            Err(error) => why = format!("cannot listen: {error}"),
        }
    }
    Err(launch.error(why))
}

impl Server {
    fn joined(&self) -> MutexGuard<'_, usize> {
        self.joined.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes connections until every rank has one, then tells all.
    fn rendezvous(
        self: &Arc<Self>,
        listener: &TcpListener,
        begun: Instant,
    ) -> Result<(), CommError> {
        while !self.all_joined() {
            if let Some(cause) = self.hub.failure() {
                return Err(cause);
            }
            if begun.elapsed() >= self.launch.limit {
                return Err(self.missing());
            }
            self.accept(listener)?;
        }
        for rank in 1..self.launch.world {
            self.tell(rank, &Answer::Ready);
        }
        Ok(())
    }

    fn all_joined(&self) -> bool {
        *self.joined() + 1 == self.launch.world
    }

    /// Takes the next connection, if one is there, or waits a little.
    fn accept(self: &Arc<Self>, listener: &TcpListener) -> Result<(), CommError> {
        const NAP: Duration = Duration::from_millis(2);
        match listener.accept() {
            Ok((stream, from)) => {
                let server = Arc::clone(self);
                spawn(&self.launch, "lowp-rank", move || {
                    server.serve(stream, from)
                })
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                let joined = self.joined();
                drop(self.changed.wait_timeout(joined, NAP));
                Ok(())
            }
            // A connection that ended before it was taken.
            Err(error) if error.kind() == ErrorKind::ConnectionAborted => Ok(()),
            // Strangers that say nothing give their connections back soon.
            Err(error) if is_shortage(&error) => {
                thread::sleep(10 * NAP);
                Ok(())
            }
            Err(error) => Err(self.cannot_listen(&error)),
        }
    }

    fn cannot_listen(&self, error: &io::Error) -> CommError {
        self.launch
            .error(format!("cannot take connections: {error}"))
    }

    fn missing(&self) -> CommError {
        let ranks = 1..self.launch.world;
        let missing: Vec<usize> = ranks.filter(|&r| self.peers[r].get().is_none()).collect();
        CommError::Timeout {
            op: format!("rendezvous at {}", self.launch.address()).into(),
            waited_s: self.launch.limit.as_secs_f64(),
            missing,
            elsewhere: Vec::new(),
        }
    }

    /// One connection, from its greeting to its end.
    fn serve(self: Arc<Self>, mut stream: TcpStream, from: SocketAddr) {
        // Whoever does not speak the protocol is no rank and does no harm.
        let hello = match greet(&mut stream) {
            Ok(Ok(hello)) => hello,
            Ok(Err(other)) if other[..5] == GREETING[..5] => {
                let [theirs, own] = [other, GREETING].map(|greeting| greeting[5]);
                self.hub.fail(self.launch.error(format!(
                    "a rank at {from} speaks protocol {theirs} and rank 0 {own}; install one build everywhere"
                )));
                return;
            }
            _ => return,
        };
        let Some(rank) = self.register(&stream, from, &hello) else {
            return;
        };
        let how = self.take_requests(rank, stream);
        self.hub.depart(rank, how);
        if how == Departure::Lost {
            // Whoever waits for its data on a device waits for nobody here.
            let op = "the world".into();
            self.hub.fail(CommError::Departed { op, rank, how });
        }
    }

    /// Gives the connection its rank. What cannot be a rank of this world ends it.
    fn register(&self, stream: &TcpStream, from: SocketAddr, hello: &Hello) -> Option<usize> {
        let Launch { world, build, .. } = &self.launch;
        let rank = hello.rank;
        let why = if hello.world != *world {
            Some(format!(
                "it was started for a world of {} ranks, and rank 0 for {world}; start all with one number",
                hello.world
            ))
        } else if rank == 0 || rank >= *world {
            Some(format!(
                "rank {rank} connects, and ranks 1 to {} are expected",
                world - 1
            ))
        } else if hello.build != *build {
            Some(format!(
                "it runs build {}, and rank 0 {build}; install one build everywhere",
                hello.build
            ))
        } else {
            None
        };
        let why = why.or_else(|| {
            let copies = stream.try_clone().and_then(|copy| {
                copy.set_write_timeout(Some(self.launch.limit.max(Duration::from_millis(1))))?;
                copy.set_nodelay(true)?;
                Ok((Mutex::new(copy), stream.try_clone()?))
            });
            let (stream, last_words) = match copies {
                Ok(copies) => copies,
                Err(error) => return Some(format!("its connection failed: {error}")),
            };
            let peer = Peer {
                stream,
                last_words,
                from,
            };
            self.peers[rank].set(peer).err().map(|peer| {
                let first = self.peers[rank].get().map(|known| known.from.to_string());
                format!(
                    "two processes say they are rank {rank}, at {} and {}",
                    first.unwrap_or_default(),
                    peer.from
                )
            })
        });
        let Some(why) = why else {
            *self.joined() += 1;
            self.changed.notify_all();
            // The watcher tells those that were there.
            if let Some(cause) = self.hub.failure() {
                self.tell(rank, &Answer::Failed(cause.told(0)));
            }
            return Some(rank);
        };
        let error = CommError::Rendezvous {
            rank,
            world: hello.world,
            address: self.launch.address(),
            why,
        };
        let answer = Answer::Failed(error.clone().told(0));
        let _gone = super::frame::write(stream, &answer);
        self.hub.fail(error);
        None
    }

    /// Takes what `rank` sends until its connection ends, and says how that was.
    fn take_requests(&self, rank: usize, mut stream: TcpStream) -> Departure {
        loop {
            match read(&mut stream, LONG) {
                Ok(Request::Post {
                    group,
                    rank: member,
                    call,
                    bytes,
                }) => {
                    if self.hub.members(group).get(member) != Some(&rank) {
                        return Departure::Lost;
                    }
                    let payload = bytes.into();
                    let posted = self.hub.post(group, member, Post { call, payload });
                    // Everybody hears of failures from the watcher, but for what came after.
                    if let Err(cause) = posted {
                        self.tell(rank, &Answer::Failed(cause.told(0)));
                    }
                }
                Ok(Request::Open {
                    parent,
                    round,
                    color,
                    members,
                }) => {
                    let world = self.launch.world;
                    if !members.contains(&rank) || members.iter().any(|&rank| rank >= world) {
                        return Departure::Lost;
                    }
                    let group = self.hub.open(parent, round, color, &members);
                    self.tell(rank, &Answer::Opened(group));
                }
                Ok(Request::Close { group }) => {
                    if !self.hub.members(group).contains(&rank) {
                        return Departure::Lost;
                    }
                    self.hub.close(group);
                }
                Ok(Request::Fail(cause)) => {
                    self.hub.fail(cause);
                }
                Ok(Request::Leave(how)) => return how,
                Err(_) => return Departure::Lost,
            }
        }
    }

    fn tell(&self, rank: usize, answer: &Answer) {
        if let Ok(bytes) = frame(answer) {
            self.send(rank, &bytes);
        }
    }

    /// A rank that cannot be told is found when its connection is read.
    fn send(&self, rank: usize, bytes: &[u8]) {
        if let Some(peer) = self.peers[rank].get() {
            let mut stream = peer.stream.lock().unwrap_or_else(PoisonError::into_inner);
            if stream.write_all(bytes).is_err() {
                let _closed = stream.shutdown(Shutdown::Both);
            }
        }
    }

    /// Looks after ranks that wait, and tells all how the world ended.
    fn watch(&self) {
        if let Some(cause) = self.hub.watch() {
            let answer = Answer::Failed(cause.clone().told(0));
            for rank in 1..self.launch.world {
                // One that does not read must not keep the news from the others.
                if let Some(peer) = self.peers[rank].get() {
                    let _as_before = peer.last_words.set_write_timeout(Some(FAREWELL));
                }
                self.tell(rank, &answer);
            }
            if let CommError::Timeout { missing, .. } = cause {
                // They were told. Nobody waits for them again, to see them go.
                for rank in missing {
                    self.hub.depart(rank, Departure::Lost);
                }
            }
        }
    }
}

/// Whether the system has no room for another connection at the moment.
fn is_shortage(error: &io::Error) -> bool {
    const ENOMEM: i32 = 12;
    const ENFILE: i32 = 23;
    const EMFILE: i32 = 24;
    const ENOBUFS: i32 = 105;
    let code = error.raw_os_error();
    code.is_some_and(|code| [ENOMEM, ENFILE, EMFILE, ENOBUFS].contains(&code))
}

/// Reads who connects, or the greeting of something else.
fn greet(stream: &mut TcpStream) -> io::Result<Result<Hello, [u8; GREETING.len()]>> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(HELLO))?;
    // Also what another version needs to tell that this is one of lowp.
    stream.write_all(&GREETING)?;
    let mut greeting = GREETING;
    stream.read_exact(&mut greeting)?;
    if greeting != GREETING {
        return Ok(Err(greeting));
    }
    let hello = read(&mut *stream, SHORT)?;
    stream.set_read_timeout(None)?;
    Ok(Ok(hello))
}

/// Sends rounds to those of their ranks that are processes.
#[derive(Debug)]
struct Deliverer(Weak<Server>);

impl Listener<Bytes> for Deliverer {
    fn met(&self, members: &[usize], round: &Round<Bytes>) {
        let Some(server) = self.0.upgrade() else {
            return;
        };
        let bytes = round.iter().map(|post| post.payload.to_vec()).collect();
        match frame(&Answer::Round(bytes)) {
            Ok(bytes) => {
                for &rank in members.iter().filter(|&&rank| rank != 0) {
                    server.send(rank, &bytes);
                }
            }
            Err(error) => {
                let message = error.to_string();
                server.hub.fail(CommError::Failed { rank: 0, message });
            }
        }
    }
}

/// Ends the connections when the last handle of rank 0 is dropped.
#[derive(Debug)]
struct World(Arc<Server>);

impl Drop for World {
    fn drop(&mut self) {
        let Server { launch, hub, .. } = &*self.0;
        // Others may still meet without this rank, and what they were told must arrive.
        let how = if thread::panicking() {
            Departure::Panicked
        } else {
            Departure::Dropped
        };
        hub.depart(0, how);
        // Those that never came will not go either.
        for (rank, peer) in self.0.peers.iter().enumerate() {
            if peer.get().is_none() {
                hub.depart(rank, Departure::Lost);
            }
        }
        let failed = hub.failure().is_some();
        hub.wait_for_departures(if failed { FAREWELL } else { launch.limit });
        for peer in self.0.peers.iter().filter_map(OnceLock::get) {
            let stream = peer.stream.lock().unwrap_or_else(PoisonError::into_inner);
            let _closed = stream.shutdown(Shutdown::Both);
        }
    }
}

/// The control of rank 0: its hub, and what keeps the connections.
#[derive(Debug)]
pub(super) struct Host {
    control: LocalControl<Bytes>,
    world: Arc<World>,
}

#[cfg(test)]
impl Host {
    /// Groups of ranks that are there.
    pub(super) fn groups(&self) -> usize {
        self.world.0.hub.groups()
    }
}

impl Control for Host {
    fn rank(&self) -> usize {
        self.control.rank()
    }

    fn members(&self) -> &[usize] {
        self.control.members()
    }

    fn all_gather(&self, tag: &str, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>, CommError> {
        self.control.all_gather(tag, bytes)
    }

    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Control>, CommError> {
        Ok(Arc::new(Self {
            control: self.control.split_local(color, key)?,
            world: Arc::clone(&self.world),
        }))
    }

    fn fail(&self, cause: CommError) -> CommError {
        self.control.fail(cause)
    }

    fn failure(&self) -> Option<CommError> {
        self.control.failure()
    }
}
