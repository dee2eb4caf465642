//! [`Uneven`]: what a step moves for gradients of which ranks own uneven parts, which devices reduce in even ones (`UnevenRun`).

use super::buckets::Buckets;
use super::config::CostConfig;
use super::links::Sends;
use lowp_comm::{Move, Traffic};
use std::ops::Range;

const F32: u64 = 4;

/// What one reduction of all gradients sums and sends, where ranks own parts of unequal lengths.
pub(super) struct Uneven {
    /// Elements whose sums each rank gets in reduce-scatters.
    pub(super) scattered: Vec<u64>,
    /// Bytes of sums that go on to the ranks that own them.
    pub(super) passed_on_bytes: u128,
    pub(super) passed_on: Sends,
    /// Bytes that are summed on all ranks.
    pub(super) on_all: u64,
}

impl Uneven {
    /// Nothing, of gradients that go to their owners at once.
    pub(super) fn none(own: Vec<u64>, config: &CostConfig) -> Self {
        Self {
            scattered: own,
            passed_on_bytes: 0,
            passed_on: Sends::new(config.mesh.shard, config.mesh.replicate, config.per_node),
            on_all: 0,
        }
    }

    /// Of `buckets`, of which ranks have `own` elements in all.
    pub(super) fn new(own: Vec<u64>, buckets: &Buckets<'_>, config: &CostConfig) -> Self {
        let mut all = Self::none(vec![0; own.len()], config);
        for bucket in buckets.each() {
            // At most the elements of all parameters.
            let count = u64::try_from(bucket.count).unwrap_or(u64::MAX);
            let owned: Vec<&[Range<usize>]> = bucket.owned.iter().map(Vec::as_slice).collect();
            let one_byte: Vec<_> = owned.iter().map(|&ranges| (ranges, 1)).collect();
            for (rank, scattered) in all.scattered.iter_mut().enumerate() {
                let sent = Traffic::of_reduction(&one_byte, &bucket.runs, rank);
                *scattered += count * sent.reduce_scatter_bytes;
                all.passed_on_bytes += bucket.count * u128::from(sent.passed_on_bytes);
                if rank == 0 {
                    all.on_all += count * sent.all_reduce_bytes;
                }
                for run in &bucket.runs {
                    for Move { peer, elements, .. } in run.received(&owned, rank) {
                        if peer != rank {
                            let bytes = u128::from(count * F32 * elements.len() as u64);
                            all.passed_on.add(peer, rank, bytes);
                        }
                    }
                }
            }
        }
        all
    }
}
