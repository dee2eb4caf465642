//! [`run_ranks`]: runs a function as every rank of a world of threads.

use std::any::Any;
use std::fmt;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
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
    /// Its error.
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
    let failures: Mutex<Vec<(usize, E)>> = Mutex::new(Vec::new());
    let cause: Mutex<Option<CommError>> = Mutex::new(None);
    let ranks = world.len();
    let results: Vec<Option<T>> = thread::scope(|scope| {
        let (f, failures, cause) = (&f, &failures, &cause);
        let mut threads = Vec::with_capacity(ranks);
        for (rank, comm) in world.into_iter().enumerate() {
            let own = Arc::clone(&comm);
            let run = move || run_rank(rank, comm, f, failures, cause);
            match start(scope, run) {
                Ok(thread) => threads.push(thread),
                Err(why) => {
                    // The ranks before it end; those after it never begin.
                    let why = why.to_string();
                    let world = ranks;
                    let error = CommError::NoThread { rank, world, why };
                    fail(rank, own, &error.to_string(), error.into(), failures, cause);
                    break;
                }
            }
        }
        // `run_rank` catches panics of `f`, so a join cannot fail.
        threads
            .into_iter()
            .map(|t| t.join().ok().flatten())
            .collect()
    });
    let mut failures = failures
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner);
    // A rank that fails inside a collective wakes the others before it returns, so one of those
    // may have been recorded first.
    let cause = cause.into_inner().unwrap_or_else(PoisonError::into_inner);
    if let Some(CommError::Failed { rank: culprit, .. }) = cause {
        failures.sort_by_key(|(rank, _)| *rank != culprit);
    }
    let mut failures = failures.into_iter();
    match failures.next() {
        None => Ok(results.into_iter().flatten().collect()),
        Some((rank, cause)) => {
            let done = results.into_iter().enumerate();
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

/// Runs one rank. Its communicator lives until the failure is recorded, so that other ranks hear
/// the cause and not only that this rank is gone.
fn run_rank<B, T, E, F>(
    rank: usize,
    comm: Arc<dyn Communicator<B>>,
    f: &F,
    failures: &Mutex<Vec<(usize, E)>>,
    cause: &Mutex<Option<CommError>>,
) -> Option<T>
where
    B: Backend,
    E: From<CommError> + fmt::Display,
    F: Fn(usize, Arc<dyn Communicator<B>>) -> Result<T, E> + Sync,
{
    let own = Arc::clone(&comm);
    let (error, message) = match catch_unwind(AssertUnwindSafe(|| f(rank, own))) {
        Ok(Ok(value)) => return Some(value),
        Ok(Err(error)) => {
            let message = error.to_string();
            (error, message)
        }
        Err(panic) => {
            let message = format!("panicked: {}", panic_message(&*panic));
            (
                CommError::Failed {
                    rank,
                    message: message.clone(),
                }
                .into(),
                message,
            )
        }
    };
    fail(rank, comm, &message, error, failures, cause);
    None
}

/// Notes the `error` of a rank and wakes the others, who hear `message`.
fn fail<B: Backend, E>(
    rank: usize,
    comm: Arc<dyn Communicator<B>>,
    message: &str,
    error: E,
    failures: &Mutex<Vec<(usize, E)>>,
    cause: &Mutex<Option<CommError>>,
) {
    failures
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .push((rank, error));
    comm.control().abort(message);
    let ended = comm.control().failure();
    let mut cause = cause.lock().unwrap_or_else(PoisonError::into_inner);
    *cause = cause.take().or(ended);
}

/// Starts the thread of a rank.
fn start<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    run: impl FnOnce() -> T + Send + 'scope,
) -> io::Result<ScopedJoinHandle<'scope, T>> {
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

    /// Ranks that wait for one that has no thread are told, whichever it is.
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
