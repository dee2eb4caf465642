//! [`Held`]: what a rank has of a layer's weight between uses.

use lowp_format::{Phase, QuantizedTensor, Recipe};
use lowp_kernels::Backend;
use lowp_shard::{GatherAccount, GatherGroup, ParamAccount, ShardError};

/// A weight that is gathered for each use, or that every rank has whole.
#[derive(Debug)]
pub(crate) enum Held<B: Backend, R: Recipe> {
    /// Rows, gathered and freed around each use.
    Rows(Box<GatherGroup<B, R>>),
    /// The full weight; the optimizer's step gathers it.
    Whole(Box<QuantizedTensor<B::Buffer<u8>, R>>),
}

impl<B: Backend, R: Recipe> Held<B, R> {
    /// What gathers it, if something does.
    pub(crate) fn rows(&mut self) -> Option<&mut GatherGroup<B, R>> {
        match self {
            Self::Rows(group) => Some(group),
            Self::Whole(_) => None,
        }
    }

    /// Makes the weight ready for `phase`. Collective where it is gathered.
    pub(crate) fn unshard(&mut self, phase: Phase) -> Result<(), ShardError> {
        self.rows().map_or(Ok(()), |group| group.unshard(phase))
    }

    /// The full weight, which is ready.
    pub(crate) fn tensor(&self) -> Result<&QuantizedTensor<B::Buffer<u8>, R>, ShardError> {
        match self {
            Self::Rows(group) => group.tensor(0),
            Self::Whole(tensor) => Ok(tensor),
        }
    }

    /// The number of the pool's buffers that the weight is in, if it is in such.
    pub(crate) fn set(&self) -> Option<u64> {
        match self {
            Self::Rows(group) => group.set(),
            Self::Whole(_) => None,
        }
    }

    /// Says that the phase is over.
    pub(crate) fn reshard(&mut self) {
        if let Self::Rows(group) = self {
            group.reshard();
        }
    }

    /// Frees what was gathered whatever the policy.
    pub(crate) fn release(&mut self) {
        if let Self::Rows(group) = self {
            group.release();
        }
    }

    /// What uses of the weight send, and what is held of it. A whole weight sends nothing then.
    pub(crate) fn account(&self) -> GatherAccount {
        match self {
            Self::Rows(group) => group.account(),
            Self::Whole(tensor) => GatherAccount {
                params: vec![ParamAccount {
                    full: tensor.shape(),
                    wire_bytes: 0,
                    sent_bytes: 0,
                    again_bytes: 0,
                    shard_bytes: tensor.bytes(),
                    gathered_bytes: 0,
                    part_bytes: 0,
                }],
                counted_sent_bytes: 0,
                gathers: 0,
            },
        }
    }
}
