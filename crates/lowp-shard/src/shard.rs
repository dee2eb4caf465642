//! [`ShardSpec`] and [`ShardedTensor`]: the rows of a quantized matrix that one rank owns.

use std::ops::{Deref, Range};

use lowp_comm::CommError;
use lowp_format::{
    AnyRecipe, BlockCuts, BufferKey, BufferList, BufferSpec, FormatError, GatherPlan, Part,
    QuantizedTensor, Recipe, RowCuts, Shape, ShardTiles, Usage,
};
use lowp_kernels::Backend;

use crate::ShardError;
use crate::cast_plan::check_flat;
use crate::version::{CastSlice, CastTensor, Version};

/// Which rows of a matrix a rank owns (FSDP2's `Shard(0)`).
///
/// Rows are cut at multiples of the recipe's quantum, so no block and no byte straddles a cut:
/// every rank but the last non-empty one gets `ceil(rows / world)` rows, rounded up to a multiple of `quantum`.
/// Trailing ranks may get fewer, or none. Only [`ShardSpec::chunked`] cuts elsewhere, and may cut blocks
/// ([`ShardSpec::cuts_blocks`]). With [`ShardSpec::of_block`] a rank has rows, or tiles, as the block that the matrix is of is cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardSpec {
    tiles: ShardTiles,
    cuts: RowCuts,
    usage: Usage,
    rank: usize,
    cuts_blocks: bool,
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

    /// The shard of `rank` of a matrix that is gathered for `usage` only.
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
    /// rank, fewer or none for trailing ones. FSDP2 does. Cuts off the recipe's quantum cut blocks ([`ShardSpec::cuts_blocks`]).
    ///
    /// # Errors
    /// [`ShardError::ChunkedRows`] on every rank if a block is cut and four over six chooses by whole blocks; otherwise as
    /// [`ShardSpec::new`].
    pub fn chunked(
        recipe: &impl Recipe,
        full: Shape,
        world: usize,
        rank: usize,
        usage: Usage,
    ) -> Result<Self, ShardError> {
        let cuts = RowCuts::new(full.rows, world, 1)?;
        let quantum = recipe.row_quantum(usage);
        let cuts_blocks = cuts.off_quantum(quantum).is_some();
        if cuts_blocks && check_flat(recipe, usage).is_err() {
            return Err(ShardError::ChunkedRows {
                recipe: recipe.name(),
                usage,
                rows: full.rows,
                world,
                quantum,
            });
        }
        let tiles = ShardTiles::of_rows(recipe, full, usage);
        Self::with_cuts(recipe, tiles, cuts, rank, usage, cuts_blocks)
    }

    /// The shard of `rank` of a matrix that is cut with its block ([`lowp_format::block_cuts`]) and gathered for both usages.
    ///
    /// # Errors
    /// As [`ShardSpec::from_cuts`].
    pub fn of_block(
        recipe: &impl Recipe,
        cuts: &BlockCuts,
        rank: usize,
    ) -> Result<Self, ShardError> {
        let BlockCuts { tiles, cuts } = cuts;
        Self::with_cuts(recipe, *tiles, cuts.clone(), rank, Usage::BOTH, false)
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
        let tiles = ShardTiles::of_rows(recipe, full, usage);
        Self::with_cuts(recipe, tiles, cuts, rank, usage, false)
    }

    fn with_cuts(
        recipe: &impl Recipe,
        tiles: ShardTiles,
        cuts: RowCuts,
        rank: usize,
        usage: Usage,
        cuts_blocks: bool,
    ) -> Result<Self, ShardError> {
        let full = tiles.tall();
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
        let spec = Self {
            tiles,
            cuts,
            usage,
            rank,
            cuts_blocks,
        };
        // The plan's own checks: the shape and the quantum.
        spec.plan(recipe, usage, usage, &[])?;
        Ok(spec)
    }

    /// Whether ranks have parts of one block. Each stores its rows of the codes in the order of rows, and all scales of the whole
    /// matrix: casts agree on the amaxes of all blocks.
    pub fn cuts_blocks(&self) -> bool {
        self.cuts_blocks
    }

    /// The buffers that a rank stores.
    pub fn stored(&self, recipe: &impl Recipe) -> BufferList {
        match self.cuts_blocks {
            true => recipe.stored_cut_anywhere(self.usage),
            false => recipe.stored(self.usage),
        }
    }

    /// Bytes of the rank's part of `spec`, one of [`ShardSpec::stored`].
    pub fn stored_bytes(&self, spec: &BufferSpec) -> usize {
        let whole = self.cuts_blocks && spec.key.part != Part::Data;
        spec.bytes(if whole {
            self.full()
        } else {
            self.local_shape()
        })
    }

    /// The gather of what `fetch` needs, after which buffers for `need` are complete, where `held` buffers are there already.
    ///
    /// # Errors
    /// As [`GatherPlan::with_cuts`].
    pub fn plan(
        &self,
        recipe: &impl Recipe,
        fetch: Usage,
        need: Usage,
        held: &[BufferKey],
    ) -> Result<GatherPlan, FormatError> {
        match self.cuts_blocks {
            true => GatherPlan::with_cut_blocks(recipe, self.full(), &self.cuts, fetch, need, held),
            false => GatherPlan::with_tiles(recipe, &self.tiles, &self.cuts, fetch, need, held),
        }
    }

    /// Shape of the full matrix.
    pub fn full(&self) -> Shape {
        self.tiles.full()
    }

    /// The tiles that ranks own.
    pub fn tiles(&self) -> &ShardTiles {
        &self.tiles
    }

    /// Where all ranks' rows are cut: those of the tall matrix, where tiles are no whole rows.
    pub fn cuts(&self) -> &RowCuts {
        &self.cuts
    }

    /// What the matrix can be gathered for.
    pub fn usage(&self) -> Usage {
        self.usage
    }

    /// The rank that owns the rows.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks that share out the matrix, those without rows included.
    pub fn world(&self) -> usize {
        self.cuts.world()
    }

    /// The rows owned, of the tall matrix.
    pub fn rows(&self) -> Range<usize> {
        self.cuts.range(self.rank)
    }

    /// Shape of the rows owned.
    pub fn local_shape(&self) -> Shape {
        self.tiles.tall().with_rows(self.rows().len())
    }

    /// The elements owned, in the flattened tall matrix: that of the rows, unless ranks own tiles.
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
        let cols = self.tiles.tall().cols;
        start * cols..end * cols
    }
}

