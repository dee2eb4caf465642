//! [`RankMemory`]: what the rank that holds most has in memory, by the account of a run.

use super::buckets::{Buckets, most_in_bucket};
use super::config::{CostConfig, states_of};
use super::matrices::Matrices;
use super::vars::Vars;
use super::weights::Weights;
use crate::VarPlace;
use lowp_comm::{Adder, ReduceStaging, StagedGrad, spanned};
use lowp_format::Recipe;
use lowp_kernels::FloatDtype;
use lowp_shard::{GRAD_REDUCERS, grad_slabs};
use serde::Serialize;
use std::collections::BTreeSet;

const F32: u128 = 4;

/// Bytes of one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RankMemory {
    /// The rank, of those of a replica.
    pub rank: usize,
    /// Stored weights: codes and scales.
    pub weights: u128,
    /// Masters of its elements.
    pub masters: u128,
    /// What they are.
    #[serde(skip)]
    masters_are: &'static str,
    /// The states of the rule.
    pub states: u128,
    /// What they are.
    #[serde(skip)]
    states_are: &'static str,
    /// Of a rule of matrices: the matrices that it makes orthogonal, the pieces of others, and what the work takes.
    pub matrices: u128,
    /// Reduced gradients of its elements, in f32.
    pub gradients: u128,
    /// Memory that weights are gathered in.
    pub gathered: u128,
    /// Parts that it keeps from forward to backward.
    pub parts: u128,
    /// Memory that weights are decoded in, on the device and on the host; where layers run on a device, that in which gradients are in the
    /// order of rows, before they are put in that of tiles.
    pub decoded: u128,
    /// Buffers that a rank allocates beside full weights, to cast and gather them (ZeRO-1).
    pub staged: u128,
    /// Buckets of full gradients.
    pub buckets: u128,
    /// Full values of the variables: of those that stay, and the memory that others are gathered in.
    pub variables: u128,
    /// Masters, moments and reduced gradients of its part of the variables.
    pub variable_state: u128,
    /// The sum of all parts.
    pub total: u128,
}

