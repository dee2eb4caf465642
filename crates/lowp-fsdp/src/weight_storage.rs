//! [`WeightStorage`]: what a rank has of a layer's weight between uses, and [`WeightBlock`], the weights that are gathered together.

use std::sync::{Arc, Mutex, MutexGuard};

use lowp_format::{Phase, QuantizedTensor, Recipe};
use lowp_kernels::{Backend, KernelError};
use lowp_shard::{GatherAccount, GatherGroup, GatherWatch, Padding, ParamAccount, ShardError};

type Full<B, R> = QuantizedTensor<<B as Backend>::Buffer<u8>, R>;

/// The weights of a block of the model. The first that is used gathers all of them, and the last that is used ends the phase.
#[derive(Debug)]
pub(crate) struct WeightBlock<B: Backend, R: Recipe> {
    group: GatherGroup<B, R>,
    /// Those that were used since they were gathered.
    used: Vec<bool>,
}

impl<B: Backend, R: Recipe> WeightBlock<B, R> {
    pub(crate) fn new(group: GatherGroup<B, R>) -> Arc<Mutex<Self>> {
        let used = vec![false; group.params().len()];
        Arc::new(Mutex::new(Self { group, used }))
    }

    fn unshard(&mut self, phase: Phase) -> Result<(), ShardError> {
        if self.group.held() != Some(phase) {
            self.used.fill(false);
        }
        self.group.unshard(phase)
    }

    fn end_use(&mut self, param: usize) {
        self.used[param] = true;
        if self.used.iter().all(|&used| used) {
            self.used.fill(false);
            self.group.reshard();
        }
    }

    fn release(&mut self) {
        self.used.fill(false);
        self.group.release();
    }
}

/// A weight that is gathered for each use, or that every rank has whole.
#[derive(Debug)]
pub(crate) enum WeightStorage<B: Backend, R: Recipe> {
    /// Rows of a parameter of a block, gathered and freed around its uses.
    Rows(Arc<Mutex<WeightBlock<B, R>>>, usize),
    /// The full weight; the optimizer's step gathers it.
    Whole(Box<Full<B, R>>),
}

/// [`WeightStorage`], with its block locked for this thread.
pub(crate) enum LockedWeight<'a, B: Backend, R: Recipe> {
    Rows(MutexGuard<'a, WeightBlock<B, R>>, usize),
    Whole(&'a Full<B, R>),
}

impl<B: Backend, R: Recipe> WeightStorage<B, R> {
    /// Whether both are gathered together.
    pub(crate) fn is_with(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Rows(a, _), Self::Rows(b, _)) => Arc::ptr_eq(a, b),
            _ => false,
        }
    }

    pub(crate) fn lock(&self) -> Result<LockedWeight<'_, B, R>, ShardError> {
        Ok(match self {
            Self::Rows(block, param) => {
                LockedWeight::Rows(block.lock().map_err(|_| KernelError::Poisoned)?, *param)
            }
            Self::Whole(tensor) => LockedWeight::Whole(tensor),
        })
    }
}

impl<B: Backend, R: Recipe> LockedWeight<'_, B, R> {
    /// What gathers the block, and the weight's number in it, if something does.
    pub(crate) fn rows(&self) -> Option<(&GatherGroup<B, R>, usize)> {
        match self {
            Self::Rows(block, param) => Some((&block.group, *param)),
            Self::Whole(_) => None,
        }
    }

    /// Has `watch` called for the gathers of the block.
    pub(crate) fn watch(&mut self, watch: GatherWatch<B>) {
        if let Self::Rows(block, _) = self {
            block.group.watch(watch);
        }
    }

    /// Starts the gather of the block for `phase`. Collective where it is gathered.
    pub(crate) fn prefetch(&mut self, phase: Phase) -> Result<(), ShardError> {
        match self {
            Self::Rows(block, _) => block.group.prefetch(phase),
            Self::Whole(_) => Ok(()),
        }
    }

    /// Makes the weight ready for `phase`. Collective where it is gathered.
    pub(crate) fn unshard(&mut self, phase: Phase) -> Result<(), ShardError> {
        match self {
            Self::Rows(block, _) => block.unshard(phase),
            Self::Whole(_) => Ok(()),
        }
    }

    /// The full weight, which is ready.
    pub(crate) fn tensor(&self) -> Result<&Full<B, R>, ShardError> {
        match self {
            Self::Rows(block, param) => block.group.tensor(*param),
            Self::Whole(tensor) => Ok(tensor),
        }
    }

    /// The number of the pool's buffers that the weight is in, if it is in such.
    pub(crate) fn set(&self) -> Option<u64> {
        self.rows().and_then(|(group, _)| group.set())
    }

    /// Says that the weight was used; with the last of the block the phase is over.
    pub(crate) fn end_use(&mut self) {
        if let Self::Rows(block, param) = self {
            block.end_use(*param);
        }
    }

    /// Frees what was gathered of the block whatever the policy.
    pub(crate) fn release(&mut self) {
        if let Self::Rows(block, _) = self {
            block.release();
        }
    }

    /// What uses of the weight send, and what is held of it. A whole weight sends nothing then.
    pub(crate) fn account(&self) -> GatherAccount {
        match self {
            Self::Rows(block, param) => block.group.account().of_param(*param),
            Self::Whole(tensor) => GatherAccount {
                params: vec![ParamAccount {
                    full: tensor.shape(),
                    wire_bytes: 0,
                    sent_bytes: 0,
                    recompute_sent_bytes: 0,
                    shard_bytes: tensor.bytes(),
                    gathered_bytes: 0,
                    part_bytes: 0,
                }],
                padding: Padding::default(),
                counted_sent_bytes: 0,
                gathers: 0,
            },
        }
    }
}
