//! [`FlatShard`]: an element range of a flattened matrix (ZeRO-1, Megatron's distributed
//! optimizer).

use std::ops::Range;

use lowp_comm::CommError;
use lowp_format::{Code, Shape};

use crate::ShardError;

/// Elements `start..start + len` of a matrix flattened in row-major order. May begin mid-row,
/// mid-block or mid-byte, and may be empty.
///
/// Cutting through a byte is legal for casting, which writes single nibbles, and for [`crate::FlatGather`], and
/// rejected where whole bytes are gathered ([`FlatShard::gather_ranges`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FlatShard {
    shape: Shape,
    code: Code,
    start: usize,
    len: usize,
}

impl FlatShard {
    /// Elements `range` of a matrix of `shape` whose elements are stored as `code`.
    ///
    /// # Errors
    /// A range outside the matrix, or rows that do not begin on bytes.
    pub fn new(shape: Shape, code: Code, range: Range<usize>) -> Result<Self, ShardError> {
        let Range { start, end } = range;
        if end < start || end > shape.elements() {
            return Err(ShardError::FlatRange { start, end, shape });
        }
        let per_byte = code.entries_per_byte();
        if !shape.cols.is_multiple_of(per_byte) {
            return Err(ShardError::FlatColumns { shape, per_byte });
        }
        Ok(Self {
            shape,
            code,
            start,
            len: end - start,
        })
    }

    /// Cuts a matrix evenly for `world` ranks, never through a byte. Trailing ranks may get fewer
    /// elements, or none.
    ///
    /// # Errors
    /// A world of no ranks, or rows that do not begin on bytes.
    pub fn split(shape: Shape, code: Code, world: usize) -> Result<Vec<Self>, ShardError> {
        Self::split_at(shape, code, world, 1)
    }

    /// Cuts a matrix as [`FlatShard::split`] does, at multiples of `unit` elements.
    ///
    /// # Errors
    /// As [`FlatShard::split`].
    pub fn split_at(
        shape: Shape,
        code: Code,
        world: usize,
        unit: usize,
    ) -> Result<Vec<Self>, ShardError> {
        let unit = lowp_format::lcm(unit, code.entries_per_byte());
        let cuts = lowp_format::RowCuts::new(shape.elements(), world, unit)?;
        cuts.ranges()
            .map(|range| Self::new(shape, code, range))
            .collect()
    }

    /// Shape of the full matrix.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Encoding of an element.
    pub fn code(&self) -> Code {
        self.code
    }

    /// The same elements where they are stored as `code`.
    #[must_use]
    pub fn stored_as(self, code: Code) -> Self {
        Self { code, ..self }
    }

    /// The elements owned.
    pub fn elements(&self) -> Range<usize> {
        self.start..self.start + self.len
    }

    /// Number of elements owned.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no element is owned.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes of the full data buffer that the range touches, boundary bytes included.
    pub fn bytes(&self) -> Range<usize> {
        let first = self.start * self.code.bits() / 8;
        if self.is_empty() {
            return first..first;
        }
        first..((self.start + self.len) * self.code.bits()).div_ceil(8)
    }

    /// The bytes of the full data buffer all of whose elements are owned.
    pub fn whole_bytes(&self) -> Range<usize> {
        let per_byte = self.code.entries_per_byte();
        let bytes = |elements: usize| elements / per_byte * self.code.bytes(per_byte);
        let Range { start, end } = self.elements();
        let first = bytes(start.next_multiple_of(per_byte));
        first..bytes(end).max(first)
    }

    /// The blocks of `block` rows x columns all of whose elements are owned, in the order of rows of blocks. Others of the range are on
    /// cuts, and there are no gaps between.
    pub fn whole_blocks(&self, block: [usize; 2]) -> Range<usize> {
        let Shape { rows, cols } = self.shape;
        let Range { start, end } = self.elements();
        if self.is_empty() {
            return 0..0;
        }
        let [down, across] = [rows.div_ceil(block[0]), cols.div_ceil(block[1])];
        let height = block[0].min(rows);
        // The first block whose first element is not before the range.
        let [row, col] = [start / cols, start % cols];
        let first = match [row % height, col] {
            [0, col] => row / height * across + col.div_ceil(block[1]),
            _ => (row / height + 1) * across,
        };
        // The first block whose last element is not within the range.
        let [row, col] = [end / cols, end % cols];
        let is_last_row = (row + 1) % height == 0 || row + 1 == rows;
        let last = match row {
            row if row == rows => down * across,
            row if is_last_row => row / height * across + col / block[1],
            row => row / height * across,
        };
        first..last.max(first)
    }

