//! What decoded codes are multiplied by.

use std::ops::Range;

use super::codes::{Ahead, Codes};
use super::lines::Lines;
use crate::cpu::ingredients::{ScaleEntry, ScaleKernel};
use crate::lanes::{Isa, Kernel};
use crate::lanes::{LANES, Lanes, Line};

/// Scales of blocks of `block` rows x columns.
#[derive(Clone, Copy)]
pub(super) struct Scales<'v> {
    pub(super) codes: Codes<'v>,
    pub(super) block: [usize; 2],
}

/// The factors of a row.
#[derive(Clone, Copy)]
pub(super) enum Factors<'f> {
    Columns(Columns<'f>),
    Blocks(Blocks<'f>),
}

/// A kind of [`Factors`].
pub(super) trait Factor: Copy {
    /// Vector `i` of the row, `x`, times its factors.
    fn scale<L: Lanes>(self, lanes: L, i: usize, x: L::F) -> L::F;
}

/// Values stay as they are.
#[derive(Clone, Copy)]
pub(super) struct NoFactor;

impl Factor for NoFactor {
    #[inline(always)]
    fn scale<L: Lanes>(self, _: L, _: usize, x: L::F) -> L::F {
        x
    }
}

/// One factor for every column.
#[derive(Clone, Copy)]
pub(super) struct Columns<'f>(&'f [Line]);

impl Factor for Columns<'_> {
    #[inline(always)]
    fn scale<L: Lanes>(self, lanes: L, i: usize, x: L::F) -> L::F {
        lanes.mul(x, lanes.load(&self.0[i]))
    }
}

/// Factors of `1 << shift` vectors each; the first began `before` vectors ago.
#[derive(Clone, Copy)]
pub(super) struct Blocks<'f> {
    factors: &'f [f32],
    before: usize,
    shift: u32,
}

impl Factor for Blocks<'_> {
    #[inline(always)]
    fn scale<L: Lanes>(self, lanes: L, i: usize, x: L::F) -> L::F {
        let factor = self.factors[(self.before + i) >> self.shift];
        lanes.mul(x, lanes.splat(factor))
    }
}

/// Memory for the factors of up to a number of columns.
pub(super) struct Scratch<'v, R: ScaleKernel> {
    rules: Lines<'v, R>,
    entries: Vec<R::Entry>,
    /// Factors of blocks.
    blocks: Vec<f32>,
    /// Factors of columns, where blocks are no whole vectors.
    columns: Vec<f32>,
}

impl<'v, R: ScaleKernel> Scratch<'v, R> {
    pub(super) fn new(rules: Lines<'v, R>, cols: usize) -> Self {
        // Blocks may be cut at both ends.
        let most = (cols + 2).next_multiple_of(LANES);
        Self {
            rules,
            entries: vec![R::Entry::default(); most],
            blocks: vec![0.0; most],
            columns: vec![],
        }
    }

    /// The scales of `rows` in the columns `cols`, if each column has a line of its own.
    pub(super) fn ahead(
        &self,
        scales: Option<Scales<'_>>,
        rows: Range<usize>,
        cols: Range<usize>,
    ) -> Option<Ahead> {
        let Scales { codes, block } = scales.filter(|_| R::BLOCKS)?;
        let from = R::Entry::BYTES * (rows.start / block[0]);
        let to = R::Entry::BYTES * rows.end.div_ceil(block[0]);
        let single = codes.transposed && block[1] == 1;
        single.then(|| Ahead::new(codes, from..to, cols))
    }

    /// The factors of block row `group`, or of row `row` of the rules where rows have them, in `cols` columns from `col`
    /// on, a multiple of [`LANES`].
    pub(super) fn fill(
        &mut self,
        isa: Isa,
        scales: Option<Scales<'_>>,
        group: usize,
        row: usize,
        [col, cols]: [usize; 2],
    ) -> Factors<'_> {
        let rule = match self.rules {
            Lines::One(rule) => Some(rule),
            Lines::Rows(rules) => rules.get(row).copied(),
            Lines::Cols(_) => None,
        };
        let Some(Scales { codes, block }) = scales.filter(|_| R::BLOCKS) else {
            if let Lines::Cols(rules) = self.rules {
                for (factor, rule) in self.blocks.iter_mut().zip(&rules[col..col + cols]) {
                    *factor = rule.factor(R::Entry::default());
                }
                return Factors::Columns(Columns(self.blocks.as_chunks().0));
            }
            self.decode(isa, rule, 1);
            return Factors::Blocks(Blocks {
                factors: &self.blocks,
                before: 0,
                shift: usize::BITS - 1,
            });
        };
        let width = block[1];
        let first = col / width;
        let count = (col + cols).div_ceil(width) - first;
        self.load(codes, group, first, count);
        match self.rules {
            Lines::Cols(rules) => {
                for i in 0..count {
                    self.blocks[i] = rules[(first + i) * width].factor(self.entries[i]);
                }
            }
            _ => self.decode(isa, rule, count),
        }
        if width == 1 {
            return Factors::Columns(Columns(self.blocks.as_chunks().0));
        }
        let vectors = width / LANES;
        if width.is_multiple_of(LANES) && vectors.is_power_of_two() {
            return Factors::Blocks(Blocks {
                factors: &self.blocks,
                before: col / LANES % vectors,
                shift: vectors.trailing_zeros(),
            });
        }
        self.columns.resize(cols.next_multiple_of(LANES), 0.0);
        let mut rest = &mut self.columns[..cols];
        for (i, &factor) in self.blocks[..count].iter().enumerate() {
            let end = (first + i + 1) * width - col;
            let start = cols - rest.len();
            let (block, after) = rest.split_at_mut((end - start).min(rest.len()));
            block.fill(factor);
            rest = after;
        }
        Factors::Columns(Columns(self.columns.as_chunks().0))
    }

    /// Reads `count` entries of block row `group` from block column `first` on.
    fn load(&mut self, codes: Codes<'_>, group: usize, first: usize, count: usize) {
        let entries = &mut self.entries[..count];
        let size = R::Entry::BYTES;
        if codes.transposed {
            let bytes = &codes.bytes[first * codes.row_bytes + group * size..];
            for (i, entry) in entries.iter_mut().enumerate() {
                let bytes = &bytes[i * codes.row_bytes..][..size];
                R::Entry::load(bytes, std::slice::from_mut(entry));
            }
        } else {
            let start = group * codes.row_bytes + first * size;
            R::Entry::load(&codes.bytes[start..start + count * size], entries);
        }
    }

    /// The factors of the first `count` entries.
    fn decode(&mut self, isa: Isa, rule: Option<R>, count: usize) {
        let Some(rule) = rule else {
            return;
        };
        let len = count.next_multiple_of(LANES);
        isa.run(Decode {
            rule,
            entries: &self.entries[..len],
            factors: &mut self.blocks[..len],
        });
    }
}

/// Whole vectors of entries.
struct Decode<'a, R: ScaleKernel> {
    rule: R,
    entries: &'a [R::Entry],
    factors: &'a mut [f32],
}

impl<R: ScaleKernel> Kernel for Decode<'_, R> {
    type Out = ();
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let entries = self.entries.as_chunks().0;
        for (entries, factors) in entries.iter().zip(self.factors.as_chunks_mut().0) {
            lanes.store(self.rule.decode_lanes(lanes, entries), factors);
        }
    }
}
