//! Worlds of GPUs, as threads.
#![allow(dead_code, reason = "every test file uses its own part")]

use std::ops::Range;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use lowp_comm::{CommError, Communicator, Control, RanksFailed, run_comms, threads};
use lowp_kernels::{Backend, Cuda, KernelError};
use lowp_nccl::{NcclComm, NcclOptions, Sums};
use lowp_shard::ShardError;

/// One rank: its stream, and its communicator, on a stream of its own.
pub(crate) struct Rank {
    pub(crate) cuda: Cuda,
    pub(crate) comm: Arc<dyn Communicator<Cuda>>,
}

/// A handle for each GPU, if there are `least` at least.
pub(crate) fn devices(least: usize) -> Option<Vec<Cuda>> {
    let required = std::env::var("LOWP_REQUIRE_GPUS")
        .ok()
        .map(|n| n.parse().expect("a number"));
    let found = Cuda::count().expect("a driver that works");
    assert!(
        found >= required.unwrap_or(0),
        "{found} GPUs where {required:?} are required"
    );
    if found < least.max(required.unwrap_or(0)) {
        eprintln!("skipped: {found} GPUs, and {least} are needed");
        return None;
    }
    Some(
        (0..found)
            .map(|ordinal| Cuda::new(ordinal).expect("a GPU"))
            .collect(),
    )
}

/// Runs `f` as every rank of a world with all GPUs of the machine, if there are `least`.
pub(crate) fn try_world<T: Send>(
    least: usize,
    limit: Duration,
    sums: Sums,
    f: impl Fn(&Rank) -> Result<T, ShardError> + Sync,
) -> Option<Result<Vec<T>, RanksFailed<T, ShardError>>> {
    try_world_of(&devices(least)?, limit, sums, f)
}

/// Runs `f` as every rank of a world of these GPUs, if there is NCCL for several.
fn try_world_of<T: Send>(
    devices: &[Cuda],
    limit: Duration,
    sums: Sums,
    f: impl Fn(&Rank) -> Result<T, ShardError> + Sync,
) -> Option<Result<Vec<T>, RanksFailed<T, ShardError>>> {
    let controls = threads(devices.len(), limit);
    let comm = |(cuda, control): (&Cuda, Arc<dyn Control>)| {
        let options = NcclOptions {
            limit,
            sums,
            ..NcclOptions::default()
        };
        NcclComm::new(control, cuda, options).map(Arc::<dyn Communicator<Cuda>>::from)
    };
    let comms: Result<Vec<_>, CommError> = thread::scope(|scope| {
        let ranks = devices.iter().zip(controls);
        let joined: Vec<_> = ranks.map(|rank| scope.spawn(move || comm(rank))).collect();
        let joined = joined.into_iter();
        joined.map(|rank| rank.join().expect("no panic")).collect()
    });
    let comms = match comms {
        Ok(comms) => comms,
        Err(CommError::Kernel(error @ KernelError::Device { call: "dlopen", .. }))
            if std::env::var_os("LOWP_REQUIRE_GPUS").is_none() =>
        {
            eprintln!("skipped: {error}");
            return None;
        }
        Err(error) => panic!("{error}"),
    };
    Some(run_comms(comms, |rank, comm| {
        let cuda = devices[rank].fork()?;
        f(&Rank { cuda, comm })
    }))
}

/// Runs `f` as every rank and expects success.
pub(crate) fn world<T: Send>(
    least: usize,
    limit: Duration,
    sums: Sums,
    f: impl Fn(&Rank) -> Result<T, ShardError> + Sync,
) -> Vec<T> {
    match try_world(least, limit, sums, f) {
        Some(Ok(results)) => results,
        Some(Err(failed)) => panic!("{failed}"),
        None => Vec::new(),
    }
}

/// Runs `f` as the only rank of a world of one GPU, then as every rank of one of all, if there are more, and expects success. The results are
/// those of each world.
pub(crate) fn alone_and_together<T: Send>(
    limit: Duration,
    sums: Sums,
    f: impl Fn(&Rank) -> Result<T, ShardError> + Sync,
) -> Vec<Vec<T>> {
    let count = devices(1).map_or(0, |devices| devices.len());
    let mut sizes = vec![1, count];
    sizes.truncate(count.min(2));
    let run = |ranks| first(ranks, limit, sums, &f);
    sizes.into_iter().map(run).collect()
}

/// Runs `f` as every rank of a world of the first GPUs, and expects success. No results where there are not as many, or no NCCL.
pub(crate) fn first<T: Send>(
    ranks: usize,
    limit: Duration,
    sums: Sums,
    f: impl Fn(&Rank) -> Result<T, ShardError> + Sync,
) -> Vec<T> {
    let devices = devices(ranks).unwrap_or_default();
    let Some(devices) = devices.get(..ranks) else {
        return Vec::new();
    };
    match try_world_of(devices, limit, sums, f) {
        Some(Ok(results)) => results,
        Some(Err(failed)) => panic!("of {ranks}: {failed}"),
        None => Vec::new(),
    }
}

/// Runs `f` as every rank and expects a failure.
pub(crate) fn failing<T: Send>(
    least: usize,
    limit: Duration,
    sums: Sums,
    f: impl Fn(&Rank) -> Result<T, ShardError> + Sync,
) -> Option<RanksFailed<T, ShardError>> {
    match try_world(least, limit, sums, f)? {
        Ok(_) => panic!("every rank succeeded"),
        Err(failed) => Some(failed),
    }
}

fn mix(seed: u64, i: u64) -> u64 {
    let random = lowp_format::Philox::new(seed, 7);
    random.below(i, u64::MAX)
}

/// Bytes that are a function of the seed.
pub(crate) fn bytes(seed: u64, n: usize) -> Vec<u8> {
    (0..n as u64).map(|i| mix(seed, i) as u8).collect()
}

/// Normal values that are a function of the seed.
pub(crate) fn values(seed: u64, n: usize) -> Vec<f32> {
    let random = lowp_format::Philox::new(seed, 0);
    (0..n as u64).map(|i| random.normal(i)).collect()
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
