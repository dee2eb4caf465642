//! Maxima of absolute values, NaN ignored, as integer maxima of binary32 bit patterns: exact in
//! any order, and vectorised without a float reduction.

use super::convert::Rect;
use crate::cpu::isa::Kernel;

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
    for (column, &x) in columns.iter_mut().zip(rect.row(first)) {
        *column = magnitude(x);
    }
    for row in first + 1..end {
        for (column, &x) in columns.iter_mut().zip(rect.row(row)) {
            *column = (*column).max(magnitude(x));
        }
    }
    match width {
        1 => out.copy_from_slice(columns),
        16 => fold::<16>(columns, out),
        32 => fold::<32>(columns, out),
        128 => fold::<128>(columns, out),
        _ => {
            for (out, chunk) in out.iter_mut().zip(columns.chunks(width)) {
                *out = chunk.iter().fold(0, |a, &b| a.max(b));
            }
        }
    }
}

/// Maxima of `N` consecutive values. Many blocks are folded together, pairs of neighbours at a
/// time, so that no step leaves the vector registers' width.
#[inline(always)]
fn fold<const N: usize>(columns: &[u32], out: &mut [u32]) {
    /// Blocks folded together.
    const GROUP: usize = 16;
    let mut lanes = [0u32; 16 * GROUP];
    for (out, group) in out.chunks_mut(GROUP).zip(columns.chunks(N * GROUP)) {
        for (lanes, block) in lanes
            .as_chunks_mut::<16>()
            .0
            .iter_mut()
            .zip(group.chunks_exact(N))
        {
            *lanes = [0; 16];
            for part in block.as_chunks::<16>().0 {
                for lane in 0..16 {
                    lanes[lane] = lanes[lane].max(part[lane]);
                }
            }
        }
        let a: [u32; 8 * GROUP] = std::array::from_fn(|i| lanes[2 * i].max(lanes[2 * i + 1]));
        let b: [u32; 4 * GROUP] = std::array::from_fn(|i| a[2 * i].max(a[2 * i + 1]));
        let c: [u32; 2 * GROUP] = std::array::from_fn(|i| b[2 * i].max(b[2 * i + 1]));
        let d: [u32; GROUP] = std::array::from_fn(|i| c[2 * i].max(c[2 * i + 1]));
        out.copy_from_slice(&d[..out.len()]);
    }
}
