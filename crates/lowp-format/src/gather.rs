//! [`GatherPlan`]: what ranks exchange so that a full tensor comes to be. It follows from the
//! buffer specs; no recipe has code of its own here.

use std::ops::Range;

use smallvec::SmallVec;

use crate::buffer::row_quantum;
use crate::{
    Axis, BufferKey, BufferList, BufferSpec, FormatError, Orientation, Origin, Part, Recipe,
    ReshardAfterForward, RowCuts, Shape, ShardTiles, Usage,
};

/// How the ranks' pieces of a buffer become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PieceLayout {
    /// Pieces are concatenated in rank order straight into the destination.
    Rows,
    /// Rows lie along the inner axis: pieces arrive one after another in a scratch buffer, and
    /// are then interleaved row by row.
    Interleave,
    /// Pieces are in the order of rows, the destination in that of columns: pieces arrive one after another in a scratch
    /// buffer, which is then transposed.
    Transpose,
    /// Pieces are [`ShardTiles`], one below another: they arrive in a scratch buffer, from which each tile goes to its place.
    TilesBelow,
    /// As `TilesBelow`, but the tiles of a piece are side by side.
    TilesBeside,
}

/// One step of a gather.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GatherStep {
    /// All-gather the ranks' pieces of a buffer.
    Concat {
        /// The buffer whose pieces are gathered.
        spec: BufferSpec,
        /// How pieces become one.
        layout: PieceLayout,
        /// Bytes of each rank's piece, in rank order.
        pieces: Vec<usize>,
        /// Whether the buffer stays in the gathered tensor, or is only a source of derivations.
        keep: bool,
    },
    /// Transpose a gathered buffer, locally.
    Derive {
        /// The buffer to fill.
        spec: BufferSpec,
        /// The buffer that it is made of.
        from: BufferKey,
    },
    /// Copy a buffer that is equal on all ranks from the rank's own shard.
    Replicated {
        /// The buffer.
        spec: BufferSpec,
    },
}

impl GatherStep {
    /// The buffer that the step fills.
    pub fn spec(&self) -> &BufferSpec {
        match self {
            GatherStep::Concat { spec, .. }
            | GatherStep::Derive { spec, .. }
            | GatherStep::Replicated { spec } => spec,
        }
    }

    /// Bytes that all ranks together put on the wire.
    pub fn wire_bytes(&self) -> usize {
        match self {
            GatherStep::Concat { pieces, .. } => pieces.iter().sum(),
            GatherStep::Derive { .. } | GatherStep::Replicated { .. } => 0,
        }
    }

    /// Bytes of the piece of `rank`, where pieces travel.
    pub fn piece(&self, rank: usize) -> Option<usize> {
        match self {
            GatherStep::Concat { pieces, .. } => pieces.get(rank).copied(),
            GatherStep::Derive { .. } | GatherStep::Replicated { .. } => None,
        }
    }

    /// The byte ranges of the ranks' pieces in arrival order.
    pub fn piece_ranges(&self) -> Vec<Range<usize>> {
        let GatherStep::Concat { pieces, .. } = self else {
            return Vec::new();
        };
        let mut end = 0;
        pieces
            .iter()
            .map(|&bytes| {
                end += bytes;
                end - bytes..end
            })
            .collect()
    }
}

/// The part of a training step that a weight is gathered for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Uses the rowwise operand.
    Forward,
    /// Uses the columnwise operand.
    Backward,
}

impl Phase {
    /// Both phases, in the order of a step.
    pub const ALL: [Phase; 2] = [Phase::Forward, Phase::Backward];

    /// The orientation that the phase multiplies by.
    pub const fn orientation(self) -> Orientation {
        match self {
            Phase::Forward => Orientation::Rowwise,
            Phase::Backward => Orientation::Columnwise,
        }
    }

    /// The usage that the phase needs.
    pub const fn usage(self) -> Usage {
        self.orientation().usage()
    }

    /// `forward` or `backward`.
    pub const fn name(self) -> &'static str {
        match self {
            Phase::Forward => "forward",
            Phase::Backward => "backward",
        }
    }
}

