//! The random Hadamard transform of groups of 16 rows (docs/numerics.md 15): a lane has a column.

use lowp_format::{HADAMARD_ROWS, HADAMARD_SIGNS, hadamard_rows};

use super::convert::Rect;
use crate::lanes::{Isa, Kernel};
use crate::lanes::{LANES, Lanes};

/// `rect`, whose first row begins a group, transformed and rounded to bfloat16, in `scratch`.
pub(super) fn transform<'s>(isa: Isa, rect: Rect<'_>, scratch: &'s mut Vec<f32>) -> Rect<'s> {
    rect.written(scratch, |rect, to| isa.run(Transform { rect, to }))
}

struct Transform<'a> {
    rect: Rect<'a>,
    to: &'a mut [f32],
}

impl Kernel for Transform<'_> {
    type Out = ();
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let Self { rect, to } = self;
        let cols = rect.cols;
        let whole = cols / LANES * LANES;
        for first in (0..rect.rows).step_by(HADAMARD_ROWS) {
            let rows = HADAMARD_ROWS.min(rect.rows - first);
            let group = &mut to[first * cols..][..rows * cols];
            let vectors = if rows == HADAMARD_ROWS { whole } else { 0 };
            for col in (0..vectors).step_by(LANES) {
                let mut x = [lanes.splat(0.0); HADAMARD_ROWS];
                for (i, x) in x.iter_mut().enumerate() {
                    let quarter = if HADAMARD_SIGNS >> i & 1 == 1 {
                        -0.25
                    } else {
                        0.25
                    };
                    if let Some(line) = rect.row(first + i)[col..].first_chunk() {
                        *x = lanes.mul(lanes.load(line), lanes.splat(quarter));
                    }
                }
                for half in [1, 2, 4, 8] {
                    for i in 0..HADAMARD_ROWS {
                        if i & half == 0 {
                            let (a, b) = (x[i], x[i + half]);
                            x[i] = lanes.add(a, b);
                            x[i + half] = lanes.add(a, lanes.mul(b, lanes.splat(-1.0)));
                        }
                    }
                }
                for (i, x) in x.into_iter().enumerate() {
                    if let Some(line) = group[i * cols + col..].first_chunk_mut() {
                        lanes.store(round_bf16(lanes, x), line);
                    }
                }
            }
            // What is left of the columns, and rows that are no whole group.
            if vectors < cols {
                let width = cols - vectors;
                let mut rest = Vec::with_capacity(rows * width);
                for i in 0..rows {
                    rest.extend_from_slice(&rect.row(first + i)[vectors..]);
                }
                hadamard_rows(&mut rest, width);
                for (i, rest) in rest.chunks_exact(width).enumerate() {
                    group[i * cols + vectors..][..width].copy_from_slice(rest);
                }
            }
        }
    }
}

/// To nearest even; a NaN stays one.
#[inline(always)]
fn round_bf16<L: Lanes>(lanes: L, x: L::F) -> L::F {
    let bits = lanes.bits(x);
    let magnitude = lanes.and(bits, lanes.usplat(0x7FFF_FFFF));
    let odd = lanes.and(lanes.shr::<16>(bits), lanes.usplat(1));
    let rounded = lanes.uadd(bits, lanes.uadd(odd, lanes.usplat(0x7FFF)));
    let rounded = lanes.and(rounded, lanes.usplat(0xFFFF_0000));
    let nan = lanes.or(bits, lanes.usplat(0x0040_0000));
    lanes.value(lanes.if_above(magnitude, lanes.usplat(0x7F80_0000), nan, rounded))
}
