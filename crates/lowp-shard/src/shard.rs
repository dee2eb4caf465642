//! [`ShardSpec`] and [`ShardedTensor`]: the rows of a quantized matrix that one rank owns.

use std::ops::{Deref, Range};

use lowp_comm::CommError;
use lowp_format::{
    AnyRecipe, BufferSpec, FormatError, QuantizedTensor, Recipe, RowCuts, Shape, Usage,
};
use lowp_kernels::Backend;

use crate::ShardError;
use crate::version::{CastInto, Version};

/// Which rows of a matrix a rank owns (FSDP2's `Shard(0)`).
///
/// Rows are cut at multiples of the recipe's quantum, so no block and no byte straddles a cut:
/// every rank but the last non-empty one gets `round_up(ceil(rows / world), quantum)` rows.
/// Trailing ranks may get fewer, or none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardSpec {
    full: Shape,
    cuts: RowCuts,
    usage: Usage,
    rank: usize,
}

impl ShardSpec {
    /// The shard of `rank` of a matrix of shape `full` that is gathered for both usages.
    ///
    /// # Errors
    /// A shape that the recipe cannot take, or a rank outside the world.
    pub fn new(
        recipe: &impl Recipe,
        full: Shape,
        world: usize,
        rank: usize,
    ) -> Result<Self, ShardError> {
        Self::for_usage(recipe, full, world, rank, Usage::BOTH)
    }

    /// The same for a matrix that is gathered for `usage` only.
    ///
    /// # Errors
    /// As [`ShardSpec::new`].
    pub fn for_usage(
        recipe: &impl Recipe,
        full: Shape,
        world: usize,
        rank: usize,
        usage: Usage,
    ) -> Result<Self, ShardError> {
        let cuts = RowCuts::new(full.rows, world, recipe.row_quantum(usage))?;
        Self::from_cuts(recipe, full, cuts, rank, usage)
    }

    /// The shard of `rank` where another library cuts the rows as `torch.chunk` does: `ceil(rows / world)` for every
    /// rank, fewer or none for trailing ones. FSDP2 does.
    ///
    /// # Errors
    /// [`ShardError::ChunkedRows`] on every rank if that is off the recipe's quantum; otherwise as [`ShardSpec::new`].
    pub fn chunked(
        recipe: &impl Recipe,
        full: Shape,
        world: usize,
        rank: usize,
        usage: Usage,
    ) -> Result<Self, ShardError> {
        let cuts = RowCuts::new(full.rows, world, 1)?;
        let spec = Self::from_cuts(recipe, full, cuts, rank, usage);
        spec.map_err(|error| match error {
            ShardError::Format(FormatError::OffQuantum {
                recipe,
                usage,
                rows,
                world,
                quantum,
                ..
            }) => ShardError::ChunkedRows {
                recipe,
                usage,
                rows,
                world,
                quantum,
            },
            error => error,
        })
    }

    /// Takes cuts that a caller made.
    ///
    /// # Errors
    /// Cuts of another number of rows, or off the recipe's quantum; a shape that the recipe cannot
    /// take; a rank outside the world.
    pub fn from_cuts(
        recipe: &impl Recipe,
        full: Shape,
        cuts: RowCuts,
        rank: usize,
        usage: Usage,
    ) -> Result<Self, ShardError> {
        let world = cuts.world();
        if rank >= world {
            return Err(CommError::NoSuchRank { rank, world }.into());
        }
        if cuts.rows() != full.rows {
            return Err(ShardError::CutRows {
                cut: cuts.rows(),
                full,
            });
        }
        // The plan's own checks: the shape and the quantum.
        lowp_format::GatherPlan::with_cuts(recipe, full, &cuts, usage, usage, &[])?;
        Ok(Self {
            full,
            cuts,
            usage,
            rank,
        })
    }

    /// Shape of the full matrix.
    pub fn full(&self) -> Shape {
        self.full
    }

    /// Where all ranks' rows are cut.
    pub fn cuts(&self) -> &RowCuts {
        &self.cuts
    }

    /// What the matrix can be gathered for.
    pub fn usage(&self) -> Usage {
        self.usage
    }

    /// The owner.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks.
    pub fn world(&self) -> usize {
        self.cuts.world()
    }

    /// The rows owned.
    pub fn rows(&self) -> Range<usize> {
        self.cuts.range(self.rank)
    }

