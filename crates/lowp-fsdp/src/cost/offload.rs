//! [`OffloadCost`]: masters and states in page-locked memory of the host.

use super::config::{CostConfig, states_of};
use super::vars::Vars;
use super::weight::WeightCost;
use super::weights::Weights;
use lowp_format::{KernelKey, Recipe, Role};
use serde::Serialize;

/// Page-locked memory of the host that the rank that holds most has, and what a step moves of it over the bus of the rank's device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct OffloadCost {
    /// Bytes of the masters and states of a rank.
    pub bytes_per_rank: u128,
    /// The same of all ranks of a node.
    pub bytes_per_node: u128,
    /// Bytes that a device reads in a step: states once, and masters once for each pass over them.
    pub read_per_step: u128,
    /// Bytes that it writes: all masters and states.
    pub written_per_step: u128,
}

impl OffloadCost {
    /// Of `rank` of those of a replica; nothing where masters and states are memory of the device.
    pub(super) fn new<R: Recipe>(
        (weights, vars): (&Weights<R>, &Vars),
        rank: usize,
        config: &CostConfig,
    ) -> Self {
        if !config.offload {
            return Self::default();
        }
        let len = |cost: &WeightCost| u128::from(cost.elements[rank]);
        let masters = |cost: &WeightCost| config.master_bytes(len(cost));
        // Blocks of states end with each parameter.
        let states = weights.sum(|cost| config.state_bytes(len(cost)))
            + vars
                .all()
                .sum(|cost| states_of(config.var_rule(), config.state, len(cost)));
        let written = states + weights.sum(masters) + vars.all().sum(masters);
        let again = |cost: &WeightCost| u128::from(cost.master_passes - 1) * masters(cost);
        Self {
            bytes_per_rank: written,
            bytes_per_node: written * config.per_node.min(config.mesh.world()) as u128,
            read_per_step: written + weights.sum(again) + vars.all().sum(again),
            written_per_step: written,
        }
    }
}

/// How often a step reads the masters of a weight: to update them and, where that is another pass, to cast them. Slices of a `flat` weight
/// are cast apart, after the amaxes of their blocks and lines.
pub(crate) fn master_passes(recipe: &impl Recipe, flat: bool) -> u64 {
    let kernels = recipe.quantizers(Role::Weight).kernels();
    let any = |of: fn(&KernelKey) -> bool| u64::from(kernels.iter().any(of));
    match flat {
        true => 2 + any(|key| key.block.is_some() || key.scale.is_by_line()),
        false => 1 + any(|key| key.scale.waits_for_amax()),
    }
}
