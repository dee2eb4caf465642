//! [`GatherAccount`]: bytes sent and resident, per parameter and in total.

use lowp_format::{GatherPlan, GatherStep, Recipe, Shape};
use lowp_kernels::Backend;

use super::pooled;
use crate::ShardedTensor;

/// What one parameter costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParamAccount {
    /// Full shape.
    pub full: Shape,
    /// Bytes that all ranks together put on the wire in one step (forward and backward), by the
    /// plans.
    pub wire_bytes: usize,
    /// This rank's part of them.
    pub sent_bytes: usize,
    /// Bytes of this rank's shard.
    pub shard_bytes: usize,
    /// Bytes of the full tensor while it is gathered, the larger of the two phases.
    pub gathered_bytes: usize,
}

impl ParamAccount {
    pub(super) fn new<'a, B: Backend, R: Recipe>(
        tensor: &ShardedTensor<B, R>,
        plans: impl Iterator<Item = &'a GatherPlan> + Clone,
        rank: usize,
    ) -> Self {
        let sent = |step: &GatherStep| match step {
            GatherStep::Concat { pieces, .. } => pieces[rank],
            GatherStep::Derive { .. } | GatherStep::Replicated { .. } => 0,
        };
        let held = |plan: &GatherPlan| -> usize {
            let kept = plan.kept().filter(|spec| pooled(spec.key.part));
            kept.map(|spec| spec.bytes(plan.full)).sum()
        };
        Self {
            full: tensor.spec().full(),
            wire_bytes: plans.clone().map(GatherPlan::wire_bytes).sum(),
            sent_bytes: plans.clone().flat_map(|plan| &plan.steps).map(sent).sum(),
            shard_bytes: tensor.resident_bytes(),
            gathered_bytes: plans.map(held).max().unwrap_or(0),
        }
    }
}

/// What a group costs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatherAccount {
    /// Per parameter.
    pub params: Vec<ParamAccount>,
    /// Bytes that this rank sent so far, counted by the communicator.
    pub counted_sent_bytes: u64,
    /// Number of collectives so far.
    pub gathers: u64,
}

impl GatherAccount {
    /// Bytes that all ranks together put on the wire in one step, by the plans.
    pub fn wire_bytes(&self) -> usize {
        self.params.iter().map(|p| p.wire_bytes).sum()
    }

    /// Bytes that this rank puts on the wire in one step, by the plans.
    pub fn sent_bytes(&self) -> usize {
        self.params.iter().map(|p| p.sent_bytes).sum()
    }

    /// Bytes of this rank's shards.
    pub fn shard_bytes(&self) -> usize {
        self.params.iter().map(|p| p.shard_bytes).sum()
    }

    /// Bytes of the full tensors while they are gathered.
    pub fn gathered_bytes(&self) -> usize {
        self.params.iter().map(|p| p.gathered_bytes).sum()
    }
}
