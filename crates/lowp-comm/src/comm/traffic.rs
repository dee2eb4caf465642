//! [`Traffic`]: what passed through a communicator.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use half::bf16;
use lowp_kernels::Backend;

use super::{Collective, ReduceItem, UnevenRun};

/// Bytes that passed through one rank's communicator since it was made. Each byte counts once, on
/// the rank whose piece it belongs to, however the collective moves it: the sum over all ranks of
/// a gather or reduce-scatter is the size of the full buffers on the wire. Of gradients that are reduced in even parts ([`UnevenRun`]) a rank's
/// piece of the reduce-scatter is its part, the sums that others pass on to it come after, and what is summed on all ranks is an all-reduce. Calls that a graph repeats count
/// when they are captured, not when it is launched; who launches it again says so
/// ([`Communicator::count`](crate::Communicator::count)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes of this rank's pieces in all-gathers.
    pub all_gather_bytes: u64,
    /// Bytes, in the wire's dtype, of this rank's ranges in reduce-scatters.
    pub reduce_scatter_bytes: u64,
    /// Bytes, in f32, of sums that other ranks passed on to this one, which owns them.
    pub passed_on_bytes: u64,
    /// Bytes of this rank's pieces of vectors that others own, to their owners and from them.
    pub owned_bytes: u64,
    /// Bytes of this rank's vectors in all-reduces.
    pub all_reduce_bytes: u64,
    /// Number of gathers and reductions.
    pub calls: u64,
}

impl Traffic {
    /// What was added since `earlier`.
    #[must_use]
    pub fn since(self, earlier: Traffic) -> Traffic {
        Traffic {
            all_gather_bytes: self.all_gather_bytes - earlier.all_gather_bytes,
            reduce_scatter_bytes: self.reduce_scatter_bytes - earlier.reduce_scatter_bytes,
            passed_on_bytes: self.passed_on_bytes - earlier.passed_on_bytes,
            owned_bytes: self.owned_bytes - earlier.owned_bytes,
            all_reduce_bytes: self.all_reduce_bytes - earlier.all_reduce_bytes,
            calls: self.calls - earlier.calls,
        }
    }

    /// Of `rank` in a batch whose gradients go to their owners at once.
    #[must_use]
    pub fn of<B: Backend>(backend: &B, rank: usize, batch: Collective<'_, B>) -> Traffic {
        let mut sent = Traffic {
            calls: 1,
            ..Traffic::default()
        };
        let bytes = |values: &B::Buffer<f32>| (size_of::<f32>() * backend.len(values)) as u64;
        match batch {
            Collective::AllGather(items) => {
                let own = items.iter().map(|item| item.ranges[rank].len() as u64);
                sent.all_gather_bytes = own.sum();
            }
            Collective::ReduceScatter(items, wire) => {
                let own = |item: &ReduceItem<'_, B>| {
                    (item.wire(wire).bytes() * item.ranges[rank].len()) as u64
                };
                sent.reduce_scatter_bytes = items.iter().map(own).sum();
            }
            Collective::Owned(items, _) => {
                let others = items.iter().filter(|item| item.owner != rank);
                let own = others.map(|item| (size_of::<bf16>() * item.ranges[rank].len()) as u64);
                sent.owned_bytes = own.sum();
            }
            Collective::Max(values) => sent.all_reduce_bytes = bytes(values),
            Collective::Sum(buffers) => {
                sent.all_reduce_bytes = buffers.iter().map(|values| bytes(values)).sum();
            }
        }
        sent
    }

    /// Of `rank` in the reduce-scatter of a batch that is made in `runs`: the elements of each gradient that ranks own, and bytes of one on the wire.
    #[must_use]
    pub fn of_reduction(
        batch: &[(&[Range<usize>], usize)],
        runs: &[UnevenRun],
        rank: usize,
    ) -> Traffic {
        let owned: Vec<_> = batch.iter().map(|(ranges, _)| *ranges).collect();
        let others = UnevenRun::others(runs, batch.len());
        let mut scattered: usize = others
            .map(|item| batch[item].1 * owned[item][rank].len())
            .sum();
        let (mut passed_on, mut summed_on_all) = (0, 0);
        for run in runs {
            scattered += batch[run.items.start].1 * run.parts[rank].len();
            let received = run.received(&owned, rank).into_iter();
            let received = received.filter(|from| from.peer != rank);
            passed_on += received.map(|from| from.elements.len()).sum::<usize>();
            summed_on_all += run.remainder.len();
        }
        let f32s = |elements: usize| (size_of::<f32>() * elements) as u64;
        Traffic {
            reduce_scatter_bytes: scattered as u64,
            passed_on_bytes: f32s(passed_on),
            all_reduce_bytes: f32s(summed_on_all),
            calls: 1,
            ..Traffic::default()
        }
    }
}

/// Counts the [`Traffic`] of a communicator.
#[derive(Debug, Default)]
pub struct Counters {
    all_gather: AtomicU64,
    reduce_scatter: AtomicU64,
    passed_on: AtomicU64,
    owned: AtomicU64,
    all_reduce: AtomicU64,
    calls: AtomicU64,
}

impl Counters {
    /// Counts a batch of `rank` that went through ([`Traffic::of`]).
    pub fn add<B: Backend>(&self, backend: &B, rank: usize, batch: Collective<'_, B>) {
        self.repeat(Traffic::of(backend, rank, batch));
    }

    /// Counts `sent` once more.
    pub fn repeat(&self, sent: Traffic) {
        let add = |counter: &AtomicU64, n: u64| counter.fetch_add(n, Ordering::Relaxed);
        add(&self.all_gather, sent.all_gather_bytes);
        add(&self.reduce_scatter, sent.reduce_scatter_bytes);
        add(&self.passed_on, sent.passed_on_bytes);
        add(&self.owned, sent.owned_bytes);
        add(&self.all_reduce, sent.all_reduce_bytes);
        add(&self.calls, sent.calls);
    }

    /// What was counted so far.
    pub fn traffic(&self) -> Traffic {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Traffic {
            all_gather_bytes: read(&self.all_gather),
            reduce_scatter_bytes: read(&self.reduce_scatter),
            passed_on_bytes: read(&self.passed_on),
            owned_bytes: read(&self.owned),
            all_reduce_bytes: read(&self.all_reduce),
            calls: read(&self.calls),
        }
    }
}
