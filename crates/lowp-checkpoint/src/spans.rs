//! [`Span`]: equal pieces of ranks that follow each other, one after the other in the tensor. A tensor that is cut evenly over ranks is one.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::Block;

/// `count` pieces, of the ranks from `rank` on. The text has seven numbers, in the order of the fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "[usize; 7]", from = "[usize; 7]")]
pub(crate) struct Span {
    pub(crate) rank: usize,
    pub(crate) count: usize,
    /// The piece of the first rank.
    pub(crate) block: Block,
    /// Each piece begins where the one before ends along this axis.
    pub(crate) axis: usize,
}

impl From<Span> for [usize; 7] {
    fn from(span: Span) -> Self {
        let ([row, col], [rows, cols]) = (span.block.start, span.block.shape);
        [span.rank, span.count, row, col, rows, cols, span.axis]
    }
}

impl From<[usize; 7]> for Span {
    fn from([rank, count, row, col, rows, cols, axis]: [usize; 7]) -> Self {
        let block = Block {
            start: [row, col],
            shape: [rows, cols],
        };
        Self {
            rank,
            count,
            block,
            axis,
        }
    }
}

impl Span {
    /// What its pieces make up together; `None` if that cannot be counted.
    pub(crate) fn union(self) -> Option<Block> {
        let mut union = self.block;
        let along = union.shape.get_mut(self.axis)?;
        *along = along.checked_mul(self.count)?;
        Some(union)
    }

    /// The piece of rank `self.rank + number`.
    fn piece(self, number: usize) -> Block {
        let mut block = self.block;
        block.start[self.axis] += number * block.shape[self.axis];
        block
    }

    /// Its pieces with their ranks, of those whose numbers are in `numbers`.
    fn pieces(self, numbers: Range<usize>) -> impl Iterator<Item = (usize, Block)> {
        numbers.map(move |number| (self.rank + number, self.piece(number)))
    }

    /// The numbers of the pieces that have an entry in common with `block`, which is not empty.
    fn meeting(self, block: Block) -> Range<usize> {
        let common = self.union().and_then(|union| union.common(block));
        let Some(common) = common else { return 0..0 };
        let each = self.block.shape[self.axis];
        let start = common.start[self.axis] - self.block.start[self.axis];
        start / each..(start + common.shape[self.axis]).div_ceil(each)
    }

    /// Whether the piece `block` of `rank` follows; the span then has it.
    fn takes(&mut self, rank: usize, block: Block) -> bool {
        let next = |axis: usize| {
            let before = Self { axis, ..*self }.union()?;
            let mut next = self.block;
            next.start[axis] = before.start[axis].checked_add(before.shape[axis])?;
            Some(next == block && rank == self.rank + self.count)
        };
        let next = |axis: usize| next(axis) == Some(true);
        let axis = match self.count {
            1 => [0, 1].into_iter().find(|&axis| next(axis)),
            _ => Some(self.axis).filter(|&axis| next(axis)),
        };
        if let Some(axis) = axis {
            (self.axis, self.count) = (axis, self.count + 1);
        }
        axis.is_some()
    }
}

/// The spans of `pieces`, which are in the order of ranks and of blocks of a rank, and none of which is empty.
pub(crate) fn spans_of(pieces: impl IntoIterator<Item = (usize, Block)>) -> Vec<Span> {
    let mut spans: Vec<Span> = Vec::new();
    for (rank, block) in pieces {
        if !spans.last_mut().is_some_and(|last| last.takes(rank, block)) {
            spans.push(Span {
                rank,
                count: 1,
                block,
                axis: 0,
            });
        }
    }
    spans
}

/// All pieces of `spans`.
pub(crate) fn pieces(spans: &[Span]) -> impl Iterator<Item = (usize, Block)> {
    spans.iter().flat_map(|span| span.pieces(0..span.count))
}

/// The blocks of `rank`, in order, as its file has them.
pub(crate) fn of_rank(spans: &[Span], rank: usize) -> Vec<Block> {
    let numbers = spans.iter().filter_map(|span| {
        let number = rank.checked_sub(span.rank)?;
        (number < span.count).then(|| span.piece(number))
    });
    let mut blocks: Vec<Block> = numbers.collect();
    blocks.sort_unstable();
    blocks
}

/// The pieces that have an entry in common with `block`, in the order of ranks and of blocks of a rank.
pub(crate) fn meeting(spans: &[Span], block: Block) -> Vec<(usize, Block)> {
    let mut found: Vec<_> = spans
        .iter()
        .flat_map(|span| span.pieces(span.meeting(block)))
        .collect();
    found.sort_unstable();
    found
}

/// Whether two of `blocks` have an entry in common: a sweep over the rows, with the columns of the blocks that a row meets.
pub(crate) fn overlap(blocks: impl IntoIterator<Item = Block>) -> bool {
    let mut blocks: Vec<Block> = blocks.into_iter().collect();
    blocks.retain(|block| block.entries() != Some(0));
    blocks.sort_unstable();
    // `columns` maps the first column of a block to its end. `ends` has the end of its rows with its first column.
    let mut columns: BTreeMap<usize, usize> = BTreeMap::new();
    let mut ends: BTreeSet<(usize, usize)> = BTreeSet::new();
    for block in blocks {
        let ([row, col], [rows, cols]) = (block.start, block.shape);
        while let Some(&(end, start)) = ends.first().filter(|(end, _)| *end <= row) {
            ends.remove(&(end, start));
            columns.remove(&start);
        }
        let before = columns.range(..=col).next_back();
        let after = columns.range(col..).next();
        if before.is_some_and(|(_, end)| *end > col)
            || after.is_some_and(|(start, _)| *start < col + cols)
        {
            return true;
        }
        columns.insert(col, col + cols);
        ends.insert((row + rows, col));
    }
    false
}
