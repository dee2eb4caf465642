//! The inner loop of every encode: block maxima, block scales and element codes of one rectangle.

use lowp_format::Philox;

use super::choose;
use super::convert::{FOUR, Rect, Stream};
use super::lines::Lines;
use super::maxima::block_maxima;
use crate::cpu::ingredients::{ElementCode, ScaleEntry, ScaleKernel};
use crate::lanes::Kernel;
use crate::lanes::{LANES, Lanes};

/// The random bytes of a matrix.
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

/// The random bytes of a rectangle.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RectRandom {
    pub(crate) matrix: Random,
    /// Flat index of the rectangle's first element in the matrix.
    pub(crate) start: usize,
    /// Elements of the matrix from one row to the next.
    pub(crate) stride: usize,
}

impl RectRandom {
    /// Fills `out` with the bytes of row `row` of the rectangle, from column `col` on.
    #[inline(always)]
    fn fill(&self, row: usize, col: usize, out: &mut [u8]) {
        self.matrix.fill(self.start + row * self.stride + col, out);
    }
}

/// Where codes are written.
pub(crate) enum Codes<'a, T> {
    /// A matrix of codes whose rows are `stride` apart.
    Matrix { values: &'a mut [T], stride: usize },
    /// Packed rows, `stride` bytes apart; `row` is scratch for the codes of one.
    Packed {
        row: &'a mut [T],
        bytes: &'a mut [u8],
        stride: usize,
    },
}

impl<T> Codes<'_, T> {
    /// Room for the `cols` codes of row `row`.
    #[inline(always)]
    fn row(&mut self, row: usize, cols: usize) -> &mut [T] {
        match self {
            Codes::Matrix { values, stride } => &mut values[row * *stride..][..cols],
            Codes::Packed { row, .. } => &mut row[..cols],
        }
    }

    /// Ends row `row`, of `cols` codes.
    #[inline(always)]
    fn finish<E: ElementCode<Bits = T>, L: Lanes>(&mut self, lanes: L, row: usize, cols: usize) {
        if let Codes::Packed {
            row: codes,
            bytes,
            stride,
        } = self
        {
            let bytes = &mut bytes[row * *stride..][..E::CODE.bytes(cols)];
            E::pack(lanes, &codes[..cols], bytes);
        }
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
    pub(super) rules: Lines<'a, R>,
    /// Block rows x columns; unused without block scales.
    pub(crate) block: [usize; 2],
    /// Rounded source values.
    pub(crate) rect: Rect<'a>,
    /// Of stochastic rounding.
    pub(crate) random: Option<RectRandom>,
    /// Output: one code per element.
    pub(crate) codes: Codes<'a, E::Bits>,
    /// Output: one entry per block, dense.
    pub(crate) entries: &'a mut [R::Entry],
    pub(crate) scratch: &'a mut Scratch,
    /// What is read next.
    pub(crate) ahead: Option<Stream>,
}

/// Columns that share one set of random bytes on the stack.
const PART: usize = 256;

impl<E: ElementCode, R: ScaleKernel> Kernel for Quantize<'_, E, R> {
    type Out = ();

    #[inline(always)]
    fn run<L: Lanes>(mut self, lanes: L) {
        let Self { rules, rect, .. } = self;
        if rect.rows == 0 || rect.cols == 0 {
            return;
        }
        if R::BLOCKS {
            return self.blocks(lanes);
        }
        let multipliers = &mut self.scratch.multipliers;
        multipliers.clear();
        if let Lines::Cols(rules) = rules {
            multipliers.extend(rules.iter().map(|rule| rule.encode::<E>(0.0).1));
        }
        for row in 0..rect.rows {
            let multiplier = match rules {
                Lines::Cols(_) => None,
                rules => Some(rules.at(row, 0).encode::<E>(0.0).1),
            };
            let (values, codes) = (rect.row(row), self.codes.row(row, rect.cols));
            let ahead = self.ahead;
            match (self.random, multiplier) {
                (Some(random), multiplier) if E::STOCHASTIC => {
                    if let Some(multiplier) = multiplier {
                        multipliers.clear();
                        multipliers.resize(rect.cols, multiplier);
                    }
                    encode_stochastic::<E>(values, multipliers, random, row, codes);
                }
                (_, Some(multiplier)) if E::SCALED => {
                    let multiplier = OneMultiplier(multiplier);
                    encode_row::<E, L>(lanes, values, multiplier, ahead, row, codes);
                }
                (_, None) => {
                    encode_row::<E, L>(lanes, values, Columns(multipliers), ahead, row, codes);
                }
                _ => {
                    for (code, &x) in codes.iter_mut().zip(values) {
                        *code = E::encode(x);
                    }
                }
            }
            self.codes.finish::<E, L>(lanes, row, rect.cols);
        }
    }
}

