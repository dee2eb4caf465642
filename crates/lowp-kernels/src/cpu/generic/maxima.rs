//! Maxima of absolute values, NaN ignored: exact in any order.

use lowp_format::magnitude;

use super::convert::Rect;
use crate::lanes::Kernel;
use crate::lanes::{LANES, Lanes, Line};

/// The larger of `acc` and `|x|`; `acc` where `x` is NaN.
#[inline(always)]
fn raise(acc: f32, x: f32) -> f32 {
    f32::from_bits(acc.to_bits().max(magnitude(x)))
}

/// Entries between a read and the prefetch that precedes it: 4 KiB of f32.
pub(super) const AHEAD: usize = 1024;

/// The largest magnitude of `values`.
#[inline(always)]
fn row_maximum<L: Lanes>(lanes: L, values: &[f32]) -> f32 {
    let (chunks, rest) = values.as_chunks::<{ 4 * LANES }>();
    let mut acc = [lanes.splat(0.0); 4];
    for chunk in chunks {
        for (part, acc) in chunk.as_chunks::<LANES>().0.iter().zip(&mut acc) {
            lanes.prefetch(part.as_ptr().wrapping_add(AHEAD) as usize);
            *acc = lanes.raise(*acc, lanes.load(part));
        }
    }
    let all = lanes.maxima(acc);
    all.iter().chain(rest).fold(0.0, |a, &x| raise(a, x))
}

/// The amax of a rectangle.
pub(crate) struct Amax<'a>(pub(crate) Rect<'a>);

impl Kernel for Amax<'_> {
    type Out = f32;
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) -> f32 {
        (0..self.0.rows).fold(0.0, |a, row| raise(a, row_maximum(lanes, self.0.row(row))))
    }
}

/// The maxima of the blocks of `width` columns of rows `first..end` of `rect`. `columns` is
/// scratch of `rect.cols` entries.
#[inline(always)]
pub(crate) fn block_maxima<L: Lanes>(
    lanes: L,
    rect: &Rect<'_>,
    rows: std::ops::Range<usize>,
    width: usize,
    columns: &mut [f32],
    out: &mut [f32],
) {
    if rows.len() == 1 {
        return fold_any(lanes, rect.row(rows.start), width, out);
    }
    columns.fill(0.0);
    let fours = rows.start + rows.len() / 4 * 4;
    for row in (rows.start..fours).step_by(4) {
        let four = [0, 1, 2, 3].map(|i| rect.row(row + i));
        column_maxima(lanes, four, columns);
    }
    for row in fours..rows.end {
        column_maxima(lanes, [rect.row(row)], columns);
    }
    if width == 1 {
        out.copy_from_slice(columns);
    } else {
        fold_any(lanes, columns, width, out);
    }
}

/// Raises `columns` to the magnitudes of `N` rows.
#[inline(always)]
fn column_maxima<const N: usize, L: Lanes>(lanes: L, rows: [&[f32]; N], columns: &mut [f32]) {
    let whole = columns.len() / LANES;
    for i in 0..whole {
        let acc = &mut columns.as_chunks_mut::<LANES>().0[i];
        let mut max = lanes.load(acc);
        for row in rows {
            max = lanes.raise(max, lanes.load(&row.as_chunks::<LANES>().0[i]));
        }
        lanes.store(max, acc);
    }
    for row in rows {
        let rest = columns.iter_mut().zip(row).skip(whole * LANES);
        for (acc, &x) in rest {
            *acc = raise(*acc, x);
        }
    }
}

/// Maxima of `width` consecutive magnitudes.
#[inline(always)]
fn fold_any<L: Lanes>(lanes: L, row: &[f32], width: usize, out: &mut [f32]) {
    match width {
        16 => fold::<16, L>(lanes, row, out),
        32 => fold::<32, L>(lanes, row, out),
        128 => fold::<128, L>(lanes, row, out),
        _ => {
            for (out, chunk) in out.iter_mut().zip(row.chunks(width)) {
                *out = chunk.iter().fold(0.0, |a, &x| raise(a, x));
            }
        }
    }
}

/// Maxima of `N` consecutive magnitudes, four blocks at a time; the last block may be shorter.
#[inline(always)]
fn fold<const N: usize, L: Lanes>(lanes: L, row: &[f32], out: &mut [f32]) {
    let (blocks, rest) = row.as_chunks::<N>();
    let (out, out_rest) = out.split_at_mut(blocks.len());
    if let Some(out) = out_rest.first_mut() {
        *out = rest.iter().fold(0.0, |a, &x| raise(a, x));
    }
    let (fours, last) = blocks.as_chunks::<4>();
    let (out_fours, out_last) = out[..blocks.len()].as_chunks_mut::<4>();
    for (four, out) in fours.iter().zip(out_fours) {
        let [a, b, c, d] = four;
        *out = lanes.maxima([
            one::<N, L>(lanes, a),
            one::<N, L>(lanes, b),
            one::<N, L>(lanes, c),
            one::<N, L>(lanes, d),
        ]);
    }
    for (block, out) in last.iter().zip(out_last) {
        let lines = [one::<N, L>(lanes, block); 4];
        *out = lanes.maxima(lines)[0];
    }
}

/// The lane maxima of one block.
#[inline(always)]
fn one<const N: usize, L: Lanes>(lanes: L, block: &[f32; N]) -> L::F {
    let lines: &[Line] = block.as_chunks::<LANES>().0;
    let mut acc = lanes.splat(0.0);
    for line in lines {
        acc = lanes.raise(acc, lanes.load(line));
    }
    acc
}
