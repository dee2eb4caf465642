//! Loading values: widening bfloat16, rounding f32 through bfloat16, and 2-D views of f32.

use std::ops::Range;

use half::bf16;
use lowp_format::SourceRounding;

use crate::lanes::{Isa, Kernel};
use crate::lanes::{LANES, Lanes};
use crate::rounding::{bf16_bits, bf16_value, round_bf16};

/// A rectangle of f32 values, `stride` apart from row to row.
#[derive(Clone, Copy)]
pub(crate) struct Rect<'a> {
    pub(crate) values: &'a [f32],
    pub(crate) stride: usize,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
}

impl<'a> Rect<'a> {
    /// Rows of `cols` values without gaps.
    pub(super) fn dense(values: &'a [f32], cols: usize) -> Self {
        Self {
            values,
            stride: cols,
            rows: values.len().checked_div(cols).unwrap_or(0),
            cols,
        }
    }

    /// Row `row`.
    #[inline(always)]
    pub(crate) fn row(&self, row: usize) -> &'a [f32] {
        &self.values[row * self.stride..][..self.cols]
    }

    /// The rows of `range`, which is not empty.
    #[inline(always)]
    pub(super) fn rows(&self, range: Range<usize>) -> Self {
        Self {
            values: &self.values[range.start * self.stride..],
            rows: range.len(),
            ..*self
        }
    }

    /// As many values without gaps, in `scratch`, which `write` makes of these.
    pub(super) fn written<'s>(
        self,
        scratch: &'s mut Vec<f32>,
        write: impl FnOnce(Self, &mut [f32]),
    ) -> Rect<'s> {
        let cols = self.cols;
        scratch.resize(self.rows * cols, 0.0);
        write(self, scratch);
        Rect::dense(scratch, cols)
    }
}

struct Pack<'a> {
    rect: Rect<'a>,
    to: &'a mut [f32],
}

impl Kernel for Pack<'_> {
    type Out = ();
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        for (row, to) in self.to.chunks_exact_mut(self.rect.cols).enumerate() {
            let (from, last) = self.rect.row(row).as_chunks::<LANES>();
            let (to, rest) = to.as_chunks_mut::<LANES>();
            for (to, from) in to.iter_mut().zip(from) {
                lanes.store(lanes.load(from), to);
            }
            rest.copy_from_slice(last);
        }
    }
}

/// Where the next chunk is read from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stream {
    address: usize,
    row_bytes: usize,
    element: usize,
}

impl Stream {
    /// The chunk of `size` rows x columns that follows the one at element `start` of `values`,
    /// whose rows are `stride` apart: on its right, or else below.
    #[inline]
    pub(crate) fn after<T>(
        values: &[T],
        start: usize,
        stride: usize,
        [rows, cols]: [usize; 2],
    ) -> Self {
        let col = start % stride.max(1);
        let next = if col + cols < stride {
            start + cols
        } else {
            start - col + rows * stride
        };
        Self {
            address: values.as_ptr().wrapping_add(next) as usize,
            row_bytes: stride * size_of::<T>(),
            element: size_of::<T>(),
        }
    }

    /// Asks for the cache lines of [`FOUR`] elements.
    #[inline(always)]
    pub(crate) fn prefetch<L: Lanes>(&self, lanes: L, row: usize, col: usize) {
        let first = self.address + row * self.row_bytes + col * self.element;
        for byte in (0..FOUR * self.element).step_by(64) {
            lanes.prefetch(first + byte);
        }
    }
}

/// Elements of four vectors.
pub(crate) const FOUR: usize = 4 * LANES;

/// High-precision input.
#[derive(Clone, Copy)]
pub(crate) enum FloatSlice<'a> {
    F32(&'a [f32]),
    Bf16(&'a [bf16]),
}

impl<'a> FloatSlice<'a> {
    /// Number of values.
    pub(crate) fn len(self) -> usize {
        match self {
            FloatSlice::F32(values) => values.len(),
            FloatSlice::Bf16(values) => values.len(),
        }
    }

    /// The values of `range`.
    pub(crate) fn slice(self, range: Range<usize>) -> Self {
        match self {
            FloatSlice::F32(values) => FloatSlice::F32(&values[range]),
            FloatSlice::Bf16(values) => FloatSlice::Bf16(&values[range]),
        }
    }

    /// The chunk that follows the one at `start`.
    pub(crate) fn after(self, start: usize, stride: usize, size: [usize; 2]) -> Stream {
        match self {
            FloatSlice::F32(values) => Stream::after(values, start, stride, size),
            FloatSlice::Bf16(values) => Stream::after(values, start, stride, size),
        }
    }

    /// A rectangle of a matrix of `stride` columns whose first value is at `start`, rounded;
    /// `scratch` holds what is not read in place.
    pub(crate) fn rect<'s>(
        self,
        isa: Isa,
        rounding: SourceRounding,
        start: usize,
        stride: usize,
        [rows, cols]: [usize; 2],
        scratch: &'s mut Vec<f32>,
    ) -> Rect<'s>
    where
        'a: 's,
    {
        if rows == 0 || cols == 0 {
            return Rect {
                values: &[],
                stride: 0,
                rows: 0,
                cols: 0,
            };
        }
        let end = start + (rows - 1) * stride + cols;
        let values = match self {
            FloatSlice::F32(values) => &values[start..end],
            FloatSlice::Bf16(values) => {
                scratch.resize(rows * cols, 0.0);
                isa.run(Widen {
                    from: &values[start..end],
                    stride,
                    cols,
                    to: scratch,
                });
                return Rect::dense(scratch, cols);
            }
        };
        let rect = Rect {
            values,
            stride,
            rows,
            cols,
        };
        match rounding {
            SourceRounding::ViaBf16 => round_rect(isa, rect, scratch),
            SourceRounding::F32 if rows == 1 || stride == cols => rect,
            SourceRounding::F32 => rect.written(scratch, |rect, to| isa.run(Pack { rect, to })),
        }
    }
}

/// `rect` rounded to bfloat16, in `scratch`.
pub(crate) fn round_rect<'s>(isa: Isa, rect: Rect<'_>, scratch: &'s mut Vec<f32>) -> Rect<'s> {
    rect.written(scratch, |rect, to| isa.run(Round { rect, to }))
}

struct Widen<'a> {
    from: &'a [bf16],
    stride: usize,
    cols: usize,
    to: &'a mut [f32],
}

impl Kernel for Widen<'_> {
    type Out = ();
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        for (row, to) in self.to.chunks_exact_mut(self.cols).enumerate() {
            let (to, rest) = to.as_chunks_mut::<LANES>();
            let from = &self.from[row * self.stride..][..self.cols];
            let (from, last) = from.as_chunks::<LANES>();
            for (to, from) in to.iter_mut().zip(from) {
                lanes.store(lanes.load_bf16(from), to);
            }
            for (to, from) in rest.iter_mut().zip(last) {
                *to = bf16_value(*from);
            }
        }
    }
}

struct Round<'a> {
    rect: Rect<'a>,
    to: &'a mut [f32],
}

impl Kernel for Round<'_> {
    type Out = ();
    #[inline(always)]
    fn run<L: Lanes>(self, _: L) {
        for (row, to) in self.to.chunks_exact_mut(self.rect.cols.max(1)).enumerate() {
            for (to, from) in to.iter_mut().zip(self.rect.row(row)) {
                *to = round_bf16(*from);
            }
        }
    }
}

/// `x` rounded to nearest even.
#[inline(always)]
pub(crate) fn narrow(x: f32) -> bf16 {
    bf16::from_bits(bf16_bits(x))
}