/// The rows of a shard: a tensor of their own, with the version that casts raise. Clones share the
/// buffers and the version.
///
/// Where the shard cuts blocks it is one for casts and gathers alone: its scales are those of the whole matrix.
#[derive(Clone, Debug)]
pub struct LocalTensor<B: Backend, R: Recipe = AnyRecipe> {
    tensor: QuantizedTensor<B::Buffer<u8>, R>,
    version: Version,
    slice: Option<CastSlice>,
}

impl<B: Backend, R: Recipe> Deref for LocalTensor<B, R> {
    type Target = QuantizedTensor<B::Buffer<u8>, R>;

    fn deref(&self) -> &Self::Target {
        &self.tensor
    }
}

impl<B: Backend, R: Recipe> CastTensor<B> for LocalTensor<B, R> {
    type Recipe = R;

    fn tensor(&self) -> &QuantizedTensor<B::Buffer<u8>, R> {
        &self.tensor
    }

    fn version(&self) -> Option<&Version> {
        Some(&self.version)
    }

    fn slice(&self) -> Option<CastSlice> {
        self.slice
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
        mut alloc: impl FnMut(&BufferSpec, usize) -> Result<B::Buffer<u8>, ShardError>,
    ) -> Result<Self, ShardError> {
        let (shape, stored) = (spec.local_shape(), spec.stored(&recipe));
        let tensor = QuantizedTensor::with_buffers(recipe, shape, stored, |of, _| {
            alloc(of, spec.stored_bytes(of))
        })?;
        let slice = CastSlice {
            full: spec.full(),
            start: spec.elements().start,
        };
        let local = LocalTensor {
            tensor,
            version: Version::default(),
            slice: spec.cuts_blocks.then_some(slice),
        };
        Ok(Self { spec, local })
    }

    /// The same rows and version over other buffers.
    pub(crate) fn with_tensor(&self, tensor: QuantizedTensor<B::Buffer<u8>, R>) -> Self {
        let local = LocalTensor {
            tensor,
            ..self.local.clone()
        };
        let spec = self.spec.clone();
        Self { spec, local }
    }

    /// Which rows this rank has.
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

    /// How many writes of the rows began. Writes are collective, so ranks count alike.
    pub fn version(&self) -> u64 {
        self.local.version.get()
    }

    /// The recipe.
    pub fn recipe(&self) -> R {
        self.local.recipe()
    }

    /// Bytes that this rank holds.
    pub fn resident_bytes(&self) -> usize {
        let buffers = self.local.buffers().iter();
        buffers.map(|b| self.spec.stored_bytes(&b.spec)).sum()
    }
}
