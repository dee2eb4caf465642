//! [`Weights`]: the costs of many weights, made once for each shape, recipe and place of cuts.

use super::block::BlockCost;
use super::config::CostConfig;
use super::weight::WeightCost;
use crate::{Sharding, VarPlace};
use lowp_format::{BlockCuts, FormatError, Recipe, ReshardAfterForward, Shape, is_in_bf16};
use lowp_optim::{MasterDtype, MatrixCut};
use lowp_shard::ShardError;

/// Weights that cost the same.
#[derive(Clone, Debug)]
pub(super) struct EqualWeights<R> {
    recipe: R,
    shape: Shape,
    /// Of rows; of ranks that have whole weights, none.
    cuts: Option<BlockCuts>,
    pub(super) count: u128,
    pub(super) cost: WeightCost,
}

/// A weight whose cost is asked for.
#[derive(Clone, Copy, Debug)]
pub(super) struct NewWeight<R> {
    pub(super) recipe: R,
    /// The block of the network that it is of.
    pub(super) block: usize,
    pub(super) shape: Shape,
}

/// A weight of a block.
#[derive(Clone, Copy, Debug)]
struct OfBlock {
    block: usize,
    /// Its number among the kinds.
    kind: usize,
}

/// All weights, or all variables.
#[derive(Clone, Debug)]
pub(super) struct Weights<R> {
    pub(super) kinds: Vec<EqualWeights<R>>,
    /// In the order of forward.
    weights: Vec<OfBlock>,
    /// Blocks that differ.
    pub(super) costs: Vec<BlockCost>,
    /// The number of the cost of each block, in the order of forward.
    pub(super) blocks: Vec<usize>,
}

impl<R: Recipe> Weights<R> {
    /// The costs of weights, whose states are never cut within `unit` elements; `cut` cuts those of a block.
    pub(super) fn new(
        all: impl Iterator<Item = NewWeight<R>>,
        config: &CostConfig,
        unit: usize,
        cut: impl Fn(&[(R, Shape)], usize, usize) -> Result<Vec<BlockCuts>, FormatError>,
    ) -> Result<Self, (usize, ShardError)> {
        let all: Vec<NewWeight<R>> = all.collect();
        let mut kinds: Vec<EqualWeights<R>> = Vec::new();
        let mut blocks = Vec::new();
        // Blocks that were seen, and the kinds of their weights.
        let mut seen: Vec<Vec<(R, Shape)>> = Vec::new();
        let mut known: Vec<Vec<usize>> = Vec::new();
        for of_block in all.chunk_by(|a, b| a.block == b.block) {
            let first = blocks.len();
            let weights: Vec<(R, Shape)> = of_block.iter().map(|w| (w.recipe, w.shape)).collect();
            let found = match seen.iter().position(|same| *same == weights) {
                Some(found) => found,
                None => {
                    let cuts = match config.sharding {
                        Sharding::Zero1 => vec![None; weights.len()],
                        Sharding::Fsdp => {
                            let cuts = cut(&weights, config.mesh.shard, unit);
                            let cuts = cuts.map_err(|error| (first, ShardError::from(error)))?;
                            cuts.into_iter().map(Some).collect()
                        }
                    };
                    let mut of_weights = Vec::new();
                    for (at, (&(recipe, shape), cuts)) in weights.iter().zip(cuts).enumerate() {
                        let same = |kind: &EqualWeights<R>| {
                            kind.shape == shape && kind.recipe == recipe && kind.cuts == cuts
                        };
                        let kind = match kinds.iter().position(same) {
                            Some(kind) => kind,
                            None => {
                                let cost = WeightCost::new(&recipe, shape, cuts.as_ref(), config);
                                kinds.push(EqualWeights {
                                    recipe,
                                    shape,
                                    cuts,
                                    count: 0,
                                    cost: cost.map_err(|error| (first + at, error))?,
                                });
                                kinds.len() - 1
                            }
                        };
                        of_weights.push(kind);
                    }
                    seen.push(weights);
                    known.push(of_weights);
                    known.len() - 1
                }
            };
            for (&kind, weight) in known[found].iter().zip(of_block) {
                kinds[kind].count += 1;
                blocks.push(OfBlock {
                    block: weight.block,
                    kind,
                });
            }
        }
        let mut weights = Self {
            kinds,
            weights: blocks,
            costs: Vec::new(),
            blocks: Vec::new(),
        };
        weights.block_costs(config);
        Ok(weights)
    }

