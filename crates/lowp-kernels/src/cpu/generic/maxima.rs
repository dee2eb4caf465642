//! Maxima of absolute values, NaN ignored, as integer maxima of binary32 bit patterns: exact in
//! any order, and vectorised without a float reduction.

use super::convert::Rect;
use crate::cpu::isa::Kernel;

/// Runs a body for each index below a count. The compiler cannot see how the index advances, so it
/// vectorises within the body: across blocks it would gather, which is several times slower.
macro_rules! one_by_one {
    ($index:ident in $count:expr => $body:block) => {
        let count = $count;
        let mut next = 0;
        while next < count {
            let $index = next;
            $body
            next = std::hint::black_box(next + 1);
        }
    };
}
pub(super) use one_by_one;

/// The bits of `|x|`; 0 for NaN.
#[inline(always)]
pub(crate) fn magnitude(x: f32) -> u32 {
    let bits = x.to_bits() & 0x7FFF_FFFF;
    if bits > 0x7F80_0000 { 0 } else { bits }
}

/// The largest magnitude of `values`.
#[inline(always)]
pub(crate) fn row_maximum(values: &[f32]) -> u32 {
    let (chunks, rest) = values.as_chunks::<64>();
    let mut lanes = [0; 64];
    for chunk in chunks {
        for lane in 0..64 {
            lanes[lane] = lanes[lane].max(magnitude(chunk[lane]));
        }
    }
    let rest = rest.iter().fold(0, |a, &x| a.max(magnitude(x)));
    lanes.iter().fold(rest, |a, &b| a.max(b))
}

/// The amax of a rectangle, as bits.
pub(crate) struct Amax<'a>(pub(crate) Rect<'a>);

impl Kernel for Amax<'_> {
    type Out = u32;
    #[inline(always)]
    fn run(self) -> u32 {
        (0..self.0.rows).fold(0, |a, row| a.max(row_maximum(self.0.row(row))))
    }
}

/// The maxima of the blocks of `width` columns of rows `first..end` of `rect`, as bits.
/// `columns` is scratch of `rect.cols` entries.
#[inline(always)]
pub(crate) fn block_maxima(
    rect: &Rect<'_>,
    first: usize,
    end: usize,
    width: usize,
    columns: &mut [u32],
    out: &mut [u32],
) {
    let row = rect.row(first);
    if end - first == 1 {
        return fold_any(row, width, out, magnitude);
    }
    for (column, &x) in columns.iter_mut().zip(row) {
        *column = magnitude(x);
    }
    for row in first + 1..end {
        for (column, &x) in columns.iter_mut().zip(rect.row(row)) {
            *column = (*column).max(magnitude(x));
        }
    }
    fold_any(columns, width, out, |bits| bits);
}

/// Maxima of `width` consecutive magnitudes.
#[inline(always)]
fn fold_any<T: Copy>(row: &[T], width: usize, out: &mut [u32], bits: impl Fn(T) -> u32 + Copy) {
    match width {
        1 => out.iter_mut().zip(row).for_each(|(out, &x)| *out = bits(x)),
        16 => fold::<16, T>(row, out, bits),
        32 => fold::<32, T>(row, out, bits),
        128 => fold::<128, T>(row, out, bits),
        _ => {
            for (out, chunk) in out.iter_mut().zip(row.chunks(width)) {
                *out = chunk.iter().fold(0, |a, &x| a.max(bits(x)));
            }
        }
    }
}

/// Maxima of `N` consecutive magnitudes; 16 lanes are halved until one is left, which compiles to
/// shuffles within registers.
#[inline(always)]
fn fold<const N: usize, T: Copy>(row: &[T], out: &mut [u32], bits: impl Fn(T) -> u32) {
    let blocks = row.as_chunks::<N>().0;
    one_by_one!(block in out.len().min(blocks.len()) => {
        let mut lanes = [0u32; 16];
        for part in blocks[block].as_chunks::<16>().0 {
            for lane in 0..16 {
                lanes[lane] = lanes[lane].max(bits(part[lane]));
            }
        }
        let a: [u32; 8] = std::array::from_fn(|i| lanes[i].max(lanes[i + 8]));
        let b: [u32; 4] = std::array::from_fn(|i| a[i].max(a[i + 4]));
        let c: [u32; 2] = std::array::from_fn(|i| b[i].max(b[i + 2]));
        out[block] = c[0].max(c[1]);
    });
}
