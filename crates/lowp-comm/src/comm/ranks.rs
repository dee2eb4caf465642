//! [`run_ranks`]: runs a function as every rank of a world of threads.

use std::any::Any;
use std::fmt;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, Scope, ScopedJoinHandle};
use std::time::Duration;

use lowp_kernels::Backend;

use super::{Communicator, LocalComm};
use crate::CommError;

/// What each rank returned, where at least one failed.
#[derive(Debug)]
pub struct RanksFailed<T, E> {
    /// The rank that failed first: the root cause.
    pub rank: usize,
    /// What that rank returned.
    pub cause: E,
    /// What the other ranks returned, with their numbers; failures first, in the order in which
    /// they happened.
    pub others: Vec<(usize, Result<T, E>)>,
}

impl<T, E: fmt::Display> fmt::Display for RanksFailed<T, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}: {}", self.rank, self.cause)
    }
}

impl<T: fmt::Debug, E: std::error::Error + 'static> std::error::Error for RanksFailed<T, E> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.cause)
    }
}

/// Runs `f(rank, communicator)` on `n` threads and returns their results in rank order. All ranks
/// share `backend`: they must work through that handle or clones of it.
///
/// A rank that returns an error or panics wakes all others, which then fail with its message.
///
/// # Errors
/// The failures of all ranks, the root cause first.
pub fn run_ranks<B, T, E, F>(
    backend: &B,
    n: usize,
    timeout: Duration,
    f: F,
) -> Result<Vec<T>, RanksFailed<T, E>>
where
    B: Backend,
    T: Send,
    E: From<CommError> + fmt::Display + Send,
    F: Fn(usize, Arc<dyn Communicator<B>>) -> Result<T, E> + Sync,
{
    run_ranks_on(&vec![backend.clone(); n], timeout, f)
}

/// The same with a handle for each rank ([`LocalComm::world_on`]): rank `r` must do its work through
/// `backends[r]`.
///
/// # Errors
/// As [`run_ranks`].
pub fn run_ranks_on<B, T, E, F>(
    backends: &[B],
    timeout: Duration,
    f: F,
) -> Result<Vec<T>, RanksFailed<T, E>>
where
    B: Backend,
    T: Send,
    E: From<CommError> + fmt::Display + Send,
    F: Fn(usize, Arc<dyn Communicator<B>>) -> Result<T, E> + Sync,
{
    run_comms(LocalComm::world_on(backends, timeout), f)
}

/// The same with the communicators of any world of this process, in rank order.
///
/// # Errors
/// As [`run_ranks`].
pub fn run_comms<B, T, E, F>(
    world: Vec<impl Into<Arc<dyn Communicator<B>>>>,
    f: F,
) -> Result<Vec<T>, RanksFailed<T, E>>
where
    B: Backend,
    T: Send,
    E: From<CommError> + fmt::Display + Send,
    F: Fn(usize, Arc<dyn Communicator<B>>) -> Result<T, E> + Sync,
{
    let world: Vec<Arc<dyn Communicator<B>>> = world.into_iter().map(Into::into).collect();
    let results: Vec<Mutex<Option<T>>> = world.iter().map(|_| Mutex::default()).collect();
    let failures: Mutex<Vec<(usize, E)>> = Mutex::default();
    let run = |rank: usize, comm| {
        let (error, message) = match catch_unwind(AssertUnwindSafe(|| f(rank, comm))) {
            Ok(Ok(value)) => {
                *lock(&results[rank]) = Some(value);
                return None;
            }
            Ok(Err(error)) => {
                let message = error.to_string();
                (error, message)
            }
            Err(panic) => {
                let message = format!("panicked: {}", panic_message(&*panic));
                let text = message.clone();
                (CommError::Failed { rank, message }.into(), text)
            }
        };
        lock(&failures).push((rank, error));
        Some(message)
    };
    let cause = run_threads(world, &run, &|rank, error| {
        lock(&failures).push((rank, error.into()));
    });
    let inner =
        |result: Mutex<Option<T>>| result.into_inner().unwrap_or_else(PoisonError::into_inner);
    let results = results.into_iter().map(inner);
    let failures = failures.into_inner();
    let mut failures = failures.unwrap_or_else(PoisonError::into_inner);
    // A rank that fails inside a collective wakes the others before it returns, so one of those
    // may have been recorded first.
    if let Some(CommError::Failed { rank: culprit, .. }) = cause
        && let Some(at) = failures.iter().position(|(rank, _)| *rank == culprit)
    {
        let first = failures.remove(at);
        failures.insert(0, first);
    }
    let mut failures = failures.into_iter();
    match failures.next() {
        None => Ok(results.flatten().collect()),
        Some((rank, cause)) => {
            let done = results.enumerate();
            let done = done.filter_map(|(rank, result)| Some((rank, Ok(result?))));
            let others = failures
                .map(|(rank, e)| (rank, Err(e)))
                .chain(done)
                .collect();
            Err(RanksFailed {
                rank,
                cause,
                others,
            })
        }
    }
}