/// A gather of one tensor: an ordered list of steps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatherPlan {
    /// Shape of the full tensor.
    pub full: Shape,
    /// The tiles that ranks own.
    pub tiles: ShardTiles,
    /// Where the rows of the tall matrix are cut.
    pub cuts: RowCuts,
    /// What the gathered tensor can serve when the steps are done.
    pub usage: Usage,
    /// The steps.
    pub steps: SmallVec<[GatherStep; 4]>,
}

impl GatherPlan {
    /// Plans the gather of a tensor of shape `full`, cut for `world` ranks at the recipe's
    /// quantum, into a tensor of `usage`.
    ///
    /// # Errors
    /// A shape that the recipe cannot take, or a world of no ranks.
    pub fn new(
        recipe: &impl Recipe,
        full: Shape,
        world: usize,
        usage: Usage,
    ) -> Result<Self, FormatError> {
        let cuts = RowCuts::new(full.rows, world, recipe.row_quantum(usage))?;
        Self::with_cuts(recipe, full, &cuts, usage, usage, &[])
    }

    /// Plans a gather for cuts that are given.
    ///
    /// Buffers for `fetch` are gathered, those for `need` are complete afterwards, and `held`
    /// buffers are there already.
    ///
    /// # Errors
    /// A shape that the recipe cannot take, or cuts of another number of rows or off the recipe's
    /// quantum.
    pub fn with_cuts(
        recipe: &impl Recipe,
        full: Shape,
        cuts: &RowCuts,
        fetch: Usage,
        need: Usage,
        held: &[BufferKey],
    ) -> Result<Self, FormatError> {
        Self::with_tiles(
            recipe,
            &ShardTiles::of_rows(recipe, full, fetch),
            cuts,
            fetch,
            need,
            held,
        )
    }

    /// As [`GatherPlan::with_cuts`], for ranks that have tiles of a matrix: `cuts` are those of its tall matrix.
    ///
    /// # Errors
    /// As [`GatherPlan::with_cuts`].
    pub fn with_tiles(
        recipe: &impl Recipe,
        tiles: &ShardTiles,
        cuts: &RowCuts,
        fetch: Usage,
        need: Usage,
        held: &[BufferKey],
    ) -> Result<Self, FormatError> {
        let (full, tall) = (tiles.full(), tiles.tall());
        check_cuts(recipe, tall, cuts)?;
        recipe.check(full)?;
        let stored = stored(recipe, fetch);
        let quantum = row_quantum(&stored);
        if let Some((rank, start)) = cuts.off_quantum(quantum) {
            return Err(FormatError::OffQuantum {
                recipe: recipe.name(),
                usage: fetch,
                rows: tall.rows,
                world: cuts.world(),
                quantum,
                rank,
                start,
            });
        }
        let steps = steps(recipe, tiles, cuts, [fetch, need], held, &stored);
        Ok(Self {
            full,
            tiles: *tiles,
            cuts: cuts.clone(),
            usage: need,
            steps,
        })
    }

    /// As [`GatherPlan::with_cuts`], for ranks whose rows may begin and end within blocks, and that store [`Recipe::stored_cut_anywhere`]: codes travel in the
    /// order of rows, and scales do not travel.
    ///
    /// # Errors
    /// A shape that the recipe cannot take, or cuts of another number of rows.
    pub fn with_cut_blocks(
        recipe: &impl Recipe,
        full: Shape,
        cuts: &RowCuts,
        fetch: Usage,
        need: Usage,
        held: &[BufferKey],
    ) -> Result<Self, FormatError> {
        check_cuts(recipe, full, cuts)?;
        let stored = recipe.stored_cut_anywhere(fetch);
        let tiles = ShardTiles::of_rows(recipe, full, fetch);
        let steps = steps(recipe, &tiles, cuts, [fetch, need], held, &stored);
        Ok(Self {
            full,
            tiles,
            cuts: cuts.clone(),
            usage: need,
            steps,
        })
    }

    /// The same buffers from parts of their bytes, as equal as can be: those that each group of `ranks` neighbours kept of the
    /// full tensor.
    fn in_parts(&self, ranks: usize) -> Self {
        let part = |step: &GatherStep| match step {
            GatherStep::Concat { spec, keep, .. } => {
                let bytes = spec.bytes(self.full);
                let most = bytes.div_ceil(ranks);
                let piece = |rank| most.min(bytes.saturating_sub(rank % ranks * most));
                GatherStep::Concat {
                    spec: *spec,
                    layout: PieceLayout::Rows,
                    pieces: (0..self.cuts.world()).map(piece).collect(),
                    keep: *keep,
                }
            }
            step => step.clone(),
        };
        Self {
            steps: self.steps.iter().map(part).collect(),
            ..self.clone()
        }
    }

