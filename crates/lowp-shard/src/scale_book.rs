//! [`ScaleBook`]: the amax observations, histories and scales of all tensors, owned by the
//! training loop. Recipes and tensors hold no state.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use lowp_format::{Code, KernelKey, Recipe, ScaleSource, tensor_scale};
use lowp_kernels::{Backend, HistoryJob, Slot, StepScalars, TensorInput, Work};

use crate::{Communicator, ShardError, or_abort};

/// What a tensor's scale depends on, as far as it needs an entry in the book.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Entry {
    rule: ScaleSource,
    element: Code,
}

/// Collects the tensors of a [`ScaleBook`]; sizes are fixed when it is built.
#[derive(Debug)]
pub struct ScaleBookBuilder {
    id: u64,
    entries: Vec<Entry>,
    blocks: usize,
}

impl Default for ScaleBookBuilder {
    /// A builder of its own: no entries yet, and a new [`ScaleBookBuilder::id`].
    fn default() -> Self {
        static BUILDERS: AtomicU64 = AtomicU64::new(0);
        Self {
            id: BUILDERS.fetch_add(1, Ordering::Relaxed),
            entries: Vec::new(),
            blocks: 0,
        }
    }
}

impl ScaleBookBuilder {
    /// A number that this builder and the book made from it share with no others of the process.
    /// An entry means nothing in another book; who keeps entries can check with this.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Registers a tensor of `recipe`. Returns its entry, or `None` where no scale depends on a
    /// tensor amax.
    pub fn register(&mut self, recipe: &impl Recipe) -> Option<usize> {
        self.register_kernel(recipe.kernel(), recipe.scale_source())
    }

    /// Registers a tensor by its kernel ingredients, as GEMM operands are described.
    pub fn register_kernel(&mut self, kernel: KernelKey, rule: ScaleSource) -> Option<usize> {
        rule.observes_tensor_amax().then(|| {
            self.entries.push(Entry {
                rule,
                element: kernel.element,
            });
            self.entries.len() - 1
        })
    }

    /// Reserves `count` block amaxes (flat shards only) and returns the index of the first,
    /// counted from the first block amax; [`ScaleBook::blocks_start`] is added when the book is
    /// built.
    pub fn reserve_blocks(&mut self, count: usize) -> usize {
        self.blocks += count;
        self.blocks - count
    }

    /// Allocates the book. Every scale starts at 1, every history at zeros.
    ///
    /// # Errors
    /// The backend has no room.
    pub fn build<B: Backend>(self, backend: &B) -> Result<ScaleBook<B>, ShardError> {
        let Self {
            id,
            entries,
            blocks,
        } = self;
        let observed = backend.alloc::<f32>(entries.len() + blocks)?;
        let scales = backend.upload(&vec![1.0f32; entries.len()])?;
        let mut jobs = Vec::new();
        for (index, &Entry { rule, element }) in entries.iter().enumerate() {
            if let ScaleSource::History {
                window,
                algorithm,
                margin,
            } = rule
            {
                jobs.push(HistoryJob {
                    observed: observed.clone(),
                    scales: scales.clone(),
                    index,
                    history: backend.alloc::<f32>(window)?,
                    algorithm,
                    margin,
                    element,
                });
            }
        }
        let history = |job: &HistoryJob<B>| (job.index, job.history.clone());
        let histories = jobs.iter().map(history).collect();
        let roll = backend.plan(Work::History(jobs))?;
        Ok(ScaleBook {
            id,
            backend: backend.clone(),
            entries,
            blocks,
            observed,
            scales,
            histories,
            roll,
        })
    }
}

/// The scales of a model. A cast has three phases: *observe* raises entries of the observed vector,
/// *agree* reduces that one vector over all ranks and rolls the histories of delayed scales,
/// *encode* reads delayed scales, or makes a scale of the agreed amax and spends it
/// ([`TensorInput::Observed`]).
#[derive(Debug)]
pub struct ScaleBook<B: Backend> {
    id: u64,
    backend: B,
    entries: Vec<Entry>,
    blocks: usize,
    observed: B::Buffer<f32>,
    scales: B::Buffer<f32>,
    /// Those of delayed scales, by entry.
    histories: BTreeMap<usize, B::Buffer<f32>>,
    roll: B::Plan,
}

