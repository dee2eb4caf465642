//! Ranks of tests, and their data. The tests of lowp-shard include this file, too: `Failure` of the module around it is the error of a rank.
#![allow(dead_code, reason = "every test program uses its own part")]

use std::net::TcpListener;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use lowp_comm::{
    Communicator, Control, HostComm, Launch, LocalComm, RanksFailed, join, run_comms, run_ranks,
};
use lowp_kernels::Cpu;

use super::Failure;

/// Long enough for a loaded machine; no test waits this long unless something hangs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) type Comm = Arc<dyn Communicator<Cpu>>;

/// What moves data between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Engine {
    /// Threads that share buffers.
    Threads,
    /// Processes of one machine, here as threads that share nothing but a port.
    Tcp,
    /// Processes of machines with so many ranks each, and again, until all have a place.
    Nodes([usize; 3]),
}

impl Engine {
    pub(crate) const ALL: [Engine; 3] = [Engine::Threads, Engine::Tcp, Engine::Nodes([1, 2, 3])];

    /// A world of `n` ranks whose waits end after `limit`.
    pub(crate) fn world(self, n: usize, limit: Duration) -> Vec<Comm> {
        match self {
            Engine::Threads => {
                let world = LocalComm::world(&Cpu, n, limit);
                world.into_iter().map(Into::into).collect()
            }
            Engine::Tcp => hosts(launches(n, limit)),
            Engine::Nodes(sizes) => hosts(launches_on(sizes, n, limit)),
        }
    }

    /// Runs `f` as every rank.
    #[allow(clippy::result_large_err, reason = "what the library returns")]
    pub(crate) fn run<T: Send>(
        self,
        world: usize,
        f: impl Fn(usize, Comm) -> Result<T, Failure> + Sync,
    ) -> Result<Vec<T>, RanksFailed<T, Failure>> {
        run_comms(self.world(world, PATIENCE), f)
    }
}

/// A port that nobody has: of this process's own, below those that the system gives to connections.
pub(crate) fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let tried = std::iter::repeat_with(|| {
        let own = std::process::id().wrapping_mul(41);
        let next = NEXT.fetch_add(1, Ordering::Relaxed);
        10_000 + (own.wrapping_add(next) % 20_000) as u16
    });
    let mut free = tried.filter(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok());
    free.next().expect("a free port")
}

/// The launches of a world of `n` processes of this machine, at a port that nobody has.
pub(crate) fn launches(n: usize, limit: Duration) -> Vec<Launch> {
    let port = free_port();
    let launch = |rank| Launch {
        rank,
        world: n,
        local_rank: rank,
        local_world: n,
        host: "127.0.0.1".to_owned(),
        port,
        limit,
        build: "tests".to_owned(),
        run: String::new(),
        restart: 0,
    };
    (0..n).map(launch).collect()
}

/// The same of processes of machines with so many ranks each, and again.
pub(crate) fn launches_on(sizes: [usize; 3], n: usize, limit: Duration) -> Vec<Launch> {
    let seats = sizes.into_iter().cycle().flat_map(|size| 0..size);
    let launches = launches(n, limit).into_iter().zip(seats);
    let on = |(launch, local_rank)| Launch {
        local_rank,
        ..launch
    };
    launches.map(on).collect()
}

fn hosts(launches: Vec<Launch>) -> Vec<Comm> {
    let host = |control| HostComm::new(control, &Cpu).into();
    join_all(launches).into_iter().map(host).collect()
}

/// A world of ranks that speak TCP.
pub(crate) fn joined(n: usize, limit: Duration) -> Vec<Arc<dyn Control>> {
    join_all(launches(n, limit))
}

fn join_all(launches: Vec<Launch>) -> Vec<Arc<dyn Control>> {
    thread::scope(|scope| {
        let join = |launch: Launch| scope.spawn(move || join(&launch).expect("a world"));
        let ranks: Vec<_> = launches.into_iter().map(join).collect();
        let ranks = ranks.into_iter();
        ranks.map(|rank| rank.join().expect("no panic")).collect()
    })
}

/// Runs `f` as every rank and expects success.
pub(crate) fn ranks<T: Send>(
    world: usize,
    f: impl Fn(usize, Comm) -> Result<T, Failure> + Sync,
) -> Vec<T> {
    match run_ranks(&Cpu, world, PATIENCE, f) {
        Ok(results) => results,
        Err(failed) => panic!("{failed}"),
    }
}

/// Runs `f` as every rank, on every engine, and expects the same results.
pub(crate) fn ranks_everywhere<T: Send + PartialEq + std::fmt::Debug>(
    world: usize,
    f: impl Fn(usize, Comm) -> Result<T, Failure> + Sync,
) -> Vec<T> {
    let [threads, others @ ..] = Engine::ALL.map(|engine| on_engine(engine, world, &f));
    others.iter().for_each(|other| assert_eq!(threads, *other));
    threads
}

/// Runs `f` as every rank of `engine` and expects success.
pub(crate) fn on_engine<T: Send>(
    engine: Engine,
    world: usize,
    f: impl Fn(usize, Comm) -> Result<T, Failure> + Sync,
) -> Vec<T> {
    match engine.run(world, f) {
        Ok(results) => results,
        Err(failed) => panic!("{engine:?}: {failed}"),
    }
}

/// Runs `f` as every rank of `engine` and expects a failure.
pub(crate) fn failing_on<T: Send>(
    engine: Engine,
    world: usize,
    f: impl Fn(usize, Comm) -> Result<T, Failure> + Sync,
) -> RanksFailed<T, Failure> {
    match engine.run(world, f) {
        Ok(_) => panic!("{engine:?}: every rank succeeded"),
        Err(failed) => failed,
    }
}

/// Runs `f` as every rank and expects a failure.
pub(crate) fn failing<T: Send>(
    world: usize,
    f: impl Fn(usize, Comm) -> Result<T, Failure> + Sync,
) -> RanksFailed<T, Failure> {
    failing_on(Engine::Threads, world, f)
}

/// A deterministic stream of bytes (splitmix64).
pub(crate) fn bytes(seed: u64, n: usize) -> Vec<u8> {
    (0..n as u64).map(|i| mix(seed, i) as u8).collect()
}

/// Deterministic values in -2..2 with full significands.
pub(crate) fn values(seed: u64, n: usize) -> Vec<f32> {
    let unit = |i: u64| (mix(seed, i) >> 40) as f32 / (1u64 << 24) as f32;
    (0..n as u64).map(|i| unit(i) * 4.0 - 2.0).collect()
}

fn mix(seed: u64, i: u64) -> u64 {
    let mut z = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(i);
    z = (z ^ (z >> 30))
        .wrapping_add(0x9E37_79B9_7F4A_7C15)
        .wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Ranges of `lens`, one after another.
pub(crate) fn tiling(lens: &[usize]) -> Vec<Range<usize>> {
    let mut end = 0;
    let next = |&len: &usize| {
        end += len;
        end - len..end
    };
    lens.iter().map(next).collect()
}
