//! The threads of kernels, apart from those of the caller (docs/decisions/0011-kernel-threads.md).
//!
//! A run holds the locks of its buffers while its parts are worked on. A rayon thread that waits takes up other
//! tasks of its pool meanwhile, such as another run on the same buffers, and that one would wait for the locks
//! of the first on the same stack. Parts therefore run on pools where there is nothing but parts, which never
//! lock, and who waits for them takes up nothing.

#![expect(
    unsafe_code,
    reason = "hands work that borrows to a pool, and waits for it"
)]

use std::collections::BTreeMap;
use std::mem;
use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Mutex, OnceLock, PoisonError, mpsc};

use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::KernelError;

/// The threads that a run called from here may use: those of the rayon pool of the caller; outside of one
/// `RAYON_NUM_THREADS`, or all that the system offers. Asking rayon there would start its global pool.
pub(super) fn available() -> usize {
    if rayon::current_thread_index().is_some() {
        return rayon::current_num_threads();
    }
    static OUTSIDE: OnceLock<usize> = OnceLock::new();
    *OUTSIDE.get_or_init(|| outside(std::env::var("RAYON_NUM_THREADS").ok().as_deref()))
}

/// The threads outside of a rayon pool, where `RAYON_NUM_THREADS` says `asked`; 0 says nothing, as for rayon.
fn outside(asked: Option<&str>) -> usize {
    let asked = asked.and_then(|text| text.trim().parse().ok());
    let system = || std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    asked.filter(|&threads| threads > 0).unwrap_or_else(system)
}

/// The pool of `threads` threads, made at its first use and kept: its threads sleep between runs.
fn pool(threads: usize) -> Result<&'static ThreadPool, KernelError> {
    static POOLS: Mutex<BTreeMap<usize, &'static ThreadPool>> = Mutex::new(BTreeMap::new());
    // Whoever failed in between left the map as it was.
    let mut pools = POOLS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(&pool) = pools.get(&threads) {
        return Ok(pool);
    }
    let builder = ThreadPoolBuilder::new()
        .num_threads(threads)
        .thread_name(|index| format!("lowp-kernel-{index}"));
    let pool = builder.build().map_err(|error| failed(threads, &error))?;
    let pool: &'static ThreadPool = Box::leak(Box::new(pool));
    pools.insert(threads, pool);
    Ok(pool)
}

fn failed(threads: usize, error: &dyn std::error::Error) -> KernelError {
    KernelError::Threads {
        threads,
        why: error.to_string(),
    }
}

/// Runs `work` for the numbers below `count` on `threads` threads.
pub(super) fn in_parallel(
    threads: usize,
    count: usize,
    work: &(dyn Fn(usize) -> Result<(), KernelError> + Sync),
) -> Result<(), KernelError> {
    install(threads, || (0..count).into_par_iter().try_for_each(work))?
}

/// Bytes that one thread copies at least.
const COPIED: usize = 4 << 20;

/// Copies `from` to `to`, which are of one length: many values on several threads, as most of the time is that in which the system finds
/// memory.
pub(super) fn copy_values<T: Copy + Send + Sync>(
    from: &[T],
    to: &mut [T],
) -> Result<(), KernelError> {
    let each = COPIED / size_of::<T>().max(1);
    if to.len() < 2 * each {
        to.copy_from_slice(from);
        return Ok(());
    }
    install(available(), || {
        let parts = to.par_chunks_mut(each).zip(from.par_chunks(each));
        parts.for_each(|(to, from)| to.copy_from_slice(from));
    })
}

/// Runs `work`, whose parallel loops then run on `threads` threads of this crate, and waits. The calling
/// thread takes up nothing else.
fn install<R: Send>(threads: usize, work: impl FnOnce() -> R + Send) -> Result<R, KernelError> {
    let pool = pool(threads)?;
    if rayon::current_thread_index().is_none() {
        // Sleeps until the result is there.
        return Ok(pool.install(work));
    }
    wait(pool, work)
}

/// Runs `work` on `pool` for a caller that is one of rayon's threads: it sleeps, where `ThreadPool::install`
/// would have it take up tasks of its own pool.
fn wait<R: Send>(pool: &ThreadPool, work: impl FnOnce() -> R + Send) -> Result<R, KernelError> {
    let (done, result) = mpsc::sync_channel(1);
    let job: Box<dyn FnOnce() + Send + '_> = Box::new(move || {
        let found = catch_unwind(AssertUnwindSafe(work));
        // The caller is there: it waits for this.
        let _ = done.send(found);
    });
    // SAFETY: only the lifetime changes, and the job is over before anything that it borrows: this function
    // ends after `recv`, which returns once `work` is consumed, or once the job was dropped.
    let job = unsafe {
        mem::transmute::<Box<dyn FnOnce() + Send + '_>, Box<dyn FnOnce() + Send + 'static>>(job)
    };
    pool.spawn(job);
    match result.recv() {
        Ok(found) => found.map_err(|panic| resume_unwind(panic)),
        Err(error) => Err(failed(pool.current_num_threads(), &error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_outside_of_rayon_are_those_asked_for() {
        let system = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        assert_eq!(outside(Some("3")), 3);
        for nothing in [None, Some(""), Some("0"), Some("many"), Some("-1")] {
            assert_eq!(outside(nothing), system, "{nothing:?}");
        }
    }

    #[test]
    fn many_values_are_copied_by_several_threads() {
        let each = COPIED / size_of::<u32>();
        for len in [0, 5, 2 * each - 1, 3 * each + 7] {
            let from: Vec<u32> = (0..len as u32).collect();
            let mut to = vec![0; len];
            copy_values(&from, &mut to).unwrap();
            assert!(from == to, "{len}");
        }
    }

    fn here() -> (Option<String>, usize) {
        let name = std::thread::current().name().map(str::to_owned);
        (name, rayon::current_num_threads())
    }

    #[test]
    fn work_runs_on_threads_of_this_crate() {
        let callers = ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        let found = [
            install(2, here).unwrap(),
            callers.install(|| install(2, here)).unwrap(),
            callers.install(|| install(available(), here)).unwrap(),
        ];
        for ((name, threads), expected) in found.into_iter().zip([2, 2, 3]) {
            assert!(name.is_some_and(|name| name.starts_with("lowp-kernel-")));
            assert_eq!(threads, expected);
        }
    }

    #[test]
    fn pools_are_kept() {
        let [first, second] = [pool(2).unwrap(), pool(2).unwrap()];
        assert!(std::ptr::eq(first, second));
    }

    #[test]
    fn work_borrows_from_its_caller() {
        let callers = ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        let (values, mut sums) = ([1, 2, 3], [0, 0]);
        for (i, sum) in sums.iter_mut().enumerate() {
            let mut add = || values.iter().for_each(|value| *sum += value + i);
            callers.install(|| install(2, &mut add)).unwrap();
        }
        assert_eq!(sums, [6, 9]);
    }

    #[test]
    fn a_part_that_panics_panics_the_caller() {
        let callers = ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        let fails = || -> usize { panic!("a part failed") };
        let panics = [
            catch_unwind(|| install(2, fails)),
            catch_unwind(AssertUnwindSafe(|| callers.install(|| install(2, fails)))),
        ];
        assert!(panics.iter().all(Result::is_err));
    }
}
