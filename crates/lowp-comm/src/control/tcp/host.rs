//! [`Host`]: the control of rank 0, where the others connect.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use mio::net::TcpListener;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::answers::Bytes;
use super::connection::FAREWELL;
use super::server::{Order, Server, Shared};
use crate::CommError;
use crate::control::hub::EVERY;
use crate::control::local::LocalControl;
use crate::control::{Control, Launch};
use crate::error::Departure;

/// Waits for all ranks to connect.
pub(super) fn listen(launch: &Launch) -> Result<Host, CommError> {
    descriptors(launch)?;
    let listener = bind(launch)?;
    let cannot = |error| launch.error(format!("cannot take connections: {error}"));
    let (server, shared) = Server::new(launch, listener).map_err(cannot)?;
    let builder = thread::Builder::new().name("lowp-control".to_owned());
    let thread = builder.spawn(move || server.run());
    let thread = thread.map_err(|e| launch.error(format!("no thread can be started: {e}")))?;
    let control = LocalControl::of_hub(&shared.hub, 0);
    let world = Arc::new(World {
        shared: Arc::clone(&shared),
        thread: Mutex::new(Some(thread)),
    });
    let host = Host { control, world };
    let begun = Instant::now();
    let mut joined = shared.joined();
    while !joined.ready {
        if let Some(cause) = shared.hub.failure() {
            // Ranks that start a little later hear of it, too, but for those that all have waited for already.
            let patience = FAREWELL.min(launch.limit.saturating_sub(begun.elapsed()));
            let late = shared
                .changed
                .wait_timeout_while(joined, patience, |joined| joined.missing > 0);
            drop(late);
            return Err(cause);
        }
        if begun.elapsed() >= launch.limit.saturating_add(FAREWELL) {
            // The server ends the wait before.
            drop(joined);
            let why = "its thread that takes connections is stuck";
            return Err(shared.hub.fail(launch.error(why)));
        }
        let woken = shared.changed.wait_timeout(joined, EVERY);
        joined = woken.unwrap_or_else(PoisonError::into_inner).0;
    }
    drop(joined);
    Ok(host)
}

/// Raises the number of files that the process may have open to what a connection to each rank needs, or says that it may not.
fn descriptors(launch: &Launch) -> Result<(), CommError> {
    /// Those that the process has open beside them.
    const OTHERS: u64 = 256;
    let needed = launch.world as u64 + OTHERS;
    let limit = getrlimit(Resource::Nofile);
    let most = limit.maximum.unwrap_or(u64::MAX);
    if limit.current.is_none_or(|now| now >= needed) {
        return Ok(());
    }
    if most >= needed {
        let current = Some(needed.max(limit.current.unwrap_or(0)));
        let raised = setrlimit(Resource::Nofile, Rlimit { current, ..limit });
        if raised.is_ok() {
            return Ok(());
        }
    }
    // The estimate of the others is generous.
    if most > launch.world as u64 {
        return Ok(());
    }
    Err(launch.error(format!(
        "rank 0 has a connection to each of {} ranks, and may have {most} files open; raise the limit (ulimit -n) to {needed}",
        launch.world
    )))
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
            Ok(listener) => {
                // All ranks may knock at once: who finds no place waits for a second. The system may have room for less.
                let all = i32::try_from(launch.world).unwrap_or(i32::MAX).max(128);
                let _as_before = rustix::net::listen(&listener, all);
                return Ok(listener);
            }
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

/// Ends the connections when the last handle of rank 0 is dropped.
#[derive(Debug)]
struct World {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Drop for World {
    fn drop(&mut self) {
        let Shared { launch, hub, .. } = &*self.shared;
        // Others may still meet without this rank, and what they were told must arrive.
        let how = if thread::panicking() {
            Departure::Panicked
        } else {
            Departure::Dropped
        };
        hub.depart(0, how);
        // Those that never came will not go either.
        let joined = self.shared.joined().ranks.clone();
        for (rank, _) in joined.iter().enumerate().filter(|(_, joined)| !**joined) {
            hub.depart(rank, Departure::Lost);
        }
        self.shared.wake();
        let failed = hub.failure().is_some();
        hub.wait_for_departures(if failed { FAREWELL } else { launch.limit });
        self.shared.order(Order::Stop);
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(thread) = { thread }.take() {
            drop(thread.join());
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
        self.world.shared.hub.groups()
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

    fn broadcast(&self, tag: &str, bytes: Vec<u8>) -> Result<Vec<u8>, CommError> {
        self.control.broadcast(tag, bytes)
    }

    fn gather(&self, tag: &str, bytes: Vec<u8>) -> Result<Option<Vec<Vec<u8>>>, CommError> {
        self.control.gather(tag, bytes)
    }

    fn differing(
        &self,
        tag: &str,
        digest: u64,
        ranks: usize,
    ) -> Result<Option<Vec<u64>>, CommError> {
        self.control.differing(tag, digest, ranks)
    }

    fn sum(&self, values: &mut [f64]) -> Result<(), CommError> {
        self.control.sum(values)
    }

    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Control>, CommError> {
        Ok(Arc::new(Self {
            control: self.control.split_local(color, key)?,
            world: Arc::clone(&self.world),
        }))
    }

    fn fail(&self, cause: CommError) -> CommError {
        let cause = self.control.fail(cause);
        self.world.shared.wake();
        cause
    }

    fn failure(&self) -> Option<CommError> {
        self.control.failure()
    }
}
