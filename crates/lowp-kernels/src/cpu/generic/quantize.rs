//! The inner loop of every encode: block maxima, block scales and element codes of one rectangle.

use lowp_format::Philox;

use super::convert::Rect;
use super::maxima::{AHEAD, block_maxima};
use crate::cpu::isa::Kernel;
use crate::cpu::lanes::{LANES, Lanes};
use crate::table::{ElementCode, ScaleKernel};

/// The random bytes of a rectangle.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Random {
    /// Key and stream, the step included.
    pub(crate) philox: Philox,
    /// Random byte of the matrix's first element.
    pub(crate) first: u64,
}

impl Random {
    /// The bytes of `out.len()` elements from flat element `start` on.
    #[inline(always)]
    fn fill(&self, start: usize, out: &mut [u8]) {
        let first = self.first.wrapping_add(start as u64);
        let mut done = 0;
        while done < out.len() {
            let index = first.wrapping_add(done as u64);
            let skip = (index % 16) as usize;
            let take = (16 - skip).min(out.len() - done);
            let words = self.philox.block(index / 16);
            for (i, byte) in out[done..done + take].iter_mut().enumerate() {
                let at = skip + i;
                *byte = (words[at / 4] >> (8 * (at % 4))) as u8;
            }
            done += take;
        }
    }
}

/// A matrix of codes whose rows are `stride` apart.
pub(crate) struct Codes<'a, T> {
    pub(crate) values: &'a mut [T],
    pub(crate) stride: usize,
}

impl<T: Copy> Codes<'_, T> {
    /// A copy of `rows x cols` codes without gaps.
    pub(crate) fn dense(&self, [rows, cols]: [usize; 2]) -> Vec<T> {
        let row = |row| &self.values[row * self.stride..][..cols];
        (0..rows).flat_map(row).copied().collect()
    }

    /// The first `cols` codes of row `row`.
    #[inline(always)]
    fn row(&mut self, row: usize, cols: usize) -> &mut [T] {
        &mut self.values[row * self.stride..][..cols]
    }
}

/// Scratch of one rectangle's width.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    columns: Vec<f32>,
    maxima: Vec<f32>,
    scales: Vec<f32>,
    multipliers: Vec<f32>,
}

/// Quantizes a rectangle.
pub(crate) struct Quantize<'a, E: ElementCode, R: ScaleKernel> {
    /// Scale arithmetic.
    pub(crate) rule: R,
    /// Block rows x columns; unused without block scales.
    pub(crate) block: [usize; 2],
    /// Rounded source values.
    pub(crate) rect: Rect<'a>,
    /// Random bytes, with the flat index of the rectangle's first element and the row length.
    pub(crate) random: Option<(Random, usize, usize)>,
    /// Output: one code per element.
    pub(crate) codes: Codes<'a, E::Bits>,
    /// Output: one entry per block, dense.
    pub(crate) entries: &'a mut [R::Entry],
    pub(crate) scratch: &'a mut Scratch,
}

/// Columns that share one set of random bytes on the stack.
const PART: usize = 256;

impl<E: ElementCode, R: ScaleKernel> Kernel for Quantize<'_, E, R> {
    type Out = ();

    #[inline(always)]
    fn run<L: Lanes>(mut self, lanes: L) {
        let Self { rule, rect, .. } = self;
        if rect.rows == 0 || rect.cols == 0 {
            return;
        }
        if R::BLOCKS {
            return self.blocks(lanes);
        }
        let (_, multiplier) = rule.encode::<E>(0.0);
        for row in 0..rect.rows {
            let codes = self.codes.row(row, rect.cols);
            if R::SCALED {
                encode_one_scale::<E, L>(lanes, rect.row(row), multiplier, codes);
            } else {
                for (code, &x) in codes.iter_mut().zip(rect.row(row)) {
                    *code = E::encode(x);
                }
            }
        }
    }
}

