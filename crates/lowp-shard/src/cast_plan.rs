//! [`CastPlan`]: observe, agree, encode. The same three phases for every recipe, for whole
//! tensors, row shards and flat shards.

use std::ops::Range;

use lowp_format::{
    Extent, KernelKey, Orientation, Part, QuantizedTensor, Recipe, Role, ScaleRule, Shape,
    SourceRounding, Usage, is_in_bf16,
};
use lowp_kernels::{
    AmaxJob, Backend, BlockAmax, EncodeJob, FlatBlocks, FlatEncodeJob, KernelError, Master, Source,
    StepScalars, Target, UpdateAmax, Work,
};
use smallvec::SmallVec;

use crate::version::{CastSlice, CastTensor, Version};
use crate::{BlockSlots, FlatShard, ScaleBook, ScaleBookBuilder, ScaleSlot, ShardError};
use lowp_comm::{Communicator, or_abort};

/// The part of a matrix that a cast covers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CastRange {
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

/// One tensor to cast: its source, its ingredients and the buffers to fill. Where its only buffer is a half of its masters, or it has none,
/// nothing is cast.
#[derive(Clone, Debug)]
pub struct CastItem<B: Backend> {
    /// Shape of the source rows, or of the full matrix for a flat shard.
    pub shape: Shape,
    /// Whether `source` has whole rows of `shape`, or a range of its elements.
    pub range: CastRange,
    /// The masters of the range, in its order.
    pub source: Master<B>,
    /// Kernel ingredients by orientation, rowwise first.
    pub kernels: [KernelKey; 2],
    /// Rounding of the source.
    pub source_rounding: SourceRounding,
    /// Entries in the scale book, by orientation.
    pub slots: [Option<ScaleSlot>; 2],
    /// The buffers to fill; none where nothing is cast.
    pub targets: Vec<Target<B>>,
    /// What casts raise, for the rows of a shard.
    version: Option<Version>,
}

impl<B: Backend> CastItem<B> {
    /// Casts `source` into every buffer of `into`, registering its scale in `book`. Rows that cut blocks
    /// ([`CastTensor::slice`]) are a flat range.
    pub fn rows(
        into: &impl CastTensor<B>,
        source: impl Into<Master<B>>,
        book: &mut ScaleBookBuilder,
    ) -> Self {
        let (tensor, source) = (into.tensor(), source.into());
        let (recipe, shape, usage) = (tensor.recipe(), tensor.shape(), tensor.usage());
        let targets = cast_of(&recipe, &source, targets(tensor));
        let item = match into.slice() {
            Some(CastSlice { full, start }) => {
                let elements = start..start + shape.elements();
                Self::flat(&recipe, full, elements, source, targets, book)
            }
            None => Self {
                targets,
                ..Self::observed(&recipe, shape, usage, source, book)
            },
        };
        Self {
            version: into.version().cloned(),
            ..item
        }
    }

    /// The cast of `source`, of `shape`, into no buffer: what a cast as `recipe` says for `usage` depends on can be observed.
    pub fn observed(
        recipe: &impl Recipe,
        shape: Shape,
        usage: Usage,
        source: impl Into<Master<B>>,
        book: &mut ScaleBookBuilder,
    ) -> Self {
        Self {
            shape,
            range: CastRange::Rows,
            source: source.into(),
            kernels: recipe.quantizers(Role::Weight).kernels(),
            source_rounding: recipe.source_rounding(),
            slots: book.register(recipe, shape, usage),
            targets: Vec::new(),
            version: None,
        }
    }

