//! [`Weights`]: the costs of many weights, made once for each shape and recipe.

use super::config::CostConfig;
use super::weight::WeightCost;
use lowp_format::{Recipe, Shape};
use lowp_shard::ShardError;

/// Weights that cost the same.
#[derive(Clone, Debug)]
pub(super) struct Kind<R> {
    recipe: R,
    shape: Shape,
    pub(super) count: u128,
    pub(super) cost: WeightCost,
}

/// A weight of a block.
#[derive(Clone, Copy, Debug)]
pub(super) struct OfBlock {
    pub(super) block: usize,
    /// Its number among the kinds.
    pub(super) kind: usize,
}

/// All weights, or all variables.
#[derive(Clone, Debug)]
pub(super) struct Weights<R> {
    pub(super) kinds: Vec<Kind<R>>,
    /// In the order of forward.
    pub(super) blocks: Vec<OfBlock>,
}

impl<R: Recipe + PartialEq> Weights<R> {
    /// The costs of weights of these recipes, blocks and shapes.
    pub(super) fn new(
        all: impl Iterator<Item = (R, usize, Shape)>,
        config: &CostConfig,
    ) -> Result<Self, (usize, ShardError)> {
        let mut kinds: Vec<Kind<R>> = Vec::new();
        let mut blocks = Vec::new();
        for (number, (recipe, block, shape)) in all.enumerate() {
            let same = |kind: &Kind<R>| kind.shape == shape && kind.recipe == recipe;
            let kind = match kinds.iter().position(same) {
                Some(known) => known,
                None => {
                    let cost = WeightCost::new(&recipe, shape, config);
                    kinds.push(Kind {
                        recipe,
                        shape,
                        count: 0,
                        cost: cost.map_err(|error| (number, error))?,
                    });
                    kinds.len() - 1
                }
            };
            kinds[kind].count += 1;
            blocks.push(OfBlock { block, kind });
        }
        Ok(Self { kinds, blocks })
    }

    /// The shapes that there are.
    pub(super) fn shapes(&self) -> impl Iterator<Item = Shape> {
        self.kinds.iter().map(|kind| kind.shape)
    }

    /// One cost of each kind.
    pub(super) fn costs(&self) -> impl Iterator<Item = &WeightCost> {
        self.kinds.iter().map(|kind| &kind.cost)
    }

    /// A number of all weights together.
    pub(super) fn sum(&self, of: impl Fn(&WeightCost) -> u128) -> u128 {
        let each = self.kinds.iter();
        each.map(|kind| kind.count * of(&kind.cost)).sum()
    }

    /// Numbers by rank of all weights together.
    pub(super) fn by_rank(&self, ranks: usize, of: impl Fn(&WeightCost) -> &[u64]) -> Vec<u64> {
        let mut sums = vec![0u64; ranks];
        for Kind { count, cost, .. } in &self.kinds {
            for (sum, each) in sums.iter_mut().zip(of(cost)) {
                // At most the bytes of all parameters.
                *sum += u64::try_from(*count).unwrap_or(u64::MAX) * each;
            }
        }
        sums
    }
}
