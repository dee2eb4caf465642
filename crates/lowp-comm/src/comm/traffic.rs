//! [`Traffic`]: what passed through a communicator.

use std::sync::atomic::{AtomicU64, Ordering};

use lowp_kernels::Backend;

use super::{Collective, ReduceItem};

/// Bytes that passed through one rank's communicator since it was made. Each byte counts once, on
/// the rank whose piece it belongs to, however the collective moves it: the sum over all ranks of
/// a gather or reduce-scatter is the size of the full buffers on the wire. Calls that a graph repeats count
/// when they are captured, not when it is launched; who launches it again says so
/// ([`Communicator::count`](crate::Communicator::count)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes of this rank's pieces in all-gathers.
    pub all_gather_bytes: u64,
    /// Bytes, in the wire's dtype, of this rank's ranges in reduce-scatters.
    pub reduce_scatter_bytes: u64,
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
            all_reduce_bytes: self.all_reduce_bytes - earlier.all_reduce_bytes,
            calls: self.calls - earlier.calls,
        }
    }
}

/// Counts the [`Traffic`] of a communicator.
#[derive(Debug, Default)]
pub struct Counters {
    all_gather: AtomicU64,
    reduce_scatter: AtomicU64,
    all_reduce: AtomicU64,
    calls: AtomicU64,
}

impl Counters {
    /// Counts a batch of `rank` that went through.
    pub fn add<B: Backend>(&self, backend: &B, rank: usize, batch: Collective<'_, B>) {
        let (counter, bytes) = match batch {
            Collective::AllGather(items) => {
                let own = items.iter().map(|item| item.ranges[rank].len());
                (&self.all_gather, own.sum())
            }
            Collective::ReduceScatter(items, wire) => {
                let own =
                    |item: &ReduceItem<'_, B>| item.ranges[rank].len() * item.wire(wire).bytes();
                (&self.reduce_scatter, items.iter().map(own).sum())
            }
            Collective::Max(values) => (&self.all_reduce, 4 * backend.len(values)),
            Collective::Sum(buffers) => {
                let lens = buffers.iter().map(|values| 4 * backend.len(values));
                (&self.all_reduce, lens.sum())
            }
        };
        counter.fetch_add(bytes as u64, Ordering::Relaxed);
        self.calls.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts `sent` once more.
    pub fn repeat(&self, sent: Traffic) {
        let add = |counter: &AtomicU64, n: u64| counter.fetch_add(n, Ordering::Relaxed);
        add(&self.all_gather, sent.all_gather_bytes);
        add(&self.reduce_scatter, sent.reduce_scatter_bytes);
        add(&self.all_reduce, sent.all_reduce_bytes);
        add(&self.calls, sent.calls);
    }

    /// What was counted so far.
    pub fn traffic(&self) -> Traffic {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Traffic {
            all_gather_bytes: read(&self.all_gather),
            reduce_scatter_bytes: read(&self.reduce_scatter),
            all_reduce_bytes: read(&self.all_reduce),
            calls: read(&self.calls),
        }
    }
}