    /// Accepts ranges whose bytes belong to one rank each.
    ///
    /// # Errors
    /// A cut through a byte, with its place.
    pub fn gatherable(&self) -> Result<(), ShardError> {
        let Range { start, end } = self.elements();
        let per_byte = self.code.entries_per_byte();
        match [start, end].into_iter().find(|at| at % per_byte != 0) {
            Some(at) if !self.is_empty() => Err(ShardError::CutThroughByte {
                start,
                end,
                at,
                per_byte,
            }),
            _ => Ok(()),
        }
    }

    /// The byte ranges of all ranks' shards in the full data buffer: the ranges of an all-gather.
    ///
    /// # Errors
    /// A cut through a byte, or shards that do not cover one matrix in rank order.
    pub fn gather_ranges(shards: &[FlatShard]) -> Result<Vec<Range<usize>>, ShardError> {
        Self::check_tiling(shards)?;
        shards
            .iter()
            .map(|shard| shard.gatherable().map(|()| shard.bytes()))
            .collect()
    }

    /// Puts pieces together nibble by nibble, so that cuts through bytes are exact: of a byte that
    /// two ranks share, each gives only the elements that it owns (docs/numerics.md 11.3).
    ///
    /// # Errors
    /// Shards that do not cover one matrix in rank order, or pieces of another length than
    /// [`FlatShard::bytes`].
    pub fn merge(shards: &[FlatShard], pieces: &[&[u8]]) -> Result<Vec<u8>, ShardError> {
        Self::check_tiling(shards)?;
        if shards.len() != pieces.len() {
            let what = "a list of pieces".to_owned();
            return Err(CommError::World {
                what,
                found: pieces.len(),
                world: shards.len(),
            }
            .into());
        }
        let total = shards
            .last()
            .map_or(0, |s| s.code.bytes(s.shape.elements()));
        let mut full = vec![0u8; total];
        for (item, (shard, piece)) in shards.iter().zip(pieces).enumerate() {
            let bytes = shard.bytes();
            if piece.len() != bytes.len() {
                let (op, what) = ("FlatShard::merge", "the piece");
                let (needed, found) = (bytes.len(), piece.len());
                return Err(CommError::ItemLength {
                    op,
                    item,
                    what,
                    needed,
                    found,
                }
                .into());
            }
            for (position, (to, &from)) in bytes.clone().zip(*piece).enumerate() {
                let keep = shard.foreign_bits(position);
                full[to] = (full[to] & keep) | (from & !keep);
            }
        }
        Ok(full)
    }

    /// The bits of byte `position` of [`FlatShard::bytes`] that belong to other ranks.
    pub fn foreign_bits(&self, position: usize) -> u8 {
        let per_byte = self.code.entries_per_byte();
        let Range { start, end } = self.elements();
        let mut keep = 0;
        if position == 0 {
            keep |= (1u8 << (start % per_byte * self.code.bits())) - 1;
        }
        if position + 1 == self.bytes().len() && end % per_byte != 0 {
            keep |= !((1u8 << (end % per_byte * self.code.bits())) - 1);
        }
        keep
    }

    /// Accepts shards of one matrix that cover it in rank order.
    pub(crate) fn check_tiling(shards: &[FlatShard]) -> Result<(), ShardError> {
        let Some(&FlatShard { shape, code, .. }) = shards.first() else {
            return Err(lowp_format::FormatError::EmptyWorld.into());
        };
        let mut expected = 0;
        for (rank, shard) in shards.iter().enumerate() {
            if (shard.shape, shard.code) != (shape, code) {
                return Err(ShardError::FlatMixed {
                    rank,
                    shape: shard.shape,
                    code: shard.code,
                    first_shape: shape,
                    first_code: code,
                });
            }
            let start = shard.start;
            if start != expected {
                return Err(ShardError::FlatTiling {
                    shape,
                    rank,
                    start,
                    expected,
                });
            }
            expected += shard.len;
        }
        if expected != shape.elements() {
            let (rank, start) = (shards.len(), shape.elements());
            return Err(ShardError::FlatTiling {
                shape,
                rank,
                start,
                expected,
            });
        }
        Ok(())
    }
}
