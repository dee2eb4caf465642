//! [`WeightCost`]: what one weight costs each rank, from its recipe's specs and gather plans.

use super::config::CostConfig;
use crate::cuts::flat_shards;
use lowp_format::{
    Axis, BlockCuts, BufferSpec, FormatError, GatherPlan, GatherStep, KernelKey, Part, PhasePlans,
    Recipe, Role, RowCuts, Shape, Usage,
};
use lowp_shard::{FlatShard, ShardError};
use std::iter::Sum;
use std::ops::{AddAssign, Mul};

/// What a weight is gathered for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    Forward,
    /// Forward once more, in backward.
    Recompute,
    Backward,
    /// Full weights, after the step.
    Whole,
}

/// One gather of a block of weights, or of a full weight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Gather {
    pub(super) of: Use,
    /// Bytes of the ranks that gather among each other: the ranks of a replica, or a smaller group of them.
    pub(super) pieces: Vec<u64>,
    /// In how many batches, one after the other: large pieces are sent apart from small ones.
    pub(super) batches: usize,
    /// What each rank does beside: what it transposes, interleaves and keeps, and all of them in a world of one.
    pub(super) local: Local,
}

/// Work of a rank next to the gather.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Local {
    /// Bytes read and written.
    pub(super) bytes: u64,
    /// Copies and transposes.
    pub(super) count: u64,
}

impl Local {
    pub(super) fn of(bytes: u64) -> Self {
        let count = u64::from(bytes > 0);
        Self {
            bytes: 2 * bytes,
            count,
        }
    }
}

impl AddAssign for Local {
    fn add_assign(&mut self, other: Self) {
        self.bytes += other.bytes;
        self.count += other.count;
    }
}

impl Mul<u64> for Local {
    type Output = Self;

    fn mul(self, times: u64) -> Self {
        Self {
            bytes: self.bytes * times,
            count: self.count * times,
        }
    }
}

impl Sum for Local {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), |mut sum, one| {
            sum += one;
            sum
        })
    }
}

/// One weight over the ranks of a replica.
#[derive(Clone, Debug)]
pub(super) struct WeightCost {
    /// Bytes that each rank stores.
    pub(super) stored: Vec<u64>,
    /// Bytes of `stored` that are scales.
    pub(super) scales: Vec<u64>,
    /// Elements of which each rank has masters, moments and gradients.
    pub(super) elements: Vec<u64>,
    /// Bytes of its masters beside the weight.
    pub(super) masters: Vec<u64>,
    /// How its rows are gathered, with those of its block.
    pub(super) plans: Option<PhasePlans>,
    /// How it is gathered as a full weight.
    pub(super) whole: Option<Gather>,
    /// Bytes of its own that each rank keeps from forward to backward.
    pub(super) parts: Vec<u64>,
    /// Bytes beside a full weight.
    pub(super) staged: u64,
    /// How often a step reads its masters.
    pub(super) master_passes: u64,
}

impl WeightCost {
    /// Whether ranks have as many elements each.
    pub(super) fn has_even_elements(&self) -> bool {
        self.elements.windows(2).all(|pair| pair[0] == pair[1])
    }

    /// A weight of `shape` in `recipe`, cut like this or whole on every rank.
    pub(super) fn new(
        recipe: &impl Recipe,
        shape: Shape,
        cuts: Option<&BlockCuts>,
        config: &CostConfig,
    ) -> Result<Self, ShardError> {
        recipe.check(shape)?;
        match cuts {
            Some(cuts) => Ok(Self::in_rows(recipe, cuts, config)?),
            None => Self::whole(recipe, shape, config),
        }
    }

    /// Rows or tiles of everything (`ShardedTensor`, `GatherGroup`).
    fn in_rows(
        recipe: &impl Recipe,
        BlockCuts { tiles, cuts }: &BlockCuts,
        config: &CostConfig,
    ) -> Result<Self, FormatError> {
        let (ranks, shape) = (config.mesh.shard, tiles.tall());
        let plans = PhasePlans::with_plans(ranks, config.reshard, |fetch, need, held| {
            GatherPlan::with_tiles(recipe, tiles, cuts, fetch, need, held)
        })?;
        let stored = recipe.stored(Usage::BOTH);
        let rows = || cuts.ranges().map(|range| range.len());
        let elements: Vec<u64> = rows().map(|rows| (rows * shape.cols) as u64).collect();
        let parts = plans.parts.as_ref().map(pieces);
        Ok(Self {
            stored: rows()
                .map(|rows| bytes_of(&stored, shape.with_rows(rows), |_| true))
                .collect(),
            scales: rows()
                .map(|rows| bytes_of(&stored, shape.with_rows(rows), is_scale))
                .collect(),
            masters: masters(recipe, &elements, config),
            elements,
            whole: None,
            plans: Some(plans),
            parts: parts.unwrap_or_else(|| vec![0; ranks]),
            staged: 0,
            master_passes: master_passes(recipe, false),
        })
    }