impl<E: ElementCode, R: ScaleKernel> Quantize<'_, E, R> {
    #[inline(always)]
    fn blocks<L: Lanes>(self, lanes: L) {
        let Self {
            rule,
            block: [height, width],
            rect,
            random,
            mut codes,
            entries,
            scratch,
        } = self;
        let cols = rect.cols;
        let across = cols.div_ceil(width);
        let Scratch {
            columns,
            maxima,
            scales,
            multipliers,
        } = scratch;
        columns.resize(cols, 0.0);
        maxima.resize(across, 0.0);
        scales.resize(across, 0.0);
        multipliers.resize(cols, 0.0);
        // A narrow rectangle is followed by the one on its right, a wide one by its own next row.
        let ahead = if height > 1 { cols } else { AHEAD };
        for (group, entries) in entries.chunks_exact_mut(across).enumerate() {
            let first = group * height;
            let rows = first..(first + height).min(rect.rows);
            block_maxima(lanes, &rect, rows.clone(), width, ahead, columns, maxima);
            for i in 0..across {
                (entries[i], scales[i]) = rule.encode::<E>(maxima[i]);
            }
            let lines = random.is_none() && width.is_multiple_of(LANES);
            let multipliers: &[f32] = if width == 1 {
                scales
            } else {
                if !lines {
                    for (part, &scale) in multipliers.chunks_mut(width).zip(&*scales) {
                        part.fill(scale);
                    }
                }
                multipliers
            };
            for row in rows {
                let (values, codes) = (rect.row(row), codes.row(row, cols));
                match random {
                    Some((random, start, stride)) if E::STOCHASTIC => {
                        let start = start + row * stride;
                        encode_stochastic::<E>(values, multipliers, random, start, codes);
                    }
                    _ if lines => match width {
                        16 => encode_lines::<16, E, L>(lanes, values, scales, codes),
                        32 => encode_lines::<32, E, L>(lanes, values, scales, codes),
                        _ => {
                            let blocks = values.chunks(width).zip(codes.chunks_mut(width));
                            for ((values, codes), &scale) in blocks.zip(&*scales) {
                                encode_one_scale::<E, L>(lanes, values, scale, codes);
                            }
                        }
                    },
                    _ => encode_columns::<E, L>(lanes, values, multipliers, codes),
                }
            }
        }
    }
}

/// Encodes values that share a multiplier.
#[inline(always)]
fn encode_one_scale<E: ElementCode, L: Lanes>(
    lanes: L,
    values: &[f32],
    multiplier: f32,
    codes: &mut [E::Bits],
) {
    let (lines, rest) = values.as_chunks::<LANES>();
    let (code_lines, rest_codes) = codes.as_chunks_mut::<LANES>();
    let m = lanes.splat(multiplier);
    for (codes, line) in code_lines.iter_mut().zip(lines) {
        lanes.prefetch(line, AHEAD);
        E::encode_lanes(lanes, lanes.mul(lanes.load(line), m), codes);
    }
    for (code, &x) in rest_codes.iter_mut().zip(rest) {
        *code = E::encode(x * multiplier);
    }
}

/// Encodes a row of blocks of `N` columns, each with its own scale.
#[inline(always)]
pub(super) fn encode_lines<const N: usize, E: ElementCode, L: Lanes>(
    lanes: L,
    values: &[f32],
    scales: &[f32],
    codes: &mut [E::Bits],
) {
    let (codes, values) = (codes.as_chunks_mut::<N>().0, values.as_chunks::<N>().0);
    for ((codes, values), &scale) in codes.iter_mut().zip(values).zip(scales) {
        let m = lanes.splat(scale);
        let lines = values.as_chunks::<LANES>().0;
        for (codes, line) in codes.as_chunks_mut::<LANES>().0.iter_mut().zip(lines) {
            E::encode_lanes(lanes, lanes.mul(lanes.load(line), m), codes);
        }
    }
}

/// Encodes a row with one multiplier per column.
#[inline(always)]
pub(super) fn encode_columns<E: ElementCode, L: Lanes>(
    lanes: L,
    values: &[f32],
    multipliers: &[f32],
    codes: &mut [E::Bits],
) {
    let (lines, rest) = values.as_chunks::<LANES>();
    let (multiplier_lines, rest_multipliers) = multipliers.as_chunks::<LANES>();
    let (code_lines, rest_codes) = codes.as_chunks_mut::<LANES>();
    for ((codes, line), m) in code_lines.iter_mut().zip(lines).zip(multiplier_lines) {
        E::encode_lanes(lanes, lanes.mul(lanes.load(line), lanes.load(m)), codes);
    }
    for ((code, &x), &m) in rest_codes.iter_mut().zip(rest).zip(rest_multipliers) {
        *code = E::encode(x * m);
    }
}

/// Encodes a row with one multiplier per column and random bytes from flat element `start` on.
#[inline(always)]
fn encode_stochastic<E: ElementCode>(
    values: &[f32],
    multipliers: &[f32],
    random: Random,
    start: usize,
    codes: &mut [E::Bits],
) {
    let mut bytes = [0u8; PART];
    let parts = values.chunks(PART).zip(multipliers.chunks(PART));
    for (n, ((values, multipliers), codes)) in parts.zip(codes.chunks_mut(PART)).enumerate() {
        let bytes = &mut bytes[..values.len()];
        random.fill(start + n * PART, bytes);
        for (i, code) in codes.iter_mut().enumerate() {
            *code = E::encode_stochastic(values[i] * multipliers[i], bytes[i]);
        }
    }
}
