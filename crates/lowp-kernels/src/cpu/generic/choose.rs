//! The block scales of four over six (docs/numerics.md 20.1), sixteen blocks (or the sixteen rows of one) at a time: a
//! lane has a block, and the errors of its values are added up in their order.

use lowp_format::four_over_six_rows;

use super::convert::Rect;
use crate::cpu::scaling::ChosenTwoLevel;
use crate::lanes::{LANES, Lanes, Line};

/// The scales and multipliers of one row of blocks, of which block `i` has the rule `rules(i)`: `rect` has its values, no more rows than
/// a block has.
#[inline(always)]
pub(super) fn block_scales<L: Lanes>(
    lanes: L,
    rules: impl Fn(usize) -> ChosenTwoLevel,
    rect: Rect<'_>,
    block: [usize; 2],
    maxima: &[f32],
    entries: &mut [u8],
    multipliers: &mut [f32],
) {
    let step = if block == [LANES, LANES] { 1 } else { LANES };
    for first in (0..maxima.len()).step_by(step) {
        let count = step.min(maxima.len() - first);
        let mut amaxes: Line = [maxima[first]; LANES];
        if step > 1 {
            amaxes = [0.0; LANES];
            amaxes[..count].copy_from_slice(&maxima[first..first + count]);
        }
        let rules = |lane| rules(first + if lane < count { lane } else { 0 });
        let mut candidates = ChosenTwoLevel::candidates(lanes, rules, lanes.load(&amaxes));
        match block {
            // Columns lie side by side.
            [_, 1] => {
                for row in 0..rect.rows {
                    let mut line = [0.0; LANES];
                    line[..count].copy_from_slice(&rect.row(row)[first..first + count]);
                    candidates.add(lanes, lanes.load(&line));
                }
            }
            [1, width] => {
                let values = &rect.row(0)[first * width..(first + count) * width];
                for at in 0..width {
                    let mut line = [0.0; LANES];
                    for (x, values) in line.iter_mut().zip(values.chunks_exact(width)) {
                        *x = values[at];
                    }
                    candidates.add(lanes, lanes.load(&line));
                }
            }
            [_, width] => {
                for at in first * width..(first + 1) * width {
                    let mut line = [0.0; LANES];
                    for (x, row) in line.iter_mut().zip(0..rect.rows) {
                        *x = rect.row(row)[at];
                    }
                    candidates.add(lanes, lanes.load(&line));
                }
            }
        }
        let mut errors = candidates.errors(lanes);
        if step == 1 {
            for errors in &mut errors {
                // Rows that are not there have no error.
                errors[rect.rows..].fill(0.0);
                *errors = [four_over_six_rows(*errors); LANES];
            }
        }
        let (mut codes, mut factors) = ([0; LANES], [0.0; LANES]);
        ChosenTwoLevel::chosen(lanes, &candidates, errors, &mut codes, &mut factors);
        entries[first..first + count].copy_from_slice(&codes[..count]);
        multipliers[first..first + count].copy_from_slice(&factors[..count]);
    }
}
