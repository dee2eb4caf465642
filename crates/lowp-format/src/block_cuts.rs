//! [`block_cuts`]: where the weights of a block of the network are cut, so that its ranks have about as much each.

use crate::{FormatError, Recipe, RowCuts, Shape, ShardTiles, Usage, lcm};

/// How a weight is cut.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct BlockCuts {
    /// The tiles that are never cut.
    pub tiles: ShardTiles,
    /// Where the rows of the tall matrix are cut.
    pub cuts: RowCuts,
}

impl BlockCuts {
    /// The cuts of a weight by itself: whole rows, as [`RowCuts::new`] makes them, at multiples of `unit` elements of the flattened matrix.
    ///
    /// # Errors
    /// A world of no ranks.
    pub fn of_rows(
        recipe: &impl Recipe,
        full: Shape,
        world: usize,
        unit: usize,
    ) -> Result<Self, FormatError> {
        let tiles = ShardTiles::of_rows(recipe, full, Usage::BOTH);
        let cuts = RowCuts::new(full.rows, world, quantum(&tiles, unit))?;
        Ok(Self { tiles, cuts })
    }

    /// Adds the elements of each rank to `sums`.
    fn add_to(&self, sums: &mut [u128]) {
        let cols = self.tiles.tall().cols as u128;
        for (sum, rows) in sums.iter_mut().zip(self.cuts.ranges()) {
            *sum += rows.len() as u128 * cols;
        }
    }
}

/// Rows of the tall matrix that are never cut: of whole tiles, and of a multiple of `unit` elements.
fn quantum(tiles: &ShardTiles, unit: usize) -> usize {
    let tile = tiles.tile();
    match tile.cols {
        0 => tile.rows,
        cols => lcm(tile.rows, lcm(cols, unit) / cols),
    }
}

/// Most parts of the weights of a block: of more, plans would hold gigabytes.
const MOST_PARTS: usize = 1 << 20;

/// Cuts of the weights of a block for `world` ranks, all of which are gathered for both usages. Where a rank begins is a multiple of `unit`
/// elements of the flattened tall matrix, and so are the columns of tiles that are narrower than the matrix: a run of `unit` elements of the
/// flattened matrix, from a multiple of `unit` on, is of one rank.
///
/// Each weight is cut by itself ([`BlockCuts::of_rows`]) if no rank has more than 1.1 of the mean then, or if weights times ranks are more than 2^20. Otherwise a rank has the tiles of a range
/// of all weights, one after the other: tiles of whole rows, or else the widest tiles that keep this bound, or else those that are the most
/// even.
///
/// # Errors
/// A world of no ranks.
pub fn block_cuts<R: Recipe>(
    weights: &[(R, Shape)],
    world: usize,
    unit: usize,
) -> Result<Vec<BlockCuts>, FormatError> {
    let by_itself = weights
        .iter()
        .map(|(recipe, full)| BlockCuts::of_rows(recipe, *full, world, unit));
    let by_itself: Vec<BlockCuts> = by_itself.collect::<Result<_, _>>()?;
    if weights.len().saturating_mul(world) > MOST_PARTS {
        return Ok(by_itself);
    }
    let total: u128 = weights
        .iter()
        .map(|(_, full)| full.elements() as u128)
        .sum();
    let is_even = |most: u128| 10 * most * world as u128 <= 11 * total;
    let mut best = (most(&by_itself, world), by_itself);
    let widest = weights.iter().map(|(_, full)| full.cols).max().unwrap_or(0);
    let mut cols = widest.next_power_of_two();
    let mut tried = Vec::new();
    while !is_even(best.0) && cols > 0 {
        let tiles = weights
            .iter()
            .map(|(recipe, full)| ShardTiles::at_most(recipe, *full, Usage::BOTH, cols, unit));
        let tiles: Vec<ShardTiles> = tiles.collect();
        cols /= 2;
        if tiles == tried {
            continue;
        }
        let found = cut_together(&tiles, world, unit);
        let most = most(&found, world);
        if most < best.0 {
            best = (most, found);
        }
        tried = tiles;
    }
    Ok(best.1)
}

/// Elements of the rank that has most.
fn most(weights: &[BlockCuts], world: usize) -> u128 {
    let mut sums = vec![0; world];
    for weight in weights {
        weight.add_to(&mut sums);
    }
    sums.into_iter().max().unwrap_or(0)
}

/// Each rank has a range of all weights, one after the other, that begins and ends at the tiles nearest to equal ranges.
fn cut_together(weights: &[ShardTiles], world: usize, unit: usize) -> Vec<BlockCuts> {
    let elements = |tiles: &ShardTiles| tiles.full().elements() as u128;
    let total: u128 = weights.iter().map(elements).sum();
    let mut before = 0;
    let cut = |tiles: &ShardTiles| {
        let (tall, own) = (tiles.tall(), elements(tiles));
        let rows = quantum(tiles, unit);
        let one = (rows as u128 * tall.cols as u128).max(1);
        let start = |rank: usize| {
            let wanted = total * rank as u128 / world as u128;
            let within = wanted.saturating_sub(before).min(own);
            match rank {
                0 => 0,
                _ if within == own => tall.rows,
                // At most the tiles of the matrix.
                _ => ((within + one / 2) / one) as usize * rows,
            }
        };
        let starts = (0..=world).map(|rank| start(rank).min(tall.rows)).collect();
        before += own;
        BlockCuts {
            tiles: *tiles,
            cuts: RowCuts::from_starts(starts),
        }
    };
    weights.iter().map(cut).collect()
}
