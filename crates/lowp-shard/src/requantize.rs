//! [`Requantize`]: observe, agree, encode. The same three phases for every recipe, for whole
//! tensors, row shards and flat shards.

use lowp_format::{
    KernelKey, Part, QuantizedTensor, Recipe, ScaleSource, Shape, SourceRounding, Usage,
};
use lowp_kernels::{
    AmaxJob, Backend, EncodeJob, FlatBlocks, FlatEncodeJob, Source, StepScalars, Target,
    TensorInput, Work,
};
use smallvec::SmallVec;

use crate::version::{CastInto, Version};
use crate::{
    BlockSlots, Communicator, FlatShard, ScaleBook, ScaleBookBuilder, ScaleSlot, ShardError,
    or_abort,
};

/// The part of a matrix that a cast covers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Extent {
    /// All rows of `CastItem::shape` (a whole tensor or a row shard).
    Rows,
    /// Elements `start..start + len` of the flattened matrix of shape `CastItem::shape`.
    Flat {
        /// First element.
        start: usize,
        /// Number of elements.
        len: usize,
        /// Where its block amaxes were reserved, one entry per distinct block shape.
        blocks: SmallVec<[BlockSlots; 2]>,
    },
}

/// One tensor to cast: its source, its ingredients and the buffers to fill.
#[derive(Clone, Debug)]
pub struct CastItem<B: Backend> {
    /// Shape of the source rows, or of the full matrix for a flat shard.
    pub shape: Shape,
    /// What is covered.
    pub extent: Extent,
    /// High-precision values.
    pub source: Source<B>,
    /// Kernel ingredients.
    pub kernel: KernelKey,
    /// What the scales depend on.
    pub scale_source: ScaleSource,
    /// Rounding of the source.
    pub source_rounding: SourceRounding,
    /// Entry in the scale book.
    pub slot: Option<ScaleSlot>,
    /// The buffers to fill.
    pub targets: Vec<Target<B>>,
    /// What casts raise, for the rows of a shard.
    version: Option<Version>,
}

impl<B: Backend> CastItem<B> {
    /// Casts `source` into every buffer of `into`, registering its scale in `book`.
    pub fn rows(into: &impl CastInto<B>, source: Source<B>, book: &mut ScaleBookBuilder) -> Self {
        let tensor = into.tensor();
        let recipe = tensor.recipe();
        Self {
            shape: tensor.shape(),
            extent: Extent::Rows,
            source,
            kernel: recipe.kernel(),
            scale_source: recipe.scale_source(),
            source_rounding: recipe.source_rounding(),
            slot: book.register(&recipe),
            targets: targets(tensor),
            version: into.version().cloned(),
        }
    }

    /// Casts elements `start..start + len` of the flattened matrix `shape` into `targets`, whose
    /// data buffers hold only the touched bytes and whose block scales are whole.
    pub fn flat<R: Recipe>(
        recipe: &R,
        shape: Shape,
        (start, len): (usize, usize),
        source: Source<B>,
        targets: Vec<Target<B>>,
        book: &mut ScaleBookBuilder,
    ) -> Self {
        let kernel = recipe.kernel();
        let mut blocks: SmallVec<[BlockSlots; 2]> = SmallVec::new();
        for block in kernel.blocks.into_iter().flatten() {
            if !blocks.iter().any(|b| b.block() == block) {
                blocks.push(book.reserve_blocks(shape, block));
            }
        }
        Self {
            shape,
            extent: Extent::Flat { start, len, blocks },
            source,
            kernel,
            scale_source: recipe.scale_source(),
            source_rounding: recipe.source_rounding(),
            slot: book.register(recipe),
            targets,
            version: None,
        }
    }

    /// Whether its codes depend on an amax that ranks must agree on first.
    pub fn needs_agreement(&self) -> bool {
        let flat_blocks = matches!(&self.extent, Extent::Flat { blocks, .. } if !blocks.is_empty());
        self.scale_source.needs_tensor_amax() || flat_blocks
    }

