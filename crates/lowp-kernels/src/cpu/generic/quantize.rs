//! The inner loop of every encode: block maxima, block scales and element codes of one rectangle.

use lowp_format::Philox;

use super::convert::Rect;
use super::maxima::{block_maxima, one_by_one};
use crate::cpu::isa::Kernel;
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
    /// Output: one code per element, dense.
    pub(crate) codes: &'a mut [E::Bits],
    /// Output: one entry per block, dense.
    pub(crate) entries: &'a mut [R::Entry],
}

/// Columns that share one set of scratch arrays on the stack.
const PART: usize = 256;

impl<E: ElementCode, R: ScaleKernel> Kernel for Quantize<'_, E, R> {
    type Out = ();

    #[inline(always)]
    fn run(self) {
        let Self {
            rule,
            block,
            rect,
            random,
            codes,
            entries,
        } = self;
        if rect.rows == 0 || rect.cols == 0 {
            return;
        }
        if R::BLOCKS {
            quantize_blocks::<E, R>(rule, block, rect, random, codes, entries);
        } else {
            let (_, multiplier) = rule.encode::<E>(0.0);
            for (row, codes) in codes.chunks_exact_mut(rect.cols).enumerate() {
                if R::SCALED {
                    for (code, &x) in codes.iter_mut().zip(rect.row(row)) {
                        *code = E::encode(x * multiplier);
                    }
                } else {
                    for (code, &x) in codes.iter_mut().zip(rect.row(row)) {
                        *code = E::encode(x);
                    }
                }
            }
        }
    }
}

#[inline(always)]
fn quantize_blocks<E: ElementCode, R: ScaleKernel>(
    rule: R,
    [height, width]: [usize; 2],
    rect: Rect<'_>,
    random: Option<(Random, usize, usize)>,
    codes: &mut [E::Bits],
    entries: &mut [R::Entry],
) {
    let cols = rect.cols;
    let across = cols.div_ceil(width);
    let mut columns = vec![0u32; cols];
    let mut maxima = vec![0u32; across];
    let mut scales = vec![0f32; across];
    let mut multipliers = vec![0f32; cols];
    let mut bytes = [0u8; PART];
    for (group, entries) in entries.chunks_exact_mut(across).enumerate() {
        let first = group * height;
        let end = (first + height).min(rect.rows);
        block_maxima(&rect, first, end, width, &mut columns, &mut maxima);
        for i in 0..across {
            (entries[i], scales[i]) = rule.encode::<E>(f32::from_bits(maxima[i]));
        }
        if random.is_none() && end - first == 1 {
            let (values, codes) = (rect.row(first), &mut codes[first * cols..][..cols]);
            let done = match width {
                16 => encode_line::<16, E>(values, &scales, codes),
                32 => encode_line::<32, E>(values, &scales, codes),
                128 => encode_line::<128, E>(values, &scales, codes),
                _ => false,
            };
            if done {
                continue;
            }
        }
        if width == 1 {
            multipliers.copy_from_slice(&scales);
        } else {
            for (part, &scale) in multipliers.chunks_mut(width).zip(&scales) {
                part.fill(scale);
            }
        }
        for row in first..end {
            let codes = &mut codes[row * cols..][..cols];
            let values = rect.row(row);
            match random {
                Some((random, start, stride)) if E::STOCHASTIC => {
                    for from in (0..cols).step_by(PART) {
                        let to = (from + PART).min(cols);
                        let bytes = &mut bytes[..to - from];
                        random.fill(start + row * stride + from, bytes);
                        for (i, code) in codes[from..to].iter_mut().enumerate() {
                            let x = values[from + i] * multipliers[from + i];
                            *code = E::encode_stochastic(x, bytes[i]);
                        }
                    }
                }
                _ => {
                    for ((code, &x), &m) in codes.iter_mut().zip(values).zip(&multipliers) {
                        *code = E::encode(x * m);
                    }
                }
            }
        }
    }
}

/// Encodes a row of blocks of `N` columns, each with its own scale.
#[inline(always)]
fn encode_line<const N: usize, E: ElementCode>(
    values: &[f32],
    scales: &[f32],
    codes: &mut [E::Bits],
) -> bool {
    let (codes, values) = (codes.as_chunks_mut::<N>().0, values.as_chunks::<N>().0);
    one_by_one!(block in codes.len().min(values.len()).min(scales.len()) => {
        let (codes, values, scale) = (&mut codes[block], &values[block], scales[block]);
        for i in 0..N {
            codes[i] = E::encode(values[i] * scale);
        }
    });
    true
}