    /// Casts `elements` of the flattened matrix of `shape` into `targets`, whose
    /// data buffers hold only the touched bytes and whose block scales are whole.
    pub fn flat<R: Recipe>(
        recipe: &R,
        shape: Shape,
        elements: Range<usize>,
        source: impl Into<Master<B>>,
        targets: Vec<Target<B>>,
        book: &mut ScaleBookBuilder,
    ) -> Self {
        let source = source.into();
        let targets = cast_of(recipe, &source, targets);
        let quantizers = recipe.quantizers(Role::Weight);
        let kernels = quantizers.kernels();
        let served = |usage, target: &Target<B>| usage | target.spec.key.usage;
        let usage = targets.iter().fold(Usage::empty(), served);
        let mut blocks: SmallVec<[BlockSlots; 2]> = SmallVec::new();
        for orientation in usage.orientations() {
            let Some(block) = kernels[orientation as usize].block else {
                continue;
            };
            if !blocks.iter().any(|b| b.block() == block) {
                blocks.push(book.reserve_blocks(shape, block));
            }
        }
        Self {
            shape,
            range: CastRange::Flat {
                start: elements.start,
                len: elements.len(),
                blocks,
            },
            source,
            kernels,
            source_rounding: recipe.source_rounding(),
            slots: book.register_flat(&quantizers, shape, usage),
            targets,
            version: None,
        }
    }

    /// The orientations that its targets serve.
    fn usage(&self) -> Usage {
        let served = |usage, target: &Target<B>| usage | target.spec.key.usage;
        self.targets.iter().fold(Usage::empty(), served)
    }

    /// Whether its codes depend on amaxes that must be observed first, and agreed on if several ranks have a part.
    pub fn needs_agreement(&self) -> bool {
        let flat_blocks =
            matches!(&self.range, CastRange::Flat { blocks, .. } if !blocks.is_empty());
        let mut kernels = self
            .usage()
            .orientations()
            .map(|o| self.kernels[o as usize]);
        kernels.any(|key| key.scale.waits_for_amax()) || flat_blocks
    }

    /// Says that a write of the buffers begins. [`CastPlan`] does it; whoever plans
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
        let (start, blocks) = match &self.range {
            CastRange::Rows => (0, Vec::new()),
            CastRange::Flat { start, blocks, .. } => (*start, book.block_amaxes(blocks)?),
        };
        if self.kernels.iter().any(|key| key.hadamard) {
            return Err(KernelError::Hadamard {
                what: "the cast of a weight",
                remedy: "encode it as an operand, or leave the transform out",
            }
            .into());
        }
        let (tensor, lines) = book.observation(self.slots)?;
        let mut blocks = blocks;
        for orientation in Orientation::ALL {
            let block = Extent::Line.block(orientation);
            blocks.extend(lines[orientation as usize].map(|start| BlockAmax { block, start }));
        }
        let Some(source) = self.source.values() else {
            return Ok(None);
        };
        if tensor.is_none() && blocks.is_empty() {
            return Ok(None);
        }
        Ok(Some(AmaxJob {
            shape: self.shape,
            start,
            source: source.clone(),
            source_rounding: self.source_rounding,
            out: book.observed().clone(),
            tensor,
            blocks,
            hadamard: false,
        }))
    }

    /// The amaxes that an update of the masters raises: the amaxes of rows, and of a flat slice that of the tensor
    /// alone.
    ///
    /// # Errors
    /// It was registered in another book.
    pub fn update_amax(&self, book: &ScaleBook<B>) -> Result<Option<UpdateAmax<B>>, ShardError> {
        let (tensor, lines) = book.observation(self.slots)?;
        let lines = match self.range {
            CastRange::Rows => lines,
            CastRange::Flat { .. } => [None; 2],
        };
        let some = tensor.is_some() || lines.iter().any(Option::is_some);
        Ok(some.then(|| UpdateAmax {
            shape: self.shape,
            out: book.observed().clone(),
            tensor,
            lines,
        }))
    }

    /// The values that are cast, where something is.
    fn values(&self) -> Result<Option<&Source<B>>, ShardError> {
        match (&self.source, self.targets.is_empty()) {
            (_, true) => Ok(None),
            (Master::Values(values), false) => Ok(Some(values)),
            (Master::Bf16Plus16 { .. }, false) => Err(ShardError::Halves {
                element: self.kernels[0].element,
            }),
        }
    }

    /// The cast of a range of rows; a flat range has none, and neither has what is not cast.
    ///
    /// # Errors
    /// It was registered in another book, or its masters are in halves of which it is none.
    pub fn encode_job(&self, book: &ScaleBook<B>) -> Result<Option<EncodeJob<B>>, ShardError> {
        let (CastRange::Rows, Some(source)) = (&self.range, self.values()?) else {
            return Ok(None);
        };
        Ok(Some(EncodeJob {
            shape: self.shape,
            kernels: self.kernels,
            source: source.clone(),
            source_rounding: self.source_rounding,
            tensor: book.tensor_inputs(self.slots)?,
            targets: self.targets.clone(),
            stochastic: None,
        }))
    }

    /// The cast of a flat range; rows have none, and neither has what is not cast.
    ///
    /// # Errors
    /// It was registered in another book, or its masters are in halves of which it is none.
    pub fn flat_encode_job(
        &self,
        book: &ScaleBook<B>,
    ) -> Result<Option<FlatEncodeJob<B>>, ShardError> {
        let (CastRange::Flat { start, len, blocks }, Some(source)) = (&self.range, self.values()?)
        else {
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
            kernels: self.kernels,
            source: source.clone(),
            source_rounding: self.source_rounding,
            tensor: book.tensor_inputs(self.slots)?,
            blocks,
            targets: self.targets.clone(),
        }))
    }
}