    /// Says that a write of the buffers begins. [`Requantize`] does it; whoever plans
    /// [`CastItem::encode_job`] does it before each run, on every rank.
    pub fn begin_write(&self) {
        if let Some(version) = &self.version {
            version.raise();
        }
    }

    /// The observation of this tensor, if it needs one.
    ///
    /// # Errors
    /// It was registered in another book.
    pub fn amax_job(&self, book: &ScaleBook<B>) -> Result<Option<AmaxJob<B>>, ShardError> {
        let (start, blocks) = match &self.extent {
            Extent::Rows => (0, Vec::new()),
            Extent::Flat { start, blocks, .. } => (*start, book.block_amaxes(blocks)?),
        };
        if self.slot.is_none() && blocks.is_empty() {
            return Ok(None);
        }
        Ok(Some(AmaxJob {
            shape: self.shape,
            start,
            source: self.source.clone(),
            source_rounding: self.source_rounding,
            out: book.observed().clone(),
            tensor: self.slot.map(|slot| book.index(slot)).transpose()?,
            blocks,
        }))
    }

    /// The cast of a row extent.
    ///
    /// # Errors
    /// It was registered in another book.
    pub fn encode_job(&self, book: &ScaleBook<B>) -> Result<EncodeJob<B>, ShardError> {
        Ok(EncodeJob {
            shape: self.shape,
            kernel: self.kernel,
            source: self.source.clone(),
            source_rounding: self.source_rounding,
            tensor: self.tensor_input(book)?,
            targets: self.targets.clone(),
            stochastic: None,
        })
    }

    fn tensor_input(&self, book: &ScaleBook<B>) -> Result<Option<TensorInput<B>>, ShardError> {
        self.slot.map(|slot| book.tensor_input(slot)).transpose()
    }

    /// The cast of a flat extent; rows have none.
    ///
    /// # Errors
    /// It was registered in another book.
    pub fn flat_encode_job(
        &self,
        book: &ScaleBook<B>,
    ) -> Result<Option<FlatEncodeJob<B>>, ShardError> {
        let Extent::Flat { start, len, blocks } = &self.extent else {
            return Ok(None);
        };
        let blocks = (!blocks.is_empty()).then(|| {
            Ok::<_, ShardError>(FlatBlocks {
                amaxes: book.observed().clone(),
                blocks: book.block_amaxes(blocks)?,
            })
        });
        let blocks = blocks.transpose()?;
        Ok(Some(FlatEncodeJob {
            shape: self.shape,
            start: *start,
            len: *len,
            kernel: self.kernel,
            source: self.source.clone(),
            source_rounding: self.source_rounding,
            tensor: self.tensor_input(book)?,
            blocks,
            targets: self.targets.clone(),
        }))
    }
}

/// The buffers of a tensor as encode targets.
pub fn targets<B: Backend, R: Recipe>(
    tensor: &QuantizedTensor<B::Buffer<u8>, R>,
) -> Vec<Target<B>> {
    tensor
        .buffers()
        .iter()
        .map(|b| Target::new(b.spec, b.storage.clone()))
        .collect()
}

/// Allocates what one rank's flat cast of `usage` fills: the bytes of its data that `shard`
/// touches, and whole arrays of scales. Buffers that are derived after the gather are left out.
///
/// # Errors
/// The backend has no room.
pub fn flat_targets<B: Backend, R: Recipe>(
    backend: &B,
    recipe: &R,
    shard: &FlatShard,
    usage: Usage,
) -> Result<Vec<Target<B>>, ShardError> {
    recipe.check(shard.shape())?;
    let mut targets = Vec::new();
    for spec in recipe.stored(usage) {
        let bytes = match spec.key.part {
            Part::Data => shard.bytes().len(),
            Part::BlockScale | Part::DecodeScale | Part::TensorAmax => spec.bytes(shard.shape()),
        };
        targets.push(Target::new(spec, backend.alloc::<u8>(bytes)?));
    }
    Ok(targets)
}

