//! [`Memory`]: what the rank that holds most has in memory, by the account of a run.

use super::shapes::ModelShapes;
use super::weights::Weights;
use super::{CostConfig, PARAMETER_STATE};
use crate::plain_vars::VarRecipe;
use lowp_format::{PhasePlans, Recipe, ReshardAfterForward};
use serde::Serialize;

const F32: u128 = 4;

/// Bytes of one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// The rank, of those of a replica.
    pub rank: usize,
    /// Its weights as they are stored.
    pub weights: u128,
    /// f32 masters of its elements.
    pub masters: u128,
    /// Both moments.
    pub moments: u128,
    /// Reduced gradients, f32.
    pub gradients: u128,
    /// Memory that weights are gathered in.
    pub gathered: u128,
    /// Parts that it keeps from forward to backward.
    pub parts: u128,
    /// Memory that weights are decoded in, on the device and on the host.
    pub decoded: u128,
    /// Beside full weights.
    pub staged: u128,
    /// Buckets of full gradients.
    pub buckets: u128,
    /// Full values of the variables.
    pub variables: u128,
    /// Masters, moments and reduced gradients of its part of the variables.
    pub variable_state: u128,
    /// All of it.
    pub total: u128,
}

impl Memory {
    /// Of the first rank that holds most.
    pub(super) fn new<R: Recipe + PartialEq>(
        model: &ModelShapes,
        weights: &Weights<R>,
        vars: &Weights<VarRecipe>,
        config: &CostConfig,
    ) -> Self {
        let [_, variables] = model.parameters();
        let mut elements: Vec<u128> = weights
            .shapes()
            .map(|shape| shape.elements() as u128)
            .collect();
        elements.sort_unstable();
        elements.dedup();
        // One buffer of each length on the device, and the longest on the host.
        let longest = elements.last().copied().unwrap_or(0);
        let decoded = F32 * (elements.iter().sum::<u128>() + longest);
        let common = Self {
            gathered: gathered(weights, config.reshard),
            decoded,
            staged: weights.sum(|cost| u128::from(cost.staged)),
            buckets: buckets(model, config),
            variables: F32 * variables,
            ..Self::default()
        };
        let of = |rank: usize| {
            let by_rank = |of: fn(&super::weight::WeightCost) -> &[u64]| {
                weights.sum(|cost| u128::from(of(cost)[rank]))
            };
            let own = by_rank(|cost| &cost.elements);
            let var = vars.sum(|cost| u128::from(cost.elements[rank]));
            Self {
                rank,
                weights: by_rank(|cost| &cost.stored),
                masters: F32 * own,
                moments: 2 * F32 * own,
                gradients: F32 * own,
                parts: by_rank(|cost| &cost.parts),
                variable_state: PARAMETER_STATE * var,
                ..common
            }
            .summed()
        };
        let all = (0..config.mesh.shard).map(of);
        let most = all.reduce(|a, b| if b.total > a.total { b } else { a });
        most.unwrap_or(common)
    }

    fn summed(self) -> Self {
        let total = self.rows().iter().map(|(_, bytes)| bytes).sum();
        Self { total, ..self }
    }

    /// The parts with what they are.
    pub fn rows(&self) -> [(&'static str, u128); 11] {
        [
            ("weights, stored", self.weights),
            ("fp32 masters", self.masters),
            ("moments, 2 x f32", self.moments),
            ("reduced gradients, f32", self.gradients),
            ("gathered at once", self.gathered),
            ("parts kept for backward", self.parts),
            ("decoded at once, f32", self.decoded),
            ("staged beside full weights", self.staged),
            ("buckets of full gradients, f32", self.buckets),
            ("variables, full f32 copies", self.variables),
            ("variables, sharded state", self.variable_state),
        ]
    }
}

/// Memory that weights are gathered in: those with equal plans take turns, unless they are kept until backward.
fn gathered<R: Recipe + PartialEq>(weights: &Weights<R>, reshard: ReshardAfterForward) -> u128 {
    if reshard == ReshardAfterForward::No {
        return weights.sum(|cost| u128::from(cost.gathered));
    }
    let mut seen: Vec<&PhasePlans> = Vec::new();
    let mut bytes = 0;
    for cost in weights.costs() {
        if let Some(plans) = &cost.plans
            && !seen.contains(&plans)
        {
            seen.push(plans);
            bytes += u128::from(cost.gathered);
        }
    }
    bytes
}

/// Memory of full gradients (`GradBuckets`, in the order of backward): a slab of each length, and two of it where a single rank
/// waits for nobody.
fn buckets(model: &ModelShapes, config: &CostConfig) -> u128 {
    let most = config.grad_bucket / 4;
    let layers = model.layers.iter().rev().map(|layer| layer.shape);
    let mut lens: Vec<usize> = Vec::new();
    for shape in layers.chain(model.vars.iter().copied()) {
        let len = shape.elements();
        match lens.last_mut() {
            Some(last) if *last + len <= most => *last += len,
            _ => lens.push(len),
        }
    }
    let common = lens.iter().copied().filter(|&len| len <= most).max();
    let common = common.unwrap_or(0);
    let mut slabs: Vec<usize> = lens.into_iter().map(|len| len.max(common)).collect();
    slabs.sort_unstable();
    let at_once = if config.mesh.world() == 1 { 2 } else { 1 };
    let of_length = |same: &[usize]| same.len().min(at_once) as u128 * same[0] as u128;
    F32 * slabs.chunk_by(|a, b| a == b).map(of_length).sum::<u128>()
}
