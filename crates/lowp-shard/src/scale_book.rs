//! [`ScaleBook`]: the amax observations, histories and scales of all tensors, owned by the
//! training loop. Recipes and tensors hold no state.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use lowp_format::{Code, KernelKey, Recipe, ScaleSource, Shape, cdiv, tensor_scale};
use lowp_kernels::{Backend, BlockAmax, HistoryJob, Slot, StepScalars, TensorInput, Work};

use crate::{Communicator, ShardError, or_abort, ordered};

/// What a tensor's scale depends on, as far as it needs an entry in the book.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Entry {
    rule: ScaleSource,
    element: Code,
}

impl Entry {
    /// What encoding uses, of the `known` scale and the observed `amax`.
    fn used(&self, known: f32, amax: f32) -> f32 {
        match self.rule {
            ScaleSource::TensorAmax { pow2, epsilon } => {
                tensor_scale(amax.abs(), self.element, pow2, epsilon)
            }
            ScaleSource::TensorAndBlockAmax => amax.abs(),
            _ => known,
        }
    }
}

/// An entry of a scale book, as its builder gave it out. It means nothing in another book, which
/// rejects it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ScaleSlot {
    book: u64,
    index: usize,
}

/// The entries of the block amaxes of a flat shard, as a builder reserved them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockSlots {
    book: u64,
    block: [usize; 2],
    /// Counted from the first block amax.
    start: usize,
}

impl BlockSlots {
    /// Block rows x columns.
    pub fn block(self) -> [usize; 2] {
        self.block
    }
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
    /// Entries carry it; who keeps a book beside other things can check with it.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Registers a tensor of `recipe`. Returns its entry, or `None` where no scale depends on a
    /// tensor amax.
    pub fn register(&mut self, recipe: &impl Recipe) -> Option<ScaleSlot> {
        self.register_kernel(recipe.kernel(), recipe.scale_source())
    }

    /// Registers a tensor by its kernel ingredients, as GEMM operands are described.
    pub fn register_kernel(&mut self, kernel: KernelKey, rule: ScaleSource) -> Option<ScaleSlot> {
        rule.observes_tensor_amax().then(|| {
            self.entries.push(Entry {
                rule,
                element: kernel.element,
            });
            ScaleSlot {
                book: self.id,
                index: self.entries.len() - 1,
            }
        })
    }