    /// For each block, in the order of forward, the number of its cost; blocks of equal plans of gathers have one.
    fn block_costs(&mut self, config: &CostConfig) {
        let kinds = &self.kinds;
        let first = |kind: &EqualWeights<R>| {
            let same = |other: &EqualWeights<R>| other.cost.plans == kind.cost.plans;
            // Full weights are gathered by themselves.
            let known = kinds
                .iter()
                .position(same)
                .filter(|_| kind.cost.plans.is_some());
            known.or_else(|| kinds.iter().position(|other| std::ptr::eq(other, kind)))
        };
        let first: Vec<usize> = kinds.iter().filter_map(first).collect();
        let mut known: Vec<Vec<usize>> = Vec::new();
        for block in self.weights.chunk_by(|a, b| a.block == b.block) {
            let block: Vec<usize> = block.iter().map(|one| first[one.kind]).collect();
            let number = match known.iter().position(|known| *known == block) {
                Some(number) => number,
                None => {
                    let costs = block.iter().map(|&kind| &kinds[kind].cost);
                    let costs: Vec<&WeightCost> = costs.collect();
                    self.costs.push(BlockCost::new(&costs, config));
                    known.push(block);
                    known.len() - 1
                }
            };
            self.costs[number].count += 1;
            self.blocks.push(number);
        }
    }

    /// Memory that weights are gathered in: blocks with equal plans reuse it, unless they are kept until backward. With prefetches a
    /// block and the one before it have memory at once.
    pub(super) fn gathered(&self, config: &CostConfig) -> u128 {
        let costs = self.costs.iter();
        if config.reshard == ReshardAfterForward::No {
            let kept = costs.map(|cost| cost.count * u128::from(cost.gathered));
            return kept.sum::<u128>() + self.messages();
        }
        let prefetch = config.prefetch && config.vars == VarPlace::Backend;
        let sets = |number: usize| {
            let mut pairs = self.blocks.windows(2);
            let follows = pairs.any(|pair| pair == [number, number]);
            1 + u128::from(prefetch && follows)
        };
        let sets = costs
            .enumerate()
            .map(|(number, cost)| sets(number) * u128::from(cost.gathered));
        sets.sum::<u128>() + self.messages()
    }

    /// Memory that messages arrive in: that of an earlier block serves, if it is as long.
    pub(super) fn messages(&self) -> u128 {
        let mut longest: Vec<u64> = Vec::new();
        let mut sum = 0;
        for cost in &self.costs {
            longest.resize(longest.len().max(cost.messages.len()), 0);
            for (known, &bytes) in longest.iter_mut().zip(&cost.messages) {
                if bytes > *known {
                    *known = bytes;
                    sum += u128::from(bytes);
                }
            }
        }
        sum
    }

    /// What their masters are, in words.
    pub(super) fn masters_are(&self, config: &CostConfig) -> &'static str {
        let in_bf16 = |kind: &EqualWeights<R>| is_in_bf16(&kind.recipe);
        let [any, all] = [
            self.kinds.iter().any(in_bf16),
            self.kinds.iter().all(in_bf16),
        ];
        match config.state.master {
            MasterDtype::Bf16 => "bf16 masters",
            MasterDtype::Bf16Plus16 if any && all => "remainders of masters",
            MasterDtype::Bf16Plus16 if any => "remainders, and fp32 masters",
            MasterDtype::F32 | MasterDtype::Bf16Plus16 => "fp32 masters",
        }
    }

    /// The shapes that there are.
    pub(super) fn shapes(&self) -> impl Iterator<Item = Shape> {
        self.kinds.iter().map(|kind| kind.shape)
    }

    /// The shapes of which ranks own tiles that are in another order.
    pub(super) fn in_tiles(&self) -> impl Iterator<Item = Shape> {
        let tiles = self.kinds.iter().filter_map(|kind| kind.cuts.as_ref());
        let tiles = tiles.filter(|cuts| !cuts.tiles.are_in_order());
        tiles.map(|cuts| cuts.tiles.full())
    }

    /// The elements of each kind that ranks have masters of.
    pub(super) fn matrix_cuts(&self) -> Vec<MatrixCut> {
        let cut = |kind: &EqualWeights<R>| {
            let mut end = 0;
            let ranges = kind.cost.elements.iter().map(|&len| {
                let start = end;
                // At most the elements of a matrix.
                end += usize::try_from(len).unwrap_or(usize::MAX);
                start..end
            });
            MatrixCut {
                full: kind.shape,
                ranges: ranges.collect(),
                tiles: kind.cuts.as_ref().map(|cuts| cuts.tiles),
            }
        };
        self.kinds.iter().map(cut).collect()
    }

    /// The numbers of their kinds, in the order of forward.
    pub(super) fn kinds_in_order(&self) -> impl DoubleEndedIterator<Item = usize> {
        self.weights.iter().map(|weight| weight.kind)
    }

    /// A number of all weights together.
    pub(super) fn sum(&self, of: impl Fn(&WeightCost) -> u128) -> u128 {
        let each = self.kinds.iter();
        each.map(|kind| kind.count * of(&kind.cost)).sum()
    }

    /// Numbers by rank of all weights together.
    pub(super) fn by_rank(&self, ranks: usize, of: impl Fn(&WeightCost) -> &[u64]) -> Vec<u64> {
        let mut sums = vec![0u64; ranks];
        for EqualWeights { count, cost, .. } in &self.kinds {
            for (sum, each) in sums.iter_mut().zip(of(cost)) {
                // At most the bytes of all parameters.
                *sum += u64::try_from(*count).unwrap_or(u64::MAX) * each;
            }
        }
        sums
    }
}
