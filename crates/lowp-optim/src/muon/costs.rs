//! [`MatrixCosts`]: what matrices that are made orthogonal take of memory and who works on them, before anything is allocated.

use half::bf16;
use lowp_format::Shape;

use super::deal;
use super::newton_schulz::ScratchLens;
use crate::MatrixCut;

/// Memory of each rank for the work on matrices, and who works on which. A step follows the same numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MatrixCosts {
    /// The rank that works on each matrix, in the order of the parameters.
    pub owners: Vec<usize>,
    /// Bytes of each rank, beside what products work in.
    pub bytes: Vec<u128>,
}

impl MatrixCosts {
    /// Computes the costs of matrices over `ranks` ranks. `matrices` has, in the order of the parameters, the number of each one's kind.
    ///
    /// # Panics
    /// A number of no kind, or a cut over another number of ranks.
    pub fn new(kinds: &[MatrixCut], matrices: &[usize], ranks: usize) -> Self {
        let owners = owners(matrices.iter().map(|&kind| kinds[kind].full), ranks);
        if matrices.is_empty() {
            let bytes = vec![0; ranks];
            return Self { owners, bytes };
        }
        let (mut entries, mut scratch) = (vec![0u128; ranks], vec![ScratchLens::default(); ranks]);
        let mut counts = vec![0u128; kinds.len()];
        for (&kind, &owner) in matrices.iter().zip(&owners) {
            counts[kind] += 1;
            let cut = &kinds[kind];
            let [own, other] = [true, false].map(|owns| cut.entries(owner, owns) as u128);
            entries[owner] += own - other;
            scratch[owner] = scratch[owner].with(cut);
        }
        for (cut, count) in kinds.iter().zip(counts).filter(|(_, count)| *count > 0) {
            for (rank, entries) in entries.iter_mut().enumerate() {
                *entries += count * cut.entries(rank, false) as u128;
            }
        }
        let bytes = entries.into_iter().zip(scratch);
        let bytes =
            bytes.map(|(entries, scratch)| size_of::<bf16>() as u128 * entries + scratch.bytes());
        let bytes = bytes.collect();
        Self { owners, bytes }
    }
}

/// The rank of each matrix of these shapes.
pub(super) fn owners(shapes: impl Iterator<Item = Shape>, ranks: usize) -> Vec<usize> {
    let costs: Vec<u128> = shapes.map(deal::cost).collect();
    deal::deal(&costs, ranks)
}

impl MatrixCut {
    /// Entries of bf16 that `rank` has of it: its piece or, where it works on the matrix, all of it, with the piece apart where that cannot lie
    /// in its place.
    fn entries(&self, rank: usize, owns: bool) -> usize {
        let piece = self.ranges[rank].len();
        match (owns, self.lies_in_place(rank)) {
            (false, _) => piece,
            (true, true) => self.full.elements(),
            (true, false) => self.full.elements() + piece,
        }
    }
}