    /// The full weight on every rank, with slices of the masters (`FlatParam`, `FlatGather`).
    fn whole(recipe: &impl Recipe, shape: Shape, config: &CostConfig) -> Result<Self, ShardError> {
        let ranks = config.mesh.shard;
        let slices = flat_shards(recipe, shape, ranks, config.state, config.rule)?;
        let kept = recipe.buffers(Usage::BOTH);
        let cuts = RowCuts::new(shape.rows, 1, recipe.row_quantum(Usage::BOTH))?;
        let plan = GatherPlan::with_cuts(recipe, shape, &cuts, Usage::BOTH, Usage::BOTH, &[])?;
        let (mut sent, mut staged) = (vec![0; ranks], 0);
        for step in &plan.steps {
            let mut spec = *step.spec();
            if !kept.iter().any(|kept| kept.key == spec.key) {
                staged += spec.bytes(shape) as u64;
            }
            if !matches!(step, GatherStep::Concat { .. }) || spec.key.part.is_outer() {
                continue;
            }
            if spec.axes[0] == Axis::Cols {
                spec.axes.reverse();
                spec.tile.reverse();
                staged += spec.bytes(shape) as u64;
            }
            if spec.key.part == Part::BlockScale {
                for (sent, slice) in sent.iter_mut().zip(&slices) {
                    *sent += (spec.code.bytes(1) * slice.whole_blocks(spec.tile).len()) as u64;
                }
                continue;
            }
            let stored: Vec<FlatShard> = slices.iter().map(|s| s.stored_as(spec.code)).collect();
            let ranges = FlatShard::gather_ranges(&stored)?;
            for (sent, range) in sent.iter_mut().zip(ranges) {
                *sent += range.len() as u64;
            }
        }
        let elements: Vec<u64> = slices.iter().map(|slice| slice.len() as u64).collect();
        Ok(Self {
            stored: vec![bytes_of(&kept, shape, |_| true); ranks],
            scales: vec![bytes_of(&kept, shape, is_scale); ranks],
            masters: masters(recipe, &elements, config),
            elements,
            whole: Some(Gather {
                of: Use::Whole,
                pieces: sent,
                batches: 1,
                // Each is read and written in its other order.
                local: Local::of(staged),
            }),
            plans: None,
            parts: vec![0; ranks],
            staged,
            master_passes: master_passes(recipe, true),
        })
    }
}

/// Bytes of the masters of these elements of each rank.
fn masters(recipe: &impl Recipe, elements: &[u64], config: &CostConfig) -> Vec<u64> {
    let dtype = config.state.of_recipe(recipe).master;
    elements
        .iter()
        .map(|&len| dtype.bytes() as u64 * len)
        .collect()
}

/// Bytes of the buffers `which` of a tensor of `shape`.
fn bytes_of(specs: &[BufferSpec], shape: Shape, which: fn(&BufferSpec) -> bool) -> u64 {
    let specs = specs.iter().filter(|spec| which(spec));
    specs.map(|spec| spec.bytes(shape) as u64).sum()
}

fn is_scale(spec: &BufferSpec) -> bool {
    spec.key.part != Part::Data
}

/// Bytes that each rank sends.
fn pieces(plan: &GatherPlan) -> Vec<u64> {
    let of = |rank| -> u64 {
        let pieces = plan.steps.iter().filter_map(|step| step.piece(rank));
        pieces.map(|bytes| bytes as u64).sum()
    };
    (0..plan.cuts.world()).map(of).collect()
}

/// How often a step reads the masters of a weight: to update them and, where that is another pass, to cast them. Slices of a `flat` weight
/// are cast apart, after the amaxes of their blocks and lines.
pub(crate) fn master_passes(recipe: &impl Recipe, flat: bool) -> u64 {
    let kernels = recipe.quantizers(Role::Weight).kernels();
    let any = |of: fn(&KernelKey) -> bool| u64::from(kernels.iter().any(of));
    match flat {
        true => 2 + any(|key| key.block.is_some() || key.scale.is_by_line()),
        false => 1 + any(|key| key.scale.waits_for_amax()),
    }
}