impl<B: Backend> ScaleBook<B> {
    /// The number of the builder that it was made from ([`ScaleBookBuilder::id`]).
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Where amax jobs write: first the tensor amaxes by entry, then the block amaxes.
    pub fn observed(&self) -> &B::Buffer<f32> {
        &self.observed
    }

    /// The entry whose amax an observation raises.
    pub fn observed_slot(&self, index: usize) -> Slot<B> {
        Slot {
            buffer: self.observed.clone(),
            index,
        }
    }

    /// What encoding reads for `index`: the delayed scale, or the agreed amax that it makes its
    /// scale of and spends. Every rank must encode with it after an agreement, also one that holds
    /// no rows, or its old amax would count in the next one.
    pub fn tensor_input(&self, index: usize) -> TensorInput<B> {
        let observed = |pow2, epsilon| TensorInput::Observed {
            slot: self.observed_slot(index),
            pow2,
            epsilon,
        };
        match self.entries.get(index).map(|entry| entry.rule) {
            Some(ScaleSource::TensorAmax { pow2, epsilon }) => observed(pow2, epsilon),
            Some(ScaleSource::TensorAndBlockAmax) => observed(false, 0.0),
            _ => TensorInput::Known(Slot {
                buffer: self.scales.clone(),
                index,
            }),
        }
    }

    /// Index of the first block amax in the observed vector.
    pub fn blocks_start(&self) -> usize {
        self.entries.len()
    }

    /// What encoding uses, by entry: the encode scale, or the tensor amax of two-level scales. For
    /// checkpoints and for looking at: encodes take it from where it lies.
    ///
    /// # Errors
    /// The backend failed.
    pub fn scales(&self) -> Result<Vec<f32>, ShardError> {
        let mut scales = self.backend.download(&self.scales)?;
        let observed = self.backend.download(&self.observed)?;
        for ((scale, entry), amax) in scales.iter_mut().zip(&self.entries).zip(observed) {
            match entry.rule {
                ScaleSource::TensorAmax { pow2, epsilon } => {
                    *scale = tensor_scale(amax.abs(), entry.element, pow2, epsilon);
                }
                ScaleSource::TensorAndBlockAmax => *scale = amax.abs(),
                _ => {}
            }
        }
        Ok(scales)
    }

    /// Replaces the delayed scale of `index`, as loading a checkpoint does. Scales that are made of
    /// an observed amax follow that.
    ///
    /// # Errors
    /// The entry does not exist.
    pub fn set_scale(&self, index: usize, value: f32) -> Result<(), ShardError> {
        Ok(self.backend.write(&self.scales, index, &[value])?)
    }

    /// The amax history of `index` (delayed scaling), slot 0 first.
    ///
    /// # Errors
    /// The backend failed.
    pub fn history(&self, index: usize) -> Result<Option<Vec<f32>>, ShardError> {
        let history = self.histories.get(&index);
        Ok(history
            .map(|history| self.backend.download(history))
            .transpose()?)
    }

    /// Agrees on all observations with one max-reduction over one vector, then rolls the histories
    /// of delayed scales. Nothing else runs: encodes read what was agreed.
    ///
    /// Every rank must call it, also one that holds no rows.
    ///
    /// # Errors
    /// A rank failed, or called something else.
    pub fn agree(&self, comm: &dyn Communicator<B>) -> Result<(), ShardError> {
        if self.entries.len() + self.blocks == 0 {
            return Ok(());
        }
        comm.all_reduce_max(&self.observed)?;
        or_abort(comm, self.roll())
    }

    /// Rolls the histories without a reduction: for tensors that one rank holds whole.
    ///
    /// # Errors
    /// The backend failed.
    pub fn roll(&self) -> Result<(), ShardError> {
        if self.histories.is_empty() {
            return Ok(());
        }
        Ok(self.backend.run(&self.roll, &StepScalars::default())?)
    }
}
