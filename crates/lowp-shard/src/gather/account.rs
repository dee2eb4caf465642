//! [`GatherAccount`]: bytes sent and resident, per parameter and in total.

use lowp_format::{GatherPlan, Recipe, Shape};
use lowp_kernels::Backend;

use super::kind::{ByKind, GatherKind, KindExchange, ParamPlans, pooled};
use crate::ShardedTensor;
use lowp_comm::Communicator;

/// What one parameter costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParamAccount {
    /// Shape of the full matrix.
    pub full: Shape,
    /// Bytes that all ranks together put on the wire in one step (forward and backward), by the
    /// plans.
    pub wire_bytes: usize,
    /// This rank's part of `wire_bytes`.
    pub sent_bytes: usize,
    /// This rank's part of a step in which forward runs again before backward, which then gathers what is not there.
    pub recompute_sent_bytes: usize,
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
        let rest = plans.plan(GatherKind::Rest).map(|plan| (plan, comm.rank()));
        let again = forward.filter(|_| !keeps);
        let recompute = forward.into_iter().chain(again);
        let recompute = recompute.chain(rest.or(parts).or(backward));
        let step = forward.into_iter().chain(parts.or(backward));
        let held = |plan: &GatherPlan| -> usize {
            let kept = plan.kept().filter(|spec| pooled(spec));
            kept.map(|spec| spec.bytes(plan.full)).sum()
        };
        Self {
            full: tensor.spec().full(),
            wire_bytes: step.clone().map(|(plan, _)| plan.wire_bytes()).sum(),
            sent_bytes: step.clone().map(|(plan, rank)| pieces(plan, rank)).sum(),
            recompute_sent_bytes: recompute.map(|(plan, rank)| pieces(plan, rank)).sum(),
            shard_bytes: tensor.resident_bytes(),
            gathered_bytes: step.map(|(plan, _)| held(plan)).max().unwrap_or(0),
            part_bytes: parts.map_or(0, |(plan, rank)| pieces(plan, rank)),
        }
    }
}

/// Bytes of messages that belong to no piece ([`Exchange::padding`](super::Exchange::padding)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Padding {
    /// Bytes of padding that all ranks send.
    pub wire_bytes: usize,
    /// Bytes of padding that this rank sends.
    pub sent_bytes: usize,
    /// Of this rank, where forward runs again before backward.
    pub recompute_sent_bytes: usize,
}

impl Padding {
    /// That of each kind of gather by itself, of the rank that is `ranks[kind]` of those that make it.
    pub(super) fn new(
        plans: &[ParamPlans],
        ranks: ByKind<usize>,
        world: usize,
        large: usize,
    ) -> ByKind<Self> {
        GatherKind::ALL.map(|kind| {
            let padding = KindExchange::new(plans, kind, large).exchange.padding;
            let groups = world / padding.len().max(1);
            let own = padding.get(ranks[kind as usize]).copied().unwrap_or(0);
            Self {
                wire_bytes: groups * padding.iter().sum::<usize>(),
                sent_bytes: own,
                recompute_sent_bytes: own,
            }
        })
    }

    /// That of a step, of those of each kind: `parts` says from where backward gathers, `keeps` whether it is there, and `rest` whether a part of it is
    /// where forward runs again.
    pub(super) fn of_step(kinds: &ByKind<Self>, parts: bool, keeps: bool, rest: bool) -> Self {
        let [forward, backward, of_parts, of_rest] = kinds;
        let backward = if parts { of_parts } else { backward };
        let again = if keeps { 0 } else { forward.sent_bytes };
        let last = if rest { of_rest } else { backward };
        Self {
            wire_bytes: forward.wire_bytes + backward.wire_bytes,
            sent_bytes: forward.sent_bytes + backward.sent_bytes,
            recompute_sent_bytes: forward.sent_bytes + again + last.sent_bytes,
        }
    }
}

/// What a group costs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatherAccount {
    /// One for each parameter, in the order of [`GatherGroup::params`](crate::GatherGroup::params).
    pub params: Vec<ParamAccount>,
    /// What is sent beside the pieces of parameters.
    pub padding: Padding,
    /// Bytes that this rank sent so far, counted by the communicator.
    pub counted_sent_bytes: u64,
    /// Number of collectives so far.
    pub gathers: u64,
}

impl GatherAccount {
    /// The account of parameter `param` alone. What the group counts is in that of the first.
    #[must_use]
    pub fn of_param(mut self, param: usize) -> Self {
        self.params = vec![self.params[param]];
        if param > 0 {
            self.padding = Padding::default();
            (self.counted_sent_bytes, self.gathers) = (0, 0);
        }
        self
    }

    /// Bytes that all ranks together put on the wire in one step, by the plans.
    pub fn wire_bytes(&self) -> usize {
        self.params.iter().map(|p| p.wire_bytes).sum::<usize>() + self.padding.wire_bytes
    }

    /// Bytes that this rank puts on the wire in one step, by the plans.
    pub fn sent_bytes(&self) -> usize {
        self.params.iter().map(|p| p.sent_bytes).sum::<usize>() + self.padding.sent_bytes
    }

    /// Bytes that this rank puts on the wire in a step in which forward runs again before backward.
    pub fn recompute_sent_bytes(&self) -> usize {
        let params = self.params.iter().map(|p| p.recompute_sent_bytes);
        params.sum::<usize>() + self.padding.recompute_sent_bytes
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
