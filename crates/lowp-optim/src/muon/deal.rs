//! Which rank orthogonalises which matrix.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use lowp_format::Shape;

/// Floating-point operations of [`super::newton_schulz`] on a matrix: per step the Gram matrix of the shorter side, its square, and the product
/// with the matrix.
pub(crate) fn cost(shape: Shape) -> u128 {
    let [short, long] = [shape.rows.min(shape.cols), shape.rows.max(shape.cols)].map(|n| n as u128);
    super::newton_schulz::STEPS as u128 * 2 * short * short * (2 * long + short)
}

/// The rank of each matrix, of `ranks`: the most expensive matrix first, each to the rank that has least so far. Of equals the first matrix and
/// the first rank come first. No rank has more than the mean and one matrix.
pub(crate) fn deal(costs: &[u128], ranks: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..costs.len()).collect();
    order.sort_by_key(|&matrix| Reverse(costs[matrix]));
    let mut loads: BinaryHeap<Reverse<(u128, usize)>> =
        (0..ranks).map(|rank| Reverse((0, rank))).collect();
    let mut owners = vec![0; costs.len()];
    for matrix in order {
        // The rank that has least goes back with more.
        let Some(mut least) = loads.peek_mut() else {
            break;
        };
        let Reverse((load, rank)) = &mut *least;
        owners[matrix] = *rank;
        *load = load.saturating_add(costs[matrix]);
    }
    owners
}

/// The batch of each matrix, of at most `most`: those of a rank follow each other in equal numbers, so that all ranks have the same batches in
/// work.
pub(crate) fn batches(owners: &[usize], most: usize) -> Vec<usize> {
    let count = |owner: usize| owners.iter().filter(|&&other| other == owner).count();
    let mut before = std::collections::HashMap::new();
    let batch = |&owner: &usize| {
        let number = before.entry(owner).or_insert(0);
        let batch = *number * most / count(owner).max(most);
        *number += 1;
        batch
    };
    owners.iter().map(batch).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn no_rank_has_more_than_the_mean_and_one_matrix(
            costs in prop::collection::vec(0u128..1000, 0..60),
            ranks in 1usize..20,
            most in 1usize..6,
        ) {
            let owners = deal(&costs, ranks);
            prop_assert_eq!(owners.len(), costs.len());
            prop_assert!(owners.iter().all(|&owner| owner < ranks));
            let load = |rank| -> u128 {
                let own = owners.iter().zip(&costs).filter(|(owner, _)| **owner == rank);
                own.map(|(_, cost)| cost).sum()
            };
            let loads: Vec<u128> = (0..ranks).map(load).collect();
            let (sum, largest) = (costs.iter().sum::<u128>(), costs.iter().max().copied());
            let bound = sum + (ranks as u128 - 1) * largest.unwrap_or(0);
            prop_assert!(loads.iter().all(|load| load * ranks as u128 <= bound), "{loads:?}");
            // As many ranks as matrices: each has one.
            if costs.len() <= ranks {
                prop_assert!(loads.iter().all(|load| *load <= largest.unwrap_or(0)));
            }
            let batches = batches(&owners, most);
            prop_assert!(batches.iter().all(|&batch| batch < most));
            for rank in 0..ranks {
                let own: Vec<usize> = (0..costs.len()).filter(|&i| owners[i] == rank).collect();
                prop_assert!(own.windows(2).all(|pair| batches[pair[0]] <= batches[pair[1]]));
                let of = |batch| own.iter().filter(|&&i| batches[i] == batch).count();
                let longest = (0..most).map(of).max().unwrap_or(0);
                prop_assert!(longest <= own.len().div_ceil(most));
            }
        }
    }

    #[test]
    fn longer_sides_and_equal_costs() {
        // Five steps of 2 (n n k + n n n + n n k).
        assert_eq!(cost(Shape::new(3, 7)), 5 * 2 * (9 * 7 + 27 + 9 * 7));
        assert_eq!(cost(Shape::new(7, 3)), cost(Shape::new(3, 7)));
        assert_eq!(deal(&[1, 5, 5, 2, 0], 2), [1, 0, 1, 0, 1]);
        assert_eq!(batches(&[0, 0, 0, 0, 1, 0], 2), [0, 0, 0, 1, 0, 1]);
    }
}
