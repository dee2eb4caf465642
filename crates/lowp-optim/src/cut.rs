//! [`MatrixCut`]: which elements of a matrix each rank has.

use std::ops::Range;

use half::bf16;
use lowp_comm::digest;
use lowp_format::{Shape, ShardTiles};

/// Addresses of pieces are multiples of so many bytes, which kernels read and write at once.
const ALIGNMENT: usize = 16;

/// A matrix over the ranks of a replica: rows, shard tiles or slices of the flattened matrix, of any lengths.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MatrixCut {
    /// Rows and columns of the whole matrix.
    pub full: Shape,
    /// The elements that each rank has, in rank order and one after another: of the flattened matrix or, where it is cut into shard tiles, of
    /// the flattened tall matrix.
    pub ranges: Vec<Range<usize>>,
    /// The shard tiles of ranks that have no whole rows.
    pub tiles: Option<ShardTiles>,
}

impl MatrixCut {
    /// A matrix that one rank has.
    pub fn whole(full: Shape) -> Self {
        Self {
            full,
            ranges: std::iter::once(0..full.elements()).collect(),
            tiles: None,
        }
    }

    /// The shard tiles, unless they lie in the order of the matrix.
    pub(crate) fn reordered(&self) -> Option<&ShardTiles> {
        self.tiles.as_ref().filter(|tiles| !tiles.are_in_order())
    }

    /// Whether the piece of `rank` may lie in its place of a whole: elsewhere it would begin where kernels are slow.
    pub(crate) fn lies_in_place(&self, rank: usize) -> bool {
        let Range { start, end } = self.ranges[rank];
        start == end || (start * size_of::<bf16>()).is_multiple_of(ALIGNMENT)
    }

    /// The cut as text of one length, whatever the number of ranks.
    pub(crate) fn describe(&self) -> String {
        let Shape { rows, cols } = self.full;
        let ends = digest(self.ranges.iter().map(|range| range.end as u64));
        let ranks = self.ranges.len();
        let cut = format!("{rows} x {cols} over {ranks} ranks (cut {ends:016x})");
        match self.reordered().map(ShardTiles::tile) {
            Some(Shape { rows, cols }) => format!("{cut} in tiles of {rows} x {cols}"),
            None => cut,
        }
    }

    /// Why `ranks` ranks, of which `rank` has `len` elements, cannot have this cut.
    pub(crate) fn flaw(&self, ranks: usize, rank: usize, len: usize) -> Option<String> {
        let Shape { rows, cols } = self.full;
        if self.ranges.len() != ranks {
            return Some(format!("{} ranges for {ranks} ranks", self.ranges.len()));
        }
        let mut end = 0;
        for (rank, range) in self.ranges.iter().enumerate() {
            if range.start != end || range.end < end {
                let Range { start, end: to } = range;
                return Some(format!(
                    "rank {rank} has elements {start} to {to}, where those from {end} on follow"
                ));
            }
            end = range.end;
        }
        if end != self.full.elements() {
            return Some(format!("{end} elements of {rows} x {cols}"));
        }
        let found = self.ranges[rank].len();
        if found != len {
            return Some(format!(
                "{found} elements of rank {rank}, whose master has {len}"
            ));
        }
        match &self.tiles {
            Some(tiles) if tiles.full() != self.full => {
                let Shape { rows: r, cols: c } = tiles.full();
                Some(format!("tiles of {r} x {c} for {rows} x {cols}"))
            }
            _ => None,
        }
    }
}
