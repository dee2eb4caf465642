//! Where the parameters of a [`Builder`] are cut: by rows, or as flattened matrices.

use std::ops::Range;

use lowp_format::{BlockCuts, FormatError, Recipe, Role, Shape, block_cuts, lcm};
use lowp_kernels::{Backend, MasterDtype, Rule};
use lowp_optim::{OptimError, StateDtypes};
use lowp_shard::{FlatShard, ShardError, ShardSpec};

use crate::builder::Builder;
use crate::sharded_model::Sharding;
use crate::spec::LinearSpec;

/// The weights of a block, and where their cuts are among those of all weights.
type CutBlock<R> = (Vec<(R, Shape)>, Range<usize>);

impl<B: Backend> Builder<'_, B> {
    /// The elements of each rank where rows are not cut.
    pub(crate) fn flat_ranges(
        &self,
        recipe: &impl Recipe,
        shape: Shape,
    ) -> Result<Vec<Range<usize>>, OptimError> {
        let (state, rule) = (self.options.state, self.options.group.rule);
        let shards = flat_shards(recipe, shape, self.mesh.shard.world_size(), state, rule)?;
        Ok(shards.iter().map(FlatShard::elements).collect())
    }

    /// How weights are cut; where ranks have slices of flattened weights, as if by rows.
    pub(crate) fn cuts<R: Recipe>(
        &self,
        recipe: impl Fn(&LinearSpec) -> R,
        linears: &[LinearSpec],
    ) -> Result<Vec<BlockCuts>, OptimError> {
        let ranks = self.mesh.shard.world_size();
        let unit = self.options.state.unit(self.options.group.rule);
        let weight = |spec: &LinearSpec| (recipe(spec), Shape::new(spec.rows, spec.cols));
        let mut all = Vec::with_capacity(linears.len());
        // Equal blocks are cut alike.
        let mut known: Vec<CutBlock<R>> = Vec::new();
        for block in linears.chunk_by(|a, b| a.block == b.block) {
            let weights: Vec<(R, Shape)> = block.iter().map(weight).collect();
            if let Some((_, same)) = known.iter().find(|(known, _)| *known == weights) {
                all.extend_from_within(same.clone());
                continue;
            }
            let cuts = match self.options.sharding {
                Sharding::Fsdp => block_cuts(&weights, ranks, unit),
                Sharding::Zero1 => cut_by_rows(&weights, ranks, unit),
            };
            let start = all.len();
            all.extend(cuts.map_err(ShardError::from)?);
            known.push((weights, start..all.len()));
        }
        Ok(all)
    }

    /// The elements whose masters each rank has, in rank order: of the flattened tall matrix that `cuts` cuts, or of the flattened weight.
    pub(crate) fn element_ranges(
        &self,
        recipe: &impl Recipe,
        cuts: &BlockCuts,
    ) -> Result<Vec<Range<usize>>, OptimError> {
        match self.options.sharding {
            Sharding::Fsdp => {
                let spec = ShardSpec::of_block(recipe, cuts, self.mesh.shard.rank())?;
                Ok(spec.all_elements())
            }
            Sharding::Zero1 => self.flat_ranges(recipe, cuts.tiles.full()),
        }
    }
}

/// How weights are cut by themselves, at multiples of `unit` elements.
pub(crate) fn cut_by_rows<R: Recipe>(
    weights: &[(R, Shape)],
    ranks: usize,
    unit: usize,
) -> Result<Vec<BlockCuts>, FormatError> {
    let cut = |(recipe, shape): &(R, Shape)| BlockCuts::of_rows(recipe, *shape, ranks, unit);
    weights.iter().map(cut).collect()
}

/// The slices of the masters of a weight that every rank has whole, cut where the narrowest codes, and states in dtypes by a rule, may be. Where the
/// weight is a half of its masters, cuts are at multiples of 16 bytes of it: a GPU updates it by vectors.
pub(crate) fn flat_shards(
    recipe: &impl Recipe,
    shape: Shape,
    ranks: usize,
    state: StateDtypes,
    rule: Rule,
) -> Result<Vec<FlatShard>, ShardError> {
    let vector = match state.of_recipe(recipe).master {
        MasterDtype::Bf16Plus16 => 8,
        MasterDtype::F32 | MasterDtype::Bf16 => 1,
    };
    let unit = lcm(state.unit(rule), vector);
    let codes = recipe.quantizers(Role::Weight).kernels();
    let [row, col] = codes.map(|key| key.element);
    let code = if col.bits() < row.bits() { col } else { row };
    FlatShard::split_at(shape, code, ranks, unit)
}

#[cfg(test)]
mod tests {
    use super::*;
    use lowp_format::{AnyRecipe, RecipeOptions};

    #[test]
    fn slices_of_halves_begin_at_vectors() {
        let recipe =
            |name| AnyRecipe::from_name(name, &RecipeOptions::default()).expect("a recipe");
        for (name, state, unit) in [
            ("bf16", "f32", 1),
            ("bf16", "master=bf16+16", 8),
            ("bf16", "master=bf16+16,exp_avg=fp8,exp_avg_sq=fp8", 32),
            ("fp8-current", "master=bf16+16", 1),
        ] {
            let (state, rule): (StateDtypes, _) = (state.parse().expect("dtypes"), Rule::AdamW);
            for (shape, ranks) in [(Shape::new(64, 33), 3), (Shape::new(7, 5), 3)] {
                let slices = flat_shards(&recipe(name), shape, ranks, state, rule);
                let slices = slices.expect("slices");
                let starts: Vec<usize> = slices.iter().map(|s| s.elements().start).collect();
                let each = shape.elements().div_ceil(ranks).next_multiple_of(unit);
                let expected = (0..ranks).map(|rank| (rank * each).min(shape.elements()));
                assert_eq!(starts, Vec::from_iter(expected), "{name} {unit}");
            }
        }
    }
}
