//! [`Piece`]: a part of a tensor, and [`Block`], where it lies.

use serde::{Deserialize, Serialize};

/// What the entries of a tensor are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Dtype {
    /// f32, little endian.
    F32,
    /// Bytes: codes and scales as a device has them.
    U8,
}

impl Dtype {
    /// Bytes of one entry.
    pub const fn bytes(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::U8 => 1,
        }
    }
}

/// Rows and columns of a tensor of two axes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Block {
    /// First row and first column.
    pub start: [usize; 2],
    /// Rows and columns.
    pub shape: [usize; 2],
}

impl Block {
    /// All of a tensor of `shape`.
    pub const fn whole(shape: [usize; 2]) -> Self {
        Self {
            start: [0, 0],
            shape,
        }
    }

    /// Entries `start..start + len` of a tensor of one row.
    pub const fn of_row(start: usize, len: usize) -> Self {
        Self {
            start: [0, start],
            shape: [1, len],
        }
    }

    /// Number of entries; `None` beyond what can be counted.
    pub fn entries(self) -> Option<usize> {
        self.shape[0].checked_mul(self.shape[1])
    }

    /// Whether it lies in a tensor of shape `full`.
    pub fn lies_in(self, full: [usize; 2]) -> bool {
        let fits = |axis: usize| {
            let end = self.start[axis].checked_add(self.shape[axis]);
            end.is_some_and(|end| end <= full[axis])
        };
        fits(0) && fits(1)
    }

    /// What both have, unless it is nothing.
    pub fn common(self, other: Self) -> Option<Self> {
        let mut common = Self::whole([0, 0]);
        for axis in [0, 1] {
            let start = self.start[axis].max(other.start[axis]);
            let end = |block: Self| block.start[axis] + block.shape[axis];
            let end = end(self).min(end(other));
            if start >= end {
                return None;
            }
            (common.start[axis], common.shape[axis]) = (start, end - start);
        }
        Some(common)
    }
}

/// The part of a tensor that one rank has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The tensor's name, the same on every rank that has a part of it.
    pub name: String,
    /// What its entries are.
    pub dtype: Dtype,
    /// Rows and columns of the whole tensor.
    pub full: [usize; 2],
    /// Where this part lies in it.
    pub block: Block,
    /// The entries, row by row.
    pub bytes: Vec<u8>,
}