    /// Reserves the amaxes of the blocks of a matrix of `shape` (flat shards only).
    pub fn reserve_blocks(&mut self, shape: Shape, block: [usize; 2]) -> BlockSlots {
        let start = self.blocks;
        self.blocks += cdiv(shape.rows, block[0]) * cdiv(shape.cols, block[1]);
        BlockSlots {
            book: self.id,
            block,
            start,
        }
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
/// *encode* reads delayed scales, or makes a scale of the agreed amax and consumes it
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

    /// The entries of the book, in the order in which they were registered.
    pub fn slots(&self) -> impl ExactSizeIterator<Item = ScaleSlot> + use<B> {
        let book = self.id;
        (0..self.entries.len()).map(move |index| ScaleSlot { book, index })
    }

    /// The place of `slot` in the observed vector and in [`ScaleBook::scales`].
    ///
    /// # Errors
    /// The entry belongs to another book.
    pub fn index(&self, slot: ScaleSlot) -> Result<usize, ShardError> {
        self.own("the entry of a tensor", slot.book)?;
        Ok(slot.index)
    }

    fn own(&self, what: &'static str, book: u64) -> Result<(), ShardError> {
        if book == self.id {
            return Ok(());
        }
        Err(ShardError::OtherBook { what })
    }

    /// The entry whose amax an observation raises.
    ///
    /// # Errors
    /// The entry belongs to another book.
    pub fn observed_slot(&self, slot: ScaleSlot) -> Result<Slot<B>, ShardError> {
        Ok(Slot {
            index: self.index(slot)?,
            buffer: self.observed.clone(),
        })
    }

    /// Where the block amaxes of a flat shard lie in the observed vector.
    ///
    /// # Errors
    /// They were reserved in another book.
    pub fn block_amaxes(&self, slots: &[BlockSlots]) -> Result<Vec<BlockAmax>, ShardError> {
        let place = |slots: &BlockSlots| {
            self.own("the entries of block amaxes", slots.book)?;
            Ok(BlockAmax {
                block: slots.block,
                start: self.entries.len() + slots.start,
            })
        };
        slots.iter().map(place).collect()
    }

    /// What encoding reads for `slot`: the delayed scale, or the agreed amax that it makes its
    /// scale of and consumes. Every rank must encode with it after an agreement, also one that holds
    /// no rows, or its old amax would count in the next one.
    ///
    /// # Errors
    /// The entry belongs to another book.
    pub fn tensor_input(&self, slot: ScaleSlot) -> Result<TensorInput<B>, ShardError> {
        let index = self.index(slot)?;
        let observed = |pow2, epsilon| {
            let slot = self.observed_slot(slot)?;
            Ok(TensorInput::Observed {
                slot,
                pow2,
                epsilon,
            })
        };
        match self.entries.get(index).map(|entry| entry.rule) {
            Some(ScaleSource::TensorAmax { pow2, epsilon }) => observed(pow2, epsilon),
            Some(ScaleSource::TensorAndBlockAmax) => observed(false, 0.0),
            _ => Ok(TensorInput::Known(Slot {
                buffer: self.scales.clone(),
                index,
            })),
        }
    }

    /// What encoding uses, by entry: the encode scale, or the tensor amax of two-level scales. For
    /// looking at: encodes take it from where it lies.
    ///
    /// # Errors
    /// The backend failed.
    pub fn scales(&self) -> Result<Vec<f32>, ShardError> {
        let mut scales = self.backend.download(&self.scales)?;
        let observed = self.backend.download(&self.observed)?;
        for ((scale, entry), amax) in scales.iter_mut().zip(&self.entries).zip(observed) {
            *scale = entry.used(*scale, amax);
        }
        Ok(scales)
    }

    /// What encoding uses for `slot`, as [`ScaleBook::scales`] has it.
    ///
    /// # Errors
    /// The entry belongs to another book, or the backend failed.
    pub fn scale(&self, slot: ScaleSlot) -> Result<f32, ShardError> {
        let index = self.index(slot)?;
        let [mut known, mut amax] = [[0.0]; 2];
        self.backend.read(&self.scales, index, &mut known)?;
        self.backend.read(&self.observed, index, &mut amax)?;
        Ok(self.entries[index].used(known[0], amax[0]))
    }

    /// Replaces the delayed scale of `slot` by one that is known, such as that of a file. Scales that
    /// are made of an observed amax follow that.
    ///
    /// # Errors
    /// The entry belongs to another book.
    pub fn set_scale(&self, slot: ScaleSlot, value: f32) -> Result<(), ShardError> {
        let index = self.index(slot)?;
        Ok(self.backend.write(&self.scales, index, &[value])?)
    }

    /// The amax history of `slot` (delayed scaling), its slot 0 first.
    ///
    /// # Errors
    /// The entry belongs to another book, or the backend failed.
    pub fn history(&self, slot: ScaleSlot) -> Result<Option<Vec<f32>>, ShardError> {
        let history = self.histories.get(&self.index(slot)?);
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
        ordered(&self.backend, comm, || comm.all_reduce_max(&self.observed))?;
        or_abort(comm, self.roll())
    }

    /// Forgets the observations for delayed scales since the last agreement. Histories and scales
    /// stay; every other amax is consumed by its encode.
    ///
    /// # Errors
    /// The backend failed.
    pub fn forget_observations(&self) -> Result<(), ShardError> {
        for &index in self.histories.keys() {
            self.backend.write(&self.observed, index, &[0.0])?;
        }
        Ok(())
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