/// A cast of many tensors, planned once.
#[derive(Debug)]
pub struct Requantize<B: Backend> {
    backend: B,
    /// The book that the plans below read and write.
    book: u64,
    versions: Vec<Version>,
    observe: B::Plan,
    /// Casts whose scales are known before the values: row shards, then flat shards.
    early: [B::Plan; 2],
    /// Casts that wait for agreement: row shards, then flat shards.
    late: [B::Plan; 2],
}

impl<B: Backend> Requantize<B> {
    /// Plans the casts of `items`, whose slots are in `book`.
    ///
    /// # Errors
    /// Items that were registered in another book, buffers that do not fit their shapes, or outputs
    /// that alias.
    pub fn new(
        backend: &B,
        book: &ScaleBook<B>,
        items: &[CastItem<B>],
    ) -> Result<Self, ShardError> {
        let observe = items.iter().map(|item| item.amax_job(book));
        let observe: Vec<_> = observe.collect::<Result<_, _>>()?;
        let observe = observe.into_iter().flatten().collect();
        let casts = |of: &dyn Fn(&CastItem<B>) -> bool| -> Result<[B::Plan; 2], ShardError> {
            let mut rows = Vec::new();
            let mut flats = Vec::new();
            for item in items.iter().filter(|item| of(item)) {
                match item.flat_encode_job(book)? {
                    Some(job) => flats.push(job),
                    None => rows.push(item.encode_job(book)?),
                }
            }
            Ok([
                backend.plan(Work::Encode(rows))?,
                backend.plan(Work::FlatEncode(flats))?,
            ])
        };
        // Each of the plans below sees one half of the items. Planning them together first finds
        // a buffer that an early and a late cast would both write.
        casts(&|_| true)?;
        Ok(Self {
            backend: backend.clone(),
            book: book.id(),
            versions: items.iter().filter_map(|i| i.version.clone()).collect(),
            observe: backend.plan(Work::Amax(observe))?,
            early: casts(&|item| !item.needs_agreement())?,
            late: casts(&CastItem::needs_agreement)?,
        })
    }

    /// Casts everything. Delayed scales are used as they are and take the new amaxes for the next
    /// step; every other scale follows from the values.
    ///
    /// Every rank must call it with the same tensors, also one that holds no rows.
    ///
    /// # Errors
    /// Another book than that of [`Requantize::new`]; a rank failed, or called something else. An
    /// error of one rank is an error on all: in this call, or in the next collective one where
    /// their part was done.
    pub fn run(&self, book: &ScaleBook<B>, comm: &dyn Communicator<B>) -> Result<(), ShardError> {
        or_abort(comm, self.cast(book, comm, false))
    }

    /// Casts everything with scales from the values themselves, delayed scales included: the
    /// first cast of a model, when there is no history.
    ///
    /// # Errors
    /// As [`Requantize::run`].
    pub fn calibrate(
        &self,
        book: &ScaleBook<B>,
        comm: &dyn Communicator<B>,
    ) -> Result<(), ShardError> {
        or_abort(comm, self.cast(book, comm, true))
    }

    fn cast(
        &self,
        book: &ScaleBook<B>,
        comm: &dyn Communicator<B>,
        agree_first: bool,
    ) -> Result<(), ShardError> {
        if book.id() != self.book {
            let what = "the cast";
            return Err(ShardError::OtherBook { what });
        }
        self.versions.iter().for_each(Version::raise);
        let run = |plans: &[B::Plan]| -> Result<(), ShardError> {
            for plan in plans {
                self.backend.run(plan, &StepScalars::default())?;
            }
            Ok(())
        };
        run(std::slice::from_ref(&self.observe))?;
        if agree_first {
            book.agree(comm)?;
            run(&self.early)?;
        } else {
            run(&self.early)?;
            book.agree(comm)?;
        }
        run(&self.late)
    }
}
