//! A failure of one rank at each of its calls, one call after the other.

use std::fmt::{Debug, Display};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use lowp_comm::{Communicator, LocalComm};

use super::Queued;
use crate::world::TIMEOUT;

/// One rank's part of a world of queued handles.
pub type Comm = Arc<dyn Communicator<Queued>>;

const RANKS: usize = 3;
/// Far below the time limit of a wait: nobody ran into one.
const AT_ONCE: Duration = Duration::from_secs(40);

/// Fails rank 1 at its first call of `work`, then at its second, and so on until `work` makes no
/// more calls. Every rank keeps its communicator to the end, and calls `work` again until it hears
/// of the failure: a rank whose part was done has returned by then. Returns the number of calls.
///
/// # Panics
/// If a rank does not hear of the failure, or hears of it late.
pub fn at_every_call<S, E: Debug + Display + Send>(
    build: impl Fn(&Queued, &Comm) -> Result<S, E> + Sync,
    work: impl Fn(&mut S, &Comm) -> Result<(), E> + Sync,
) -> u64 {
    for call in 1.. {
        let backends: Vec<Queued> = (0..RANKS).map(|_| Queued::default()).collect();
        let world = LocalComm::world_on(&backends, TIMEOUT).into_iter();
        let world: Vec<Comm> = world.map(|comm| Arc::new(comm) as _).collect();
        let started = Instant::now();
        let built = Barrier::new(RANKS);
        let rank = |rank: usize| -> Vec<Result<(), E>> {
            let (backend, comm) = (&backends[rank], &world[rank]);
            let mut state = build(backend, comm).expect("a sound build");
            built.wait();
            if rank == 1 {
                backend.fail_at(call);
            }
            let mut results = Vec::new();
            while results.len() < 2 && results.iter().all(Result::is_ok) {
                results.push(work(&mut state, comm));
            }
            results
        };
        let results: Vec<Vec<Result<(), E>>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..RANKS).map(|r| scope.spawn(move || rank(r))).collect();
            let joined = threads.into_iter().map(|thread| thread.join());
            joined.map(|r| r.expect("no panic")).collect()
        });
        assert!(
            started.elapsed() < AT_ONCE,
            "call {call}: {:?}",
            started.elapsed()
        );
        if results[1][0].is_ok() {
            return call - 1;
        }
        for (rank, results) in results.iter().enumerate() {
            let text = match results.last() {
                Some(Err(error)) => error.to_string(),
                other => panic!("call {call}, rank {rank}: {other:?}"),
            };
            assert!(text.contains("planted"), "call {call}, rank {rank}: {text}");
        }
    }
    0
}
