//! [`GatherAccount`]: bytes sent and resident, per parameter and in total.

use lowp_format::{GatherPlan, Recipe, Shape};
use lowp_kernels::Backend;

use super::kind::{GatherKind, ParamPlans};
use super::pooled;
use crate::ShardedTensor;
use lowp_comm::Communicator;

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
    /// What this rank sends for one more forward pass, where activations are computed again in backward: nothing if what
    /// forward gathered is still there.
    pub again_bytes: usize,
    /// Bytes of this rank's shard.
    pub shard_bytes: usize,
    /// Bytes of the full tensor while it is gathered, the larger of the two phases.
    pub gathered_bytes: usize,
    /// Bytes that this rank keeps of the full tensor from forward to backward, apart from `gathered_bytes`: its
    /// part where a group of ranks keeps them ([`Reshard::Group`](crate::Reshard::Group)).
    pub part_bytes: usize,
}

impl ParamAccount {
    pub(super) fn new<B: Backend, R: Recipe>(
        tensor: &ShardedTensor<B, R>,
        plans: &ParamPlans,
        comm: &dyn Communicator<B>,
        group: Option<&dyn Communicator<B>>,
        keeps: bool,
    ) -> Self {
        let pieces = |plan: &GatherPlan, rank: usize| -> usize {
            plan.steps.iter().filter_map(|step| step.piece(rank)).sum()
        };
        // The gathers of a step, and which piece is this rank's.
        let forward = plans
            .plan(GatherKind::Forward)
            .map(|plan| (plan, comm.rank()));
        let parts = plans.plan(GatherKind::Parts).zip(group);
        let parts = parts.map(|(plan, group)| (plan, group.rank()));
        let backward = plans
            .plan(GatherKind::Backward)
            .map(|plan| (plan, comm.rank()));
        let again = forward.filter(|_| !keeps);
        let step = forward.into_iter().chain(parts.or(backward));
        let held = |plan: &GatherPlan| -> usize {
            let kept = plan.kept().filter(|spec| pooled(spec));
            kept.map(|spec| spec.bytes(plan.full)).sum()
        };
        Self {
            full: tensor.spec().full(),
            wire_bytes: step.clone().map(|(plan, _)| plan.wire_bytes()).sum(),
            sent_bytes: step.clone().map(|(plan, rank)| pieces(plan, rank)).sum(),
            again_bytes: again.map_or(0, |(plan, rank)| pieces(plan, rank)),
            shard_bytes: tensor.resident_bytes(),
            gathered_bytes: step.map(|(plan, _)| held(plan)).max().unwrap_or(0),
            part_bytes: parts.map_or(0, |(plan, rank)| pieces(plan, rank)),
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

    /// Bytes that this rank puts on the wire for one more forward pass in backward.
    pub fn again_bytes(&self) -> usize {
        self.params.iter().map(|p| p.again_bytes).sum()
    }

    /// Bytes of this rank's shards.
    pub fn shard_bytes(&self) -> usize {
        self.params.iter().map(|p| p.shard_bytes).sum()
    }

    /// Bytes that this rank keeps of the full tensors from forward to backward.
    pub fn part_bytes(&self) -> usize {
        self.params.iter().map(|p| p.part_bytes).sum()
    }

    /// Bytes of the full tensors while they are gathered.
    pub fn gathered_bytes(&self) -> usize {
        self.params.iter().map(|p| p.gathered_bytes).sum()
    }
}
