//! [`OffloadCost`]: masters and states in page-locked memory of the host.

use super::config::{CostConfig, states_of};
use super::vars::Vars;
use super::weight::WeightCost;
use super::weights::Weights;
use lowp_format::Recipe;
use serde::Serialize;
use std::cmp::Reverse;
use std::ops::Range;

/// Page-locked memory of the host, and what a step moves of it over the bus of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct OffloadCost {
    /// Bytes of the masters and states of the rank that has most of them.
    pub bytes_per_rank: u128,
    /// Bytes of the masters and states of all ranks of the node that has most of them.
    pub bytes_per_node: u128,
    /// Bytes that the device of that rank reads in a step, at least: states once, and masters once for each pass over them. Kernels that read a
    /// master twice in a pass, as those of blocks of 128x128, read more.
    pub read_per_step: u128,
    /// Bytes that it writes: all masters and states.
    pub written_per_step: u128,
    /// Bytes of each rank of a replica.
    #[serde(skip)]
    by_rank: Vec<u128>,
}

impl OffloadCost {
    /// Nothing where masters and states are memory of the device.
    pub(super) fn new<R: Recipe>(weights: &Weights<R>, vars: &Vars, config: &CostConfig) -> Self {
        if !config.offload {
            return Self::default();
        }
        let len = |cost: &WeightCost, rank: usize| u128::from(cost.elements[rank]);
        let var_states =
            |cost: &WeightCost, rank| states_of(config.var_rule(), config.state, len(cost, rank));
        let masters = |cost: &WeightCost, rank: usize| u128::from(cost.masters[rank]);
        // Blocks of states end with each parameter.
        let of_rank = |rank| {
            weights.sum(|cost| masters(cost, rank) + config.state_bytes(len(cost, rank)))
                + vars
                    .all()
                    .sum(|cost| masters(cost, rank) + var_states(cost, rank))
        };
        let by_rank: Vec<u128> = (0..config.mesh.shard).map(of_rank).collect();
        let rank = (0..by_rank.len()).max_by_key(|&rank| (by_rank[rank], Reverse(rank)));
        let rank = rank.unwrap_or(0);
        let again = |cost: &WeightCost| u128::from(cost.master_passes - 1) * masters(cost, rank);
        let mut cost = Self {
            bytes_per_rank: by_rank[rank],
            read_per_step: by_rank[rank] + weights.sum(again) + vars.all().sum(again),
            written_per_step: by_rank[rank],
            bytes_per_node: 0,
            by_rank,
        };
        let (world, node) = (config.mesh.world(), config.per_node);
        let nodes = (0..world).step_by(node);
        let nodes = nodes.map(|first| cost.of_ranks(first..world.min(first + node)));
        cost.bytes_per_node = nodes.max().unwrap_or(0);
        cost
    }

    /// Bytes of these ranks of the world, which are replica by replica.
    pub fn of_ranks(&self, ranks: Range<usize>) -> u128 {
        let shards = self.by_rank.len().max(1);
        let of = |rank: usize| self.by_rank.get(rank % shards).copied().unwrap_or(0);
        ranks.map(of).sum()
    }

    /// Those of them that a checkpoint copies: of the first replica.
    pub fn saved_by(&self, ranks: Range<usize>) -> u128 {
        self.of_ranks(ranks.start.min(self.by_rank.len())..ranks.end.min(self.by_rank.len()))
    }
}