impl<E: ElementCode, R: ScaleKernel> Quantize<'_, E, R> {
    #[inline(always)]
    fn blocks<L: Lanes>(self, lanes: L) {
        let Self {
            rules,
            block: [height, width],
            rect,
            random,
            mut codes,
            entries,
            scratch,
            ahead,
        } = self;
        let cols = rect.cols;
        let across = cols.div_ceil(width);
        let Scratch {
            columns,
            maxima,
            scales,
            multipliers,
        } = scratch;
        let blocks = entries.len();
        columns.resize(cols, 0.0);
        maxima.resize(blocks, 0.0);
        scales.resize(blocks, 0.0);
        multipliers.resize(cols, 0.0);
        let groups = || {
            (0..rect.rows)
                .step_by(height)
                .map(|first| first..(first + height).min(rect.rows))
        };
        for (rows, maxima) in groups().zip(maxima.chunks_exact_mut(across)) {
            block_maxima(lanes, &rect, rows, width, columns, maxima);
        }
        match rules {
            Lines::One(rule) if !R::CHOOSES => {
                block_scales::<E, R, L>(lanes, rule, maxima, entries, scales);
            }
            _ => {
                let lines = entries
                    .chunks_exact_mut(across)
                    .zip(scales.chunks_exact_mut(across));
                let groups = groups().zip(maxima.chunks_exact(across));
                for ((rows, maxima), (entries, scales)) in groups.zip(lines) {
                    let first = rows.start;
                    let rule = |i: usize| rules.at(first, i * width);
                    if R::CHOOSES
                        && let (Some(any), Some(entries)) =
                            (rule(0).choice(), R::Entry::as_bytes(entries))
                    {
                        let rules = |i| rule(i).choice().unwrap_or(any);
                        let (rect, block) = (rect.rows(rows), [height, width]);
                        choose::block_scales(lanes, rules, rect, block, maxima, entries, scales);
                    } else if let Lines::Cols(_) = rules {
                        let blocks = maxima.iter().zip(entries).zip(scales).enumerate();
                        for (i, ((&amax, entry), scale)) in blocks {
                            (*entry, *scale) = rule(i).encode::<E>(amax);
                        }
                    } else {
                        block_scales::<E, R, L>(lanes, rule(0), maxima, entries, scales);
                    }
                }
            }
        }
        for (rows, scales) in groups().zip(scales.chunks_exact(across)) {
            let lines = random.is_none() && width.is_multiple_of(LANES);
            let multipliers: &[f32] = if width == 1 {
                scales
            } else {
                if !lines {
                    for (part, &scale) in multipliers.chunks_mut(width).zip(scales) {
                        part.fill(scale);
                    }
                }
                multipliers
            };
            for row in rows {
                let (values, out) = (rect.row(row), codes.row(row, cols));
                match random {
                    Some(random) if E::STOCHASTIC => {
                        encode_stochastic::<E>(values, multipliers, random, row, out);
                    }
                    _ if lines => match width {
                        16 => {
                            let multipliers = Blocks::<16>(scales);
                            encode_row::<E, L>(lanes, values, multipliers, ahead, row, out);
                        }
                        32 => {
                            let multipliers = Blocks::<32>(scales);
                            encode_row::<E, L>(lanes, values, multipliers, ahead, row, out);
                        }
                        _ => {
                            let blocks = values.chunks(width).zip(out.chunks_mut(width));
                            for ((values, codes), &scale) in blocks.zip(scales) {
                                let multiplier = OneMultiplier(scale);
                                encode_row::<E, L>(lanes, values, multiplier, None, 0, codes);
                            }
                        }
                    },
                    _ => encode_row::<E, L>(lanes, values, Columns(multipliers), ahead, row, out),
                }
                codes.finish::<E, L>(lanes, row, cols);
            }
        }
    }
}

/// The stored scales and the multipliers of blocks.
#[inline(always)]
fn block_scales<E: ElementCode, R: ScaleKernel, L: Lanes>(
    lanes: L,
    rule: R,
    maxima: &[f32],
    entries: &mut [R::Entry],
    scales: &mut [f32],
) {
    let (max_lines, maxima) = maxima.as_chunks::<LANES>();
    let (entry_lines, entries) = entries.as_chunks_mut::<LANES>();
    let (scale_lines, scales) = scales.as_chunks_mut::<LANES>();
    for ((max, entry), scale) in max_lines.iter().zip(entry_lines).zip(scale_lines) {
        let multipliers = rule.encode_lanes::<E, L>(lanes, lanes.load(max), entry);
        lanes.store(multipliers, scale);
    }
    for ((&max, entry), scale) in maxima.iter().zip(entries).zip(scales) {
        (*entry, *scale) = rule.encode::<E>(max);
    }
}