    /// Bytes that all ranks together put on the wire.
    pub fn wire_bytes(&self) -> usize {
        self.steps.iter().map(GatherStep::wire_bytes).sum()
    }

    /// The specs of the buffers that stay in the gathered tensor after this plan ran.
    pub fn kept(&self) -> impl Iterator<Item = &BufferSpec> {
        self.steps
            .iter()
            .filter(|step| !matches!(step, GatherStep::Concat { keep: false, .. }))
            .map(GatherStep::spec)
    }
}

/// Accepts cuts of the rows of `full`, which the recipe can have.
fn check_cuts(recipe: &impl Recipe, full: Shape, cuts: &RowCuts) -> Result<(), FormatError> {
    recipe.check(full)?;
    if cuts.rows() == full.rows {
        return Ok(());
    }
    Err(FormatError::CutsOfOtherRows {
        full,
        rows: cuts.rows(),
        world: cuts.world(),
    })
}

/// The steps that make the buffers for `need` of those that ranks have `stored` for `fetch`.
fn steps(
    recipe: &impl Recipe,
    tiles: &ShardTiles,
    cuts: &RowCuts,
    [fetch, need]: [Usage; 2],
    held: &[BufferKey],
    stored: &[BufferSpec],
) -> SmallVec<[GatherStep; 4]> {
    let all = recipe.buffers(Usage::BOTH);
    let fetched = recipe.buffers(fetch);
    let gather = |stored: &BufferSpec| {
        if stored.origin == Origin::Replicated {
            return GatherStep::Replicated { spec: *stored };
        }
        let spec = all.iter().find(|spec| spec.key == stored.key);
        let spec = *spec.unwrap_or(stored);
        let (rows, tall) = (cuts.ranges(), tiles.tall());
        // Tiles of one row of entries are in the order of the matrix.
        let moved = !tiles.are_rows();
        let below = moved && stored.entries(tiles.tile())[0] > 1;
        GatherStep::Concat {
            spec,
            layout: match (stored.axes[0], spec.axes[0]) {
                (Axis::Rows, Axis::Rows) if below => PieceLayout::TilesBelow,
                (Axis::Rows, Axis::Rows) => PieceLayout::Rows,
                (Axis::Rows, Axis::Cols) => PieceLayout::Transpose,
                (Axis::Cols, _) if moved => PieceLayout::TilesBeside,
                (Axis::Cols, _) => PieceLayout::Interleave,
            },
            pieces: {
                // Nearly all ranks have as many rows as the one before.
                let mut last = (0, stored.bytes(tall.with_rows(0)));
                let bytes = |range: Range<usize>| {
                    if range.len() != last.0 {
                        last = (range.len(), stored.bytes(tall.with_rows(range.len())));
                    }
                    last.1
                };
                rows.map(bytes).collect()
            },
            keep: fetched.iter().any(|f| f.key == spec.key),
        }
    };
    let is_stored = |key| stored.iter().any(|spec| spec.key == key);
    let needed = recipe.buffers(need);
    let derived = needed.iter().filter_map(|&spec| match spec.origin {
        Origin::TransposeOf(from) if !is_stored(spec.key) => {
            Some(GatherStep::Derive { spec, from })
        }
        _ => None,
    });
    let sent = stored.iter().filter(|spec| !held.contains(&spec.key));
    sent.map(gather).chain(derived).collect()
}

/// The buffers that are quantized or replicated, from which all of `specs` follow.
fn sources(recipe: &impl Recipe, specs: &[BufferSpec]) -> SmallVec<[BufferSpec; 6]> {
    let all = recipe.buffers(Usage::BOTH);
    let mut found: SmallVec<[BufferSpec; 6]> = SmallVec::new();
    for spec in specs {
        let key = match spec.origin {
            Origin::TransposeOf(from) => from,
            Origin::Quantized | Origin::Replicated => spec.key,
        };
        let source = all.iter().find(|s| s.key == key).unwrap_or(spec);
        if !found.iter().any(|s| s.key == key) {
            found.push(*source);
        }
    }
    found
}

