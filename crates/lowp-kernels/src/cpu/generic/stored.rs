//! [`Stored`]: lines of values as they lie in memory.

use half::bf16;

use super::convert::narrow;
use crate::lanes::{LANES, Lanes, Line};

/// A stored state, gradient or sum. What is absent is `()`, which reads as zero.
pub(super) trait Stored: Copy + Default {
    fn load<L: Lanes>(lanes: L, line: &[Self; LANES]) -> L::F;
    fn store<L: Lanes>(lanes: L, x: L::F, line: &mut [Self; LANES]);
}

impl Stored for () {
    #[inline(always)]
    fn load<L: Lanes>(lanes: L, _: &[(); LANES]) -> L::F {
        lanes.splat(0.0)
    }
    #[inline(always)]
    fn store<L: Lanes>(_: L, _: L::F, _: &mut [(); LANES]) {}
}

impl Stored for f32 {
    #[inline(always)]
    fn load<L: Lanes>(lanes: L, line: &Line) -> L::F {
        lanes.load(line)
    }
    #[inline(always)]
    fn store<L: Lanes>(lanes: L, x: L::F, line: &mut Line) {
        lanes.store(x, line);
    }
}

impl Stored for bf16 {
    #[inline(always)]
    fn load<L: Lanes>(lanes: L, line: &[bf16; LANES]) -> L::F {
        lanes.load_bf16(line)
    }
    #[inline(always)]
    fn store<L: Lanes>(lanes: L, x: L::F, line: &mut [bf16; LANES]) {
        let mut wide = [0.0; LANES];
        lanes.store(x, &mut wide);
        for (to, x) in line.iter_mut().zip(wide) {
            *to = narrow(x);
        }
    }
}
