//! [`Lines`]: the scale arithmetic of a rectangle, whose lines may have scales or amaxes of their own.

use lowp_format::{KernelKey, Orientation};
use smallvec::SmallVec;

use crate::cpu::ingredients::ScaleKernel;

/// The rules of a rectangle.
#[derive(Clone, Copy)]
pub(super) enum Lines<'a, R> {
    /// One rule for the whole matrix.
    One(R),
    /// A rule for each row.
    Rows(&'a [R]),
    /// A rule for each column.
    Cols(&'a [R]),
}

impl<'a, R: ScaleKernel> Lines<'a, R> {
    /// The rules of the rectangle of `size` from row and column `first` on: `rule`, or in `memory` those of its lines,
    /// of which line `i` of the matrix has the scale or amax `outer(i)`.
    pub(super) fn new(
        orientation: Orientation,
        key: &KernelKey,
        rule: R,
        outer: impl Fn(usize) -> f32,
        first: [usize; 2],
        size: [usize; 2],
        memory: &'a mut SmallVec<[R; 128]>,
    ) -> Self {
        if !key.scale.is_by_line() {
            return Self::One(rule);
        }
        let axis = orientation as usize;
        let lines = first[axis]..first[axis] + size[axis];
        memory.extend(lines.map(|line| R::new(key.scale, outer(line)).unwrap_or(rule)));
        match orientation {
            Orientation::Rowwise => Self::Rows(memory),
            Orientation::Columnwise => Self::Cols(memory),
        }
    }

    /// The rule of a row and a column of the rectangle.
    #[inline(always)]
    pub(super) fn at(self, row: usize, col: usize) -> R {
        match self {
            Self::One(rule) => rule,
            Self::Rows(rules) => rules[row],
            Self::Cols(rules) => rules[col],
        }
    }
}