/// The multipliers of a row, line by line.
pub(super) trait Multipliers<L: Lanes>: Copy {
    /// Those of the line that begins at column `col`.
    fn line(self, lanes: L, col: usize) -> L::F;
    /// The multiplier of column `col`.
    fn one(self, col: usize) -> f32;
}

/// One multiplier for all columns.
#[derive(Clone, Copy)]
struct OneMultiplier(f32);

impl<L: Lanes> Multipliers<L> for OneMultiplier {
    #[inline(always)]
    fn line(self, lanes: L, _: usize) -> L::F {
        lanes.splat(self.0)
    }
    #[inline(always)]
    fn one(self, _: usize) -> f32 {
        self.0
    }
}

/// One multiplier for `N` columns, whole lines.
#[derive(Clone, Copy)]
struct Blocks<'a, const N: usize>(&'a [f32]);

impl<L: Lanes, const N: usize> Multipliers<L> for Blocks<'_, N> {
    #[inline(always)]
    fn line(self, lanes: L, col: usize) -> L::F {
        lanes.splat(self.0[col / N])
    }
    #[inline(always)]
    fn one(self, col: usize) -> f32 {
        self.0[col / N]
    }
}

/// A multiplier for every column.
#[derive(Clone, Copy)]
pub(super) struct Columns<'a>(pub(super) &'a [f32]);

impl<L: Lanes> Multipliers<L> for Columns<'_> {
    #[inline(always)]
    fn line(self, lanes: L, col: usize) -> L::F {
        lanes.load(&self.0.as_chunks().0[col / LANES])
    }
    #[inline(always)]
    fn one(self, col: usize) -> f32 {
        self.0[col]
    }
}

/// Encodes a row, and asks for row `row` of `ahead`, which is read next.
#[inline(always)]
pub(super) fn encode_row<E: ElementCode, L: Lanes>(
    lanes: L,
    values: &[f32],
    multipliers: impl Multipliers<L>,
    ahead: Option<Stream>,
    row: usize,
    codes: &mut [E::Bits],
) {
    let (fours, values) = values.as_chunks::<FOUR>();
    let (code_fours, codes) = codes.as_chunks_mut::<FOUR>();
    for (i, (four, codes)) in fours.iter().zip(code_fours).enumerate() {
        if let Some(stream) = ahead {
            stream.prefetch(lanes, row, i * FOUR);
        }
        let mut x = [lanes.splat(0.0); 4];
        for (j, line) in four.as_chunks::<LANES>().0.iter().enumerate() {
            let multiplier = multipliers.line(lanes, (4 * i + j) * LANES);
            x[j] = lanes.mul(lanes.load(line), multiplier);
        }
        E::encode_four(lanes, x, codes);
    }
    let col = fours.len() * FOUR;
    let (lines, values) = values.as_chunks::<LANES>();
    let (code_lines, codes) = codes.as_chunks_mut::<LANES>();
    for (i, (line, codes)) in lines.iter().zip(code_lines).enumerate() {
        let multiplier = multipliers.line(lanes, col + i * LANES);
        E::encode_lanes(lanes, lanes.mul(lanes.load(line), multiplier), codes);
    }
    let col = col + lines.len() * LANES;
    for (i, (code, &x)) in codes.iter_mut().zip(values).enumerate() {
        *code = E::encode(x * multipliers.one(col + i));
    }
}

/// Encodes row `row` of a rectangle with one multiplier per column and its random bytes.
#[inline(always)]
fn encode_stochastic<E: ElementCode>(
    values: &[f32],
    multipliers: &[f32],
    random: RectRandom,
    row: usize,
    codes: &mut [E::Bits],
) {
    let mut bytes = [0u8; PART];
    let parts = values.chunks(PART).zip(multipliers.chunks(PART));
    for (n, ((values, multipliers), codes)) in parts.zip(codes.chunks_mut(PART)).enumerate() {
        let bytes = &mut bytes[..values.len()];
        random.fill(row, n * PART, bytes);
        for (i, code) in codes.iter_mut().enumerate() {
            *code = E::encode_stochastic(values[i] * multipliers[i], bytes[i]);
        }
    }
}