/// Runs `run` as every rank, on a thread each, and returns the cause of failure. `run` returns what other ranks hear of its failure;
/// `refused` gets the error of a rank that has no thread. What ranks return is of no type here: this is compiled once.
fn run_threads<B: Backend>(
    world: Vec<Arc<dyn Communicator<B>>>,
    run: &(dyn Fn(usize, Arc<dyn Communicator<B>>) -> Option<String> + Sync),
    refused: &dyn Fn(usize, CommError),
) -> Option<CommError> {
    let cause = Mutex::new(None);
    let fail = |comm: &dyn Communicator<B>, message: &str| {
        comm.control().abort(message);
        let ended = comm.control().failure();
        let mut cause = lock(&cause);
        *cause = cause.take().or(ended);
    };
    let ranks = world.len();
    thread::scope(|scope| {
        let mut started = Vec::new();
        for (rank, comm) in world.into_iter().enumerate() {
            let (own, fail) = (Arc::clone(&comm), &fail);
            // The communicator lives until the failure is recorded, so that other ranks hear the cause and not only that this
            // rank is gone.
            let run = move || {
                if let Some(message) = run(rank, Arc::clone(&comm)) {
                    fail(&*comm, &message);
                }
            };
            match start(scope, run) {
                Ok(handle) => started.push(handle),
                Err(why) => {
                    // The ranks before it end; those after it never begin.
                    let why = why.to_string();
                    let world = ranks;
                    let error = CommError::NoThread { rank, world, why };
                    let message = error.to_string();
                    refused(rank, error);
                    fail(&*own, &message);
                    break;
                }
            }
        }
        // The end of the scope does not wait for destructors of thread-local values.
        for handle in started {
            if let Err(panic) = handle.join() {
                resume_unwind(panic);
            }
        }
    });
    cause.into_inner().unwrap_or_else(PoisonError::into_inner)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts the thread of a rank.
fn start<'scope>(
    scope: &'scope Scope<'scope, '_>,
    run: impl FnOnce() + Send + 'scope,
) -> io::Result<ScopedJoinHandle<'scope, ()>> {
    #[cfg(test)]
    if tests::is_refused() {
        return Err(io::Error::other("no more of them"));
    }
    thread::Builder::new().spawn_scoped(scope, run)
}

fn panic_message(panic: &(dyn Any + Send)) -> &str {
    if let Some(text) = panic.downcast_ref::<&str>() {
        text
    } else if let Some(text) = panic.downcast_ref::<String>() {
        text
    } else {
        "no message"
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lowp_kernels::Cpu;
    use std::cell::Cell;

    thread_local! {
        /// Threads that can still be started from this one.
        static LEFT: Cell<usize> = const { Cell::new(usize::MAX) };
    }

    pub(super) fn is_refused() -> bool {
        let left = LEFT.get();
        LEFT.set(left.saturating_sub(1));
        left == 0
    }

    /// Ranks that wait for one that has no thread hear of it, whichever it is.
    #[test]
    fn a_rank_without_a_thread_ends_all() {
        for started in 0..4 {
            LEFT.set(started);
            let patience = Duration::from_secs(60);
            let ended = run_ranks(&Cpu, 4, patience, |_, comm| comm.control().barrier());
            LEFT.set(usize::MAX);
            let failed = ended.expect_err("a rank has no thread");
            let text = failed.cause.to_string();
            assert_eq!(failed.rank, started);
            assert_eq!(
                text,
                format!(
                    "the thread of rank {started} of 4 could not be started: no more of them; raise the limit of processes (ulimit -u), or use fewer ranks"
                )
            );
            assert_eq!(failed.others.len(), started);
        }
    }
}