/// Those of `targets`, the buffers of a tensor of `recipe`, that `source` is cast into: not the one that is a half of it.
fn cast_of<B: Backend>(
    recipe: &impl Recipe,
    source: &Master<B>,
    targets: Vec<Target<B>>,
) -> Vec<Target<B>> {
    match source {
        Master::Bf16Plus16 { .. } if is_in_bf16(recipe) => Vec::new(),
        _ => targets,
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

/// Checks that slices of the flattened matrix can be cast for `usage`. Every entry of flat casts does it before it
/// allocates; who plans a whole model asks before.
///
/// # Errors
/// Scales that whole blocks choose ([`KernelError::FlatChoice`]).
pub fn check_flat(recipe: &impl Recipe, usage: Usage) -> Result<(), ShardError> {
    let chooses = |orientation| match recipe.kernel(orientation).scale {
        ScaleRule::TwoLevel { four_over_six, .. } => four_over_six.is_on(),
        _ => false,
    };
    match usage.orientations().any(chooses) {
        true => Err(KernelError::FlatChoice.into()),
        false => Ok(()),
    }
}

/// Allocates what one rank's flat cast of `usage` fills: the bytes of its data that `shard`
/// touches, and whole arrays of scales. Buffers that are derived after the gather are left out.
///
/// # Errors
/// A shape that the recipe cannot take, scales that whole blocks choose ([`KernelError::FlatChoice`]), or no room.
pub fn flat_targets<B: Backend, R: Recipe>(
    backend: &B,
    recipe: &R,
    shard: &FlatShard,
    usage: Usage,
) -> Result<Vec<Target<B>>, ShardError> {
    recipe.check(shard.shape())?;
    check_flat(recipe, usage)?;
    let mut targets = Vec::new();
    for spec in recipe.stored(usage) {
        let bytes = match spec.key.part {
            Part::Data => shard.stored_as(spec.code).bytes().len(),
            Part::BlockScale | Part::DecodeScale | Part::Amax => spec.bytes(shard.shape()),
        };
        targets.push(Target::new(spec, backend.alloc::<u8>(bytes)?));
    }
    Ok(targets)
}

/// A cast of many tensors, planned once.
#[derive(Debug)]
pub struct CastPlan<B: Backend> {
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

impl<B: Backend> CastPlan<B> {
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
                rows.extend(item.encode_job(book)?);
                flats.extend(item.flat_encode_job(book)?);
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
    /// Another book than that of [`CastPlan::new`]; a rank failed, or called something else. An
    /// error of one rank is an error on all: in this call, or in the next collective one where
    /// their part was done.
    pub fn run(&self, book: &ScaleBook<B>, comm: &dyn Communicator<B>) -> Result<(), ShardError> {
        or_abort(comm, self.cast(book, comm, false))
    }

    /// Casts everything with scales from the values themselves, delayed scales included: the
    /// first cast of a model, when there is no history.
    ///
    /// # Errors
    /// As [`CastPlan::run`].
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