    /// Shape of the rows owned.
    pub fn local_shape(&self) -> Shape {
        self.full.with_rows(self.rows().len())
    }

    /// The elements owned, in the flattened full matrix.
    pub fn elements(&self) -> Range<usize> {
        self.elements_of(self.rank)
    }

    /// The elements that each rank owns, in rank order: the ranges of a reduce-scatter.
    pub fn all_elements(&self) -> Vec<Range<usize>> {
        (0..self.world())
            .map(|rank| self.elements_of(rank))
            .collect()
    }

    fn elements_of(&self, rank: usize) -> Range<usize> {
        let Range { start, end } = self.cuts.range(rank);
        start * self.full.cols..end * self.full.cols
    }
}

/// The rows of a shard: a tensor of their own, with the version that casts raise. Clones share the
/// buffers and the version.
#[derive(Clone, Debug)]
pub struct LocalTensor<B: Backend, R: Recipe = AnyRecipe> {
    tensor: QuantizedTensor<B::Buffer<u8>, R>,
    version: Version,
}

impl<B: Backend, R: Recipe> Deref for LocalTensor<B, R> {
    type Target = QuantizedTensor<B::Buffer<u8>, R>;

    fn deref(&self) -> &Self::Target {
        &self.tensor
    }
}

impl<B: Backend, R: Recipe> CastInto<B> for LocalTensor<B, R> {
    type Recipe = R;

    fn tensor(&self) -> &QuantizedTensor<B::Buffer<u8>, R> {
        &self.tensor
    }

    fn version(&self) -> Option<&Version> {
        Some(&self.version)
    }
}

/// The rows of a quantized matrix that one rank owns. Clones share the buffers and the version.
#[derive(Clone, Debug)]
pub struct ShardedTensor<B: Backend, R: Recipe = AnyRecipe> {
    spec: ShardSpec,
    local: LocalTensor<B, R>,
}

impl<B: Backend, R: Recipe> ShardedTensor<B, R> {
    /// A shard of zeros with the buffers that gathering for the spec's usage needs.
    ///
    /// # Errors
    /// The backend has no room.
    pub fn new(backend: &B, recipe: R, spec: ShardSpec) -> Result<Self, ShardError> {
        Self::with_alloc(recipe, spec, |_, bytes| Ok(backend.alloc(bytes)?))
    }

    /// The same with buffers that `alloc(spec, bytes)` chooses.
    ///
    /// # Errors
    /// Whatever `alloc` returns.
    pub fn with_alloc(
        recipe: R,
        spec: ShardSpec,
        alloc: impl FnMut(&BufferSpec, usize) -> Result<B::Buffer<u8>, ShardError>,
    ) -> Result<Self, ShardError> {
        let stored = recipe.stored(spec.usage);
        let tensor = QuantizedTensor::with_buffers(recipe, spec.local_shape(), stored, alloc)?;
        let version = Version::default();
        let local = LocalTensor { tensor, version };
        Ok(Self { spec, local })
    }

    /// The same rows and version over other buffers.
    pub(crate) fn with_tensor(&self, tensor: QuantizedTensor<B::Buffer<u8>, R>) -> Self {
        let (spec, version) = (self.spec.clone(), self.local.version.clone());
        let local = LocalTensor { tensor, version };
        Self { spec, local }
    }

    /// Which rows these are.
    pub fn spec(&self) -> &ShardSpec {
        &self.spec
    }

    /// The rows, as a tensor of their own. Casts that are made of it raise the shard's version;
    /// before any other write to its buffers call [`ShardedTensor::begin_write`].
    pub fn local(&self) -> &LocalTensor<B, R> {
        &self.local
    }

    /// Says that a write of the rows begins that is no cast: from here on copies that are held are
    /// stale. Every rank must call it before the write, also one without rows, and gather again
    /// only after the write.
    pub fn begin_write(&self) {
        self.local.version.raise();
    }

    /// How many writes of the rows began.
    pub(crate) fn version(&self) -> u64 {
        self.local.version.get()
    }

    /// The recipe.
    pub fn recipe(&self) -> R {
        self.local.recipe()
    }

    /// Bytes that this rank holds.
    pub fn resident_bytes(&self) -> usize {
        self.local.bytes()
    }
}