/// The buffers that a rank stores of its shard so that `usage` can be gathered.
pub(crate) fn stored(recipe: &impl Recipe, usage: Usage) -> SmallVec<[BufferSpec; 6]> {
    sources(recipe, &recipe.buffers(usage))
}

/// The buffers that a rank stores of a shard whose rows may begin and end within blocks. Scales are not derived: each is stored whole.
pub(crate) fn stored_cut_anywhere(recipe: &impl Recipe, usage: Usage) -> BufferList {
    let buffers = recipe.buffers(usage);
    let data = sources(recipe, &buffers).into_iter();
    let data = data.filter(|spec| spec.key.part == Part::Data);
    let scales = buffers.into_iter();
    let scales = scales.filter(|spec| spec.key.part != Part::Data);
    data.chain(scales).map(BufferSpec::cut_anywhere).collect()
}

/// The gathers of one training step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PhasePlans {
    /// Before the forward GEMM.
    pub forward: GatherPlan,
    /// Before the backward GEMMs.
    pub backward: GatherPlan,
    /// In place of `backward` where groups of ranks have kept parts ([`ReshardAfterForward::Group`]): the pieces are those
    /// parts, of every rank of the world, and each group gathers its own.
    pub parts: Option<GatherPlan>,
    /// In place of `backward` where forward runs again before it ([`ReshardAfterForward::Yes`]): what is not there then.
    pub rest: Option<GatherPlan>,
}

impl PhasePlans {
    /// Plans both phases. Where full tensors are freed after forward each phase gathers only what it needs; otherwise
    /// forward gathers everything once. Backward then only derives, or gathers the parts that a group of ranks kept.
    ///
    /// # Errors
    /// A shape that the recipe cannot take, cuts of another number of rows or off the recipe's
    /// quantum, or groups that do not divide the ranks.
    pub fn new(
        recipe: &impl Recipe,
        full: Shape,
        cuts: &RowCuts,
        reshard: impl Into<ReshardAfterForward>,
    ) -> Result<Self, FormatError> {
        Self::with_plans(cuts.world(), reshard, |fetch, need, held| {
            GatherPlan::with_cuts(recipe, full, cuts, fetch, need, held)
        })
    }

    /// The same for `world` ranks whose gathers are planned by `plan(fetch, need, held)`, as [`GatherPlan::with_cuts`] does.
    ///
    /// # Errors
    /// Groups that do not divide the ranks, or what `plan` returns.
    pub fn with_plans(
        world: usize,
        reshard: impl Into<ReshardAfterForward>,
        plan: impl Fn(Usage, Usage, &[BufferKey]) -> Result<GatherPlan, FormatError>,
    ) -> Result<Self, FormatError> {
        let [f, b] = Phase::ALL.map(Phase::usage);
        let policy = reshard.into().among(world)?;
        let forward = match policy {
            ReshardAfterForward::Yes => plan(f, f, &[])?,
            ReshardAfterForward::No | ReshardAfterForward::Group(_) => plan(f | b, f, &[])?,
        };
        let held: SmallVec<[BufferKey; 6]> = forward.kept().map(|spec| spec.key).collect();
        let (backward, parts, rest) = match policy {
            ReshardAfterForward::Yes => (plan(b, b, &[])?, None, Some(plan(b, b, &held)?)),
            ReshardAfterForward::No => (plan(f | b, b, &held)?, None, None),
            ReshardAfterForward::Group(ranks) => {
                let backward = plan(b, b, &[])?;
                let parts = backward.in_parts(ranks);
                (backward, Some(parts), None)
            }
        };
        Ok(Self {
            forward,
            backward,
            parts,
            rest,
        })
    }

    /// The plan of `phase` in a step.
    pub fn phase(&self, phase: Phase) -> &GatherPlan {
        match phase {
            Phase::Forward => &self.forward,
            Phase::Backward => self.parts.as_ref().unwrap_or(&self.backward),
        }
    }

    /// Bytes that all ranks together put on the wire in one step.
    pub fn wire_bytes(&self) -> usize {
        let phases = Phase::ALL.map(|phase| self.phase(phase).wire_bytes());
        phases.iter().sum()
    }
}
