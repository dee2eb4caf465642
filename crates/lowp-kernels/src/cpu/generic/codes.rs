//! Codes in memory, and those of them that are fetched before they are read.

use std::ops::Range;

use crate::lanes::{Lanes, Line};

/// Bytes of an orientation and where its entries lie.
#[derive(Clone, Copy)]
pub(super) struct Codes<'v> {
    pub(super) bytes: &'v [u8],
    pub(super) transposed: bool,
    pub(super) row_bytes: usize,
}

/// What will be read next: `bytes` bytes of each of `cols` columns.
#[derive(Clone, Copy)]
pub(super) struct Ahead {
    address: usize,
    stride: usize,
    bytes: usize,
    cols: usize,
}

impl Ahead {
    /// `bytes` of each of the columns `cols`.
    pub(super) fn new(codes: Codes<'_>, bytes: Range<usize>, cols: Range<usize>) -> Self {
        let first = codes.bytes.as_ptr().addr();
        Self {
            address: first.wrapping_add(cols.start * codes.row_bytes + bytes.start),
            stride: codes.row_bytes,
            bytes: bytes.len(),
            cols: cols.len(),
        }
    }

    /// Asks for column `index`.
    #[inline(always)]
    pub(super) fn fetch<L: Lanes>(self, lanes: L, index: usize) {
        if index < self.cols {
            for at in (0..self.bytes).step_by(size_of::<Line>()) {
                lanes.prefetch(self.address.wrapping_add(index * self.stride + at));
            }
        }
    }
}