impl RankMemory {
    /// Of the first rank that holds most.
    pub(super) fn new<R: Recipe>(
        weights: &Weights<R>,
        vars: &Vars,
        buckets: &Buckets<'_>,
        matrices: &Matrices,
        config: &CostConfig,
    ) -> Self {
        let common = Self {
            gathered: weights.gathered(config),
            decoded: match config.vars {
                VarPlace::Host => decoded(weights),
                VarPlace::Backend => to_tiles(weights),
            },
            staged: weights.sum(|cost| u128::from(cost.staged)),
            buckets: bucket_bytes(buckets, config),
            variables: vars.full + vars.transient_gathered(),
            masters_are: weights.masters_are(config),
            states_are: config.states(),
            ..Self::default()
        };
        let of = |rank: usize| {
            let by_rank = |of: fn(&super::weight::WeightCost) -> &[u64]| {
                weights.sum(|cost| u128::from(of(cost)[rank]))
            };
            let own = by_rank(|cost| &cost.elements);
            let var = vars.all().sum(|cost| {
                let len = u128::from(cost.elements[rank]);
                let states = states_of(config.var_rule(), config.state, len);
                u128::from(cost.masters[rank]) + states + F32 * len
            });
            Self {
                rank,
                weights: by_rank(|cost| &cost.stored),
                masters: by_rank(|cost| &cost.masters),
                // Blocks of states end with each weight.
                states: weights.sum(|cost| config.state_bytes(cost.elements[rank].into())),
                matrices: matrices.bytes[rank],
                gradients: F32 * own,
                parts: by_rank(|cost| &cost.parts),
                variable_state: var,
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
    pub fn rows(&self) -> [(&'static str, u128); 12] {
        [
            ("weights, stored", self.weights),
            (self.masters_are, self.masters),
            (self.states_are, self.states),
            ("matrices made orthogonal, bf16", self.matrices),
            ("reduced gradients, f32", self.gradients),
            ("gathered at once", self.gathered),
            ("parts kept for backward", self.parts),
            ("decoded at once, f32", self.decoded),
            ("staged beside full weights", self.staged),
            ("buckets of full gradients, f32", self.buckets),
            ("variables, full f32 values", self.variables),
            ("variables, sharded state", self.variable_state),
        ]
    }
}

/// Memory in which gradients of weights whose tiles ranks own are in the order of rows: a buffer of each length.
fn to_tiles<R: Recipe>(weights: &Weights<R>) -> u128 {
    let lens = weights.in_tiles().map(|shape| shape.elements() as u128);
    let lens: BTreeSet<u128> = lens.collect();
    F32 * lens.iter().sum::<u128>()
}

/// Memory that weights are decoded in: one buffer of each length on the device, and the longest on the host.
fn decoded<R: Recipe>(weights: &Weights<R>) -> u128 {
    let shapes = weights.shapes().map(|shape| shape.elements() as u128);
    let elements: BTreeSet<u128> = shapes.collect();
    let longest = elements.last().copied().unwrap_or(0);
    F32 * (elements.iter().sum::<u128>() + longest)
}

/// Memory of full gradients ([`grad_slabs`]): two slabs of a length where buckets travel while others are written, on devices and on a
/// single rank, which waits for nobody.
fn bucket_bytes(Buckets { lens, .. }: &Buckets<'_>, config: &CostConfig) -> u128 {
    // Those that stay until the last micro-batch, beside a slab in which the next ones are written and added from.
    let kept = match config.keeps_gradients() {
        true => lens.iter().map(|&len| len as u128).sum(),
        false => 0,
    };
    let enqueued = config.vars == VarPlace::Backend || config.mesh.world() == 1;
    let at_once = if enqueued && kept == 0 { 2 } else { 1 };
    let slabs = grad_slabs(lens, most_in_bucket(config), at_once);
    let elements = slabs
        .iter()
        .map(|slabs| slabs.len as u128 * slabs.count as u128);
    F32 * (kept + elements.sum::<u128>())
}

/// Memory between devices and sums ([`ReduceStaging`]) of the rank that has most: gradients in the dtype of the wire with the parts of all
/// ranks, sums on their way to the ranks that own them, and sums in f32 that are added to those of earlier micro-batches. Each communicator that reduces buckets has
/// memory of its own; a rank that is alone has one.
pub(super) fn staging(buckets: &Buckets<'_>, config: &CostConfig) -> u128 {
    let world = config.mesh.shard;
    let adder = buckets.adder();
    if config.vars == VarPlace::Host || (adder == Adder::Library && world == 1) {
        return 0;
    }
    let mut most = vec![[ReduceStaging::default(); GRAD_REDUCERS]; world];
    for bucket in buckets.each() {
        let lens = bucket.owned.iter().map(|owned| spanned(owned).len());
        let lens: Vec<usize> = lens.collect();
        for (rank, most) in most.iter_mut().enumerate() {
            let grads = bucket.owned.iter().zip(&lens);
            let grads = grads.map(|(owned, &len)| StagedGrad {
                dtype: FloatDtype::F32,
                wire: config.grad_wire,
                len,
                own: owned[rank].len(),
                accumulate: config.reductions() > 1,
            });
            let grads: Vec<_> = grads.collect();
            let staged = ReduceStaging::of_batch(&grads, &bucket.runs, adder, rank, world);
            for (reducer, count) in bucket.counts.into_iter().enumerate() {
                let reducer = if world > 1 { reducer } else { 0 };
                if count > 0 {
                    most[reducer] = most[reducer].max(staged);
                }
            }
        }
    }
    let of_rank = |most: [ReduceStaging; GRAD_REDUCERS]| {
        let bytes = most.map(|staged| staged.bytes() as u128);
        bytes.iter().sum::<u128>()
    };
    most.into_iter().map(of_rank).max().unwrap_or(0)
}
