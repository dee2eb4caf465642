//! [`Reshard`]: what a gather group does after forward, and the parts that a smaller group of ranks keeps.

use std::sync::Arc;

use lowp_format::ReshardAfterForward;
use lowp_kernels::Backend;

use super::GatherPool;
use super::kind::{GatherKind, ParamPlans};
use super::meter::Metered;
use super::pool::DestinationSet;
use crate::ShardError;
use lowp_comm::{Communicator, or_abort};

/// What becomes of gathered weights between forward and backward: a [`ReshardAfterForward`] with the ranks that it needs.
#[derive(Clone, Debug)]
pub enum Reshard<B: Backend> {
    /// They are freed; backward gathers again.
    Yes,
    /// They are kept.
    No,
    /// Each of these ranks, some of those that share out the weights, keeps a part; backward gathers the parts among them.
    /// Every rank that shares out the weights is in such a group, and all groups have one size.
    Group(Arc<dyn Communicator<B>>),
}

impl<B: Backend> Reshard<B> {
    /// The policy for the ranks of `shard`, which share out the weights: groups are of neighbours. Collective. Gather groups
    /// that gather one after the other can all have clones of one.
    ///
    /// # Errors
    /// A group that does not divide the ranks, or a failure of the split.
    pub fn new(
        policy: ReshardAfterForward,
        shard: &Arc<dyn Communicator<B>>,
    ) -> Result<Self, ShardError> {
        let made = || -> Result<Self, ShardError> {
            Ok(match policy.among(shard.world_size())? {
                ReshardAfterForward::Yes => Reshard::Yes,
                ReshardAfterForward::No => Reshard::No,
                ReshardAfterForward::Group(ranks) => {
                    let rank = shard.rank();
                    Reshard::Group(shard.split(rank / ranks, rank % ranks)?)
                }
            })
        };
        or_abort(&**shard, made())
    }

    /// The policy as a value.
    pub fn policy(&self) -> ReshardAfterForward {
        match self {
            Reshard::Yes => ReshardAfterForward::Yes,
            Reshard::No => ReshardAfterForward::No,
            Reshard::Group(group) => ReshardAfterForward::Group(group.world_size()),
        }
    }

    /// The policy for the ranks of `shard`: a group that was made by hand may be one rank or all of them, which is a policy
    /// without groups.
    pub(super) fn among(self, shard: &dyn Communicator<B>) -> Result<Self, ShardError> {
        let Reshard::Group(group) = self else {
            return Ok(self);
        };
        let [theirs, ours] = [group.control().members(), shard.control().members()];
        if let Some(&rank) = theirs.iter().find(|rank| !ours.contains(rank)) {
            return Err(ShardError::ReshardMember {
                rank,
                members: ours.to_vec(),
            });
        }
        let policy = ReshardAfterForward::Group(theirs.len()).among(ours.len())?;
        Ok(match policy {
            ReshardAfterForward::Yes => Reshard::Yes,
            ReshardAfterForward::No => Reshard::No,
            ReshardAfterForward::Group(_) => Reshard::Group(group),
        })
    }
}

impl<B: Backend> From<bool> for Reshard<B> {
    fn from(reshard: bool) -> Self {
        if reshard { Reshard::Yes } else { Reshard::No }
    }
}

/// What a rank keeps of the full buffers that backward needs, in the order of the moves that bring them together again.
#[derive(Debug)]
pub(super) struct Parts<B: Backend> {
    pub(super) group: Arc<dyn Communicator<B>>,
    pub(super) buffers: Vec<B::Buffer<u8>>,
    /// The bytes of the parts.
    _metered: Metered,
    /// Whether they are of the last forward.
    pub(super) filled: bool,
}

impl<B: Backend> Parts<B> {
    /// Memory for the parts of `plans`, if the policy keeps any, which work of `stream` fills.
    pub(super) fn new(
        reshard: &Reshard<B>,
        pool: &GatherPool<B>,
        plans: &[ParamPlans],
        stream: &B,
    ) -> Result<Option<Self>, ShardError> {
        let Reshard::Group(group) = reshard else {
            return Ok(None);
        };
        let rank = group.rank();
        let steps = plans.iter().filter_map(|p| p.plan(GatherKind::Parts));
        let lens = steps.flat_map(|plan| plan.steps.iter().filter_map(|s| s.piece(rank)));
        let mut metered = pool.metered();
        let buffers = lens.map(|len| metered.alloc(&pool.backend, len));
        let buffers = buffers.collect::<Result<_, _>>()?;
        stream.wait_for(&pool.backend)?;
        Ok(Some(Self {
            group: Arc::clone(group),
            buffers,
            _metered: metered,
            filled: false,
        }))
    }

    /// Has `stream` copy the parts out of the full buffers.
    pub(super) fn fill(&self, stream: &B, set: &DestinationSet<B>) -> Result<(), ShardError> {
        let rank = self.group.rank();
        let moves = &set.work(GatherKind::Parts).moves;
        for (part, m) in self.buffers.iter().zip(moves) {
            let range = m.ranges[rank].clone();
            if !range.is_empty() {
                stream.copy(&m.dest, range, part, 0)?;
            }
        }
        Ok(())
    }
}
